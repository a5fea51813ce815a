"""Files of counts: how often a number of samples named each row of each table. `dlrm-bench data counts` writes them;
the most frequently named rows are placed on the device first (--table-counts).

A file is a compressed .npz: `about`, the header as JSON, and for each table, by its number, unsigned
integers [rows].
"""

import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.tables.row_rates import RowRates, counted_rates, row_rates
from dlrm_bench.dlrm.tables.tables import Tables

Counts = NDArray[np.unsignedinteger[Any]]
_MAKE = "make one with 'dlrm-bench data counts'"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """The counts of one file, read table by table."""

    path: Path
    rows: tuple[int, ...]
    """Number of rows of each table."""
    samples: int
    """Number of samples whose ids were counted."""
    data: Mapping[str, Any]
    """Source of the samples, as written by the command that counted: preset, seed and fields of the data."""

    def of_table(self, table: int) -> Counts:
        """Returns the count of each row of a table, unsigned [rows]. ValueError names a damaged file."""
        try:
            with np.load(self.path, allow_pickle=False) as file:
                counts: Counts = file[str(table)]
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{self.path} is damaged at table {table} ({error}): {_MAKE} again") from None
        if counts.shape != (self.rows[table],) or counts.dtype.kind != "u":
            raise ValueError(f"{self.path} is damaged: table {table} has counts {counts.dtype} {list(counts.shape)}")
        return counts

    def rates(self, table: int) -> RowRates:
        """Returns the rate at which a sample names each of a table's rows, in classes."""
        return counted_rates(self.of_table(table), self.samples)

    def row_rates(self, table: int) -> NDArray[np.float32]:
        """Returns the rate at which a sample names each of a table's rows, fp32 [rows]."""
        return row_rates(self.of_table(table), self.samples)


def write_counts(
    path: Path, tables: Tables, counts: Sequence[NDArray[np.uint32]], samples: int, data: Mapping[str, Any]
) -> None:
    """Writes a file of counts atomically. counts: of each table, [rows]. data: as in RowCounts."""
    about = {"names": tables.names, "rows": tables.rows, "samples": samples, "data": dict(data)}
    arrays = {str(table): _smallest(of_table) for table, of_table in enumerate(counts)}
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, about=np.array(json.dumps(about)), **arrays)
    os.replace(partial, path)


def read_counts(path: Path, tables: Tables) -> RowCounts:
    """Opens a file of counts of these tables. ValueError names a file that is not one, or the first table that shows
    that the file belongs to another model."""
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
        names, rows, samples, data = (about[name] for name in ("names", "rows", "samples", "data"))
        if not (isinstance(samples, int) and samples > 0 and len(names) == len(rows)):
            raise ValueError(f"{samples} samples of {len(names)} tables")
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError) as error:
        raise ValueError(f"--table-counts {path} is not a file of counts ({error}): {_MAKE}") from None
    if len(rows) != tables.count:
        raise ValueError(
            f"--table-counts {path} is of another model: it has {len(rows)} tables, not {tables.count}; {_MAKE}"
        )
    for name, own, its_name, its_rows in zip(tables.names, tables.rows, names, rows, strict=True):
        if (name, own) != (its_name, its_rows):
            raise ValueError(
                f"--table-counts {path} is of another model: it has {its_name} of {its_rows} rows, not {name} of {own} "
                f"rows; {_MAKE} with the same --model flags"
            )
    return RowCounts(path=path, rows=tuple(rows), samples=samples, data=data)


def _smallest(counts: NDArray[np.uint32]) -> Counts:
    """Returns the counts in the narrowest type that can hold them."""
    return counts.astype(np.min_scalar_type(int(counts.max(initial=0))))
