"""The keys of an owner's rows of several tables: numbers that it assigns, from 0 on, one table after another; or, of
raw ids, which may be any int64, the table and the id."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.tables import Tables

_MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """The numbers of one owner's rows: number first_rows[t] + i is row part + i * parts of table tables[t]."""

    tables: tuple[int, ...]
    first_rows: tuple[int, ...]
    count: int
    """Number of rows of all tables: numbers are 0 .. count - 1."""
    part: int = 0
    parts: int = 1

    @classmethod
    def of_parts(cls, tables: Tables, ranks: Ranks) -> "RowNumbers":
        """Returns the numbers of this rank's rows if it has every W-th row of each table, W being the number of ranks.
        Each table gets the row count of the rank with the most, so that numbers do not depend on the owner. ValueError
        if the tables have more rows than int32 can count."""
        of_owner = [-(-rows // ranks.world_size) for rows in tables.rows]
        if sum(of_owner) * ranks.world_size >= _MOST:
            raise ValueError(
                f"the tables have {sum(tables.rows)} rows in all, and the static pipeline numbers them with 31 bits: "
                "choose tables of fewer rows, or --pipeline torchrec"
            )
        return cls._of(range(tables.count), of_owner, ranks.rank, ranks.world_size)

    @classmethod
    def of_whole(cls, tables: Tables, held: Sequence[int]) -> "RowNumbers":
        """Returns the numbers of all rows of the tables `held`, in this order."""
        of_table = [tables.rows[table] for table in held]
        assert sum(of_table) < _MOST, "checked with the configuration"
        return cls._of(held, of_table)

    def first(self, rows: int) -> Tensor:
        """Returns the numbers of the first `rows` rows of each table, or of all rows if it has fewer, int32 [N]."""
        ends = [*self.first_rows[1:], self.count]
        firsts = zip(self.first_rows, ends, strict=True)
        return torch.cat([torch.arange(first, min(first + rows, end), dtype=torch.int32) for first, end in firsts])

    @classmethod
    def _of(cls, tables: Sequence[int], rows: Sequence[int], part: int = 0, parts: int = 1) -> "RowNumbers":
        firsts = tuple(accumulate(rows, initial=0))
        return cls(tuple(tables), firsts[:-1], firsts[-1], part, parts)


@dataclass(frozen=True, slots=True)
class RawIds:
    """The keys of one owner's rows if ids are raw: the place of the row's table in `tables`, and the id."""

    tables: tuple[int, ...]
    part: ClassVar[int] = 0
    parts: ClassVar[int] = 1
    """The owner has all rows of its tables, see RowNumbers."""

    @property
    def first_rows(self) -> tuple[int, ...]:
        """Zeros: an id is its own number in its table, see RowNumbers."""
        return (0,) * len(self.tables)
