"""Planted samples as raw TSV days, so that the whole path from Criteo's raw format on can run without Criteo's
files."""

import gzip
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.dcnv2.data.raw_tsv import DENSE_NAMES, HASH_NAMES, NAMES

FACTOR = np.uint32(2654435761)
"""Odd, so that id -> id * FACTOR mod 2^32 is one-to-one; it turns ids into hashes, and id 0 into 0."""


def raw_file(directory: Path, day: int, zipped: bool) -> Path:
    """Returns the path of a raw day, with Criteo's file name."""
    return directory / (f"day_{day}.gz" if zipped else f"day_{day}")


def open_raw(path: Path) -> IO[bytes]:
    """Opens a raw day for writing, with gzip if its suffix is .gz; the bytes do not depend on the time."""
    return gzip.GzipFile(path, "wb", compresslevel=1, mtime=0) if path.suffix == ".gz" else path.open("wb")  # type: ignore[return-value]


def write_lines(file: IO[bytes], labels: NDArray[np.int32], dense: NDArray[np.float32], ids: NDArray[np.int32]) -> None:
    """Appends n samples: labels [n], dense features [n, 13] as logarithms log(1 + count), ids [n, 26].

    Lines contain the counts, and a hash for each id. Zeros become empty fields, like missing values: this applies to
    the most frequent id of every feature.
    """
    import polars as pl  # here, because only raw days need it

    counts = np.rint(np.expm1(dense.astype(np.float64))).astype(np.int32)
    hashes = ids.astype(np.uint32) * FACTOR
    columns: dict[str, NDArray[np.generic]] = {"label": labels}
    columns |= dict(zip(DENSE_NAMES, counts.T, strict=True))
    columns |= {name: _hexadecimal(column) for name, column in zip(HASH_NAMES, hashes.T, strict=True)}
    table = pl.DataFrame(columns, schema_overrides={"label": pl.Int32}).with_columns(
        pl.col(DENSE_NAMES).replace(0, None), pl.col(HASH_NAMES).replace("00000000", None)
    )
    table.select(NAMES).write_csv(file, separator="\t", include_header=False)


def _hexadecimal(numbers: NDArray[np.uint32]) -> NDArray[np.str_]:
    """Returns each number as eight hexadecimal digits."""
    return np.frombuffer(numbers.astype(">u4").tobytes().hex().encode(), dtype="S8").astype(np.str_)
