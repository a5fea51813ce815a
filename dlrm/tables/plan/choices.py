"""Choices that the constraints leave to the planner: the width of each table's shards, and the replicated tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from dlrm_bench.dlrm.tables.plan.constraints import FLAG, Constraints, ShardingKind
from dlrm_bench.dlrm.tables.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """The sharded tables of a candidate, divided into shards of two widths."""

    narrow: Sequence[int]
    wide: Sequence[int]
    narrow_width: int
    wide_width: int


class Choices:
    """The planner's choices under a user's constraints."""

    def __init__(self, tables: Tables, constraints: Constraints, widths: Sequence[int], world_size: int) -> None:
        """widths: the possible widths of shards, the whole table's first."""
        self._tables, self._constraints, self._widths = tables, constraints, widths
        self._world_size, self._dim = world_size, tables.columns
        self.everywhere = self._of_kind("row-wise")
        """Tables that are split by rows over all ranks."""

    def check(self, replicate: bool, split_rows: bool) -> None:
        """Raises ValueError, naming the first constraint that no plan of the run can satisfy.

        replicate, split_rows: whether the run can replicate tables, and split tables by rows.
        """
        for table, constraint in self._constraints.items():
            reason = self._obstacle(table, replicate, split_rows)
            if reason is not None:
                raise ValueError(f"{FLAG} {self._tables.names[table]}={constraint}: {reason}")
        asked = sorted({width for table in self._constraints if (width := self._width(table)) is not None})
        if len(asked) > 2:
            raise ValueError(
                f"{FLAG} ask for shards of {', '.join(map(str, asked))} columns: each rank has one width, and "
                "the ranks of a plan have at most two; choose two"
            )

    def replicated(self, most_rows: int) -> tuple[int, ...]:
        """Returns the tables to replicate: those constrained so, and all free ones with at most `most_rows` rows. A
        replicated table is on the device."""
        return tuple(
            table
            for table, rows in enumerate(self._tables.rows)
            if self._kind(table) == "data-parallel"
            or (self._kind(table) is None and not self._in_host_memory(table) and rows <= most_rows)
        )

    def may_split_rows(self, table: int) -> bool:
        """Whether the planner may split the rows of a table."""
        return self._kind(table) is None

    def halves(self, costliest: Sequence[int]) -> Iterator[Half]:
        """Yields the ways to divide tables, costliest first, into two widths: of those that may be either narrow or
        wide, the n costliest are narrow, for every n. No table is narrow if any is split over all ranks."""
        sharded = [table for table in costliest if table not in self.everywhere]
        for split, (narrow_width, wide_width) in product(range(len(sharded) + 1), self._pairs()):
            narrow = [table for table in sharded if not self._takes(table, wide_width)]
            wide = [table for table in sharded if not self._takes(table, narrow_width)]
            either = [table for table in sharded if table not in narrow and table not in wide]
            if split > len(either) or set(narrow) & set(wide) or (split > 0 and self.everywhere):
                continue
            yield Half(
                narrow=narrow + either[:split],
                wide=wide + either[split:],
                narrow_width=narrow_width,
                wide_width=wide_width,
            )

    def _pairs(self) -> list[tuple[int, int]]:
        """Returns the pairs of widths to try: any width with whole tables, or with the width of a constraint."""
        if self.everywhere:
            return [(self._dim, self._dim)]
        asked = {constraint.columns for constraint in self._constraints.values() if constraint.columns}
        wide = sorted({self._dim} | asked, reverse=True)
        return [(n, w) for n, w in product(self._widths, wide) if n <= w]

    def _takes(self, table: int, width: int) -> bool:
        """Whether a table's shards may have this width."""
        kind, asked = self._kind(table), self._width(table)
        if asked is not None:
            return width == asked
        return kind != "column-wise" or width < self._dim

    def _width(self, table: int) -> int | None:
        """Returns the only width that a table's shards may have; None if there are several."""
        constraint = self._constraints.get(table)
        if constraint is None or constraint.kind is None or constraint.kind == "data-parallel":
            return None
        return constraint.columns if constraint.kind == "column-wise" else self._dim

    def _kind(self, table: int) -> ShardingKind | None:
        constraint = self._constraints.get(table)
        return None if constraint is None else constraint.kind

    def _in_host_memory(self, table: int) -> bool:
        """Whether host memory is to hold some of a table's rows."""
        constraint = self._constraints.get(table)
        return constraint is not None and constraint.device_share not in (None, 1)

    def _of_kind(self, kind: ShardingKind) -> tuple[int, ...]:
        return tuple(table for table in range(self._tables.count) if self._kind(table) == kind)

    def _obstacle(self, table: int, replicate: bool, split_rows: bool) -> str | None:
        """Returns why a table's constraint cannot be satisfied, with the fix; None if it can."""
        kind, asked, narrower = self._kind(table), self._width(table), self._widths[1:]
        if kind == "data-parallel" and not replicate:
            return (
                "the static pipeline replicates tables only on two ranks or more, under exact Adagrad, with a power of "
                "two columns, and not with --peer-memory on one node: choose another sharding"
            )
        if kind == "row-wise" and not split_rows:
            return (
                "the static pipeline splits rows only on two ranks or more, with --presort-ids, without --table-memory "
                "and not with --peer-memory on one node: choose another sharding"
            )
        if kind == "row-wise" and self._tables.rows[table] < self._world_size:
            return f"its {self._tables.rows[table]} rows are fewer than {self._world_size} ranks: choose table-wise"
        if kind == "column-wise" and (not narrower or (asked is not None and asked not in narrower)):
            tables = f"tables of {self._dim} columns"
            if not narrower:
                return f"the static pipeline does not split {tables} with this optimizer: choose table-wise"
            return f"the static pipeline splits {tables} into shards of {', '.join(map(str, narrower))}: choose one"
        if kind == "column-wise" and self.everywhere:
            return "a row-wise table has all its columns on every rank, and a rank has one width: remove one constraint"
        return None
