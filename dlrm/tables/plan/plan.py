"""Plans: the columns and rows of each table on each rank. costs.py computes the costs of each rank.

FBGEMM picks its kernel for the widest table of a rank, so a narrow column shard beside whole tables is slow; every rank
of a plan therefore has one width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlrm_bench.dlrm.tables.tables import Tables


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Columns [column, column + columns) of one table on one rank: all rows, or every `row_parts`-th from `row_part`
    on.

    Rows at intervals of `row_parts` spread the hot ids, which data sets tend to number first, over all parts.
    """

    rank: int
    table: int
    column: int
    columns: int
    row_part: int = 0
    row_parts: int = 1

    def rows(self, tables: Tables) -> int:
        """Returns the number of the table's rows in this shard."""
        return len(range(self.row_part, tables.rows[self.table], self.row_parts))


@dataclass(frozen=True, slots=True)
class Plan:
    """The shards of the sharded tables, sorted by rank, table and column; the other tables are replicated."""

    world_size: int
    shards: tuple[Shard, ...]
    replicated: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> tuple[Shard, ...]:
        """Returns the shards of `rank`, in the order of its pooled columns."""
        return tuple(shard for shard in self.shards if shard.rank == rank)

    def check(self, tables: Tables) -> None:
        """Raises ValueError unless every element of every sharded table is on exactly one rank, no rank mixes widths,
        and int32 can number the rows of each rank's shards, one shard after another; raw ids need no such numbers."""
        for rank in range(self.world_size):
            widths = {shard.columns for shard in self.of_rank(rank)}
            if len(widths) != 1:
                raise ValueError(f"plan: rank {rank} holds shards of widths {sorted(widths)}; it needs exactly one")
            held = sum(shard.rows(tables) for shard in self.of_rank(rank))
            if held >= 2**31 and not tables.raw_ids:
                raise ValueError(
                    f"plan: rank {rank} holds shards of {held} rows in all, which must stay below 2^31: use more GPUs "
                    f"or {tables.advice or 'smaller tables (--model.table-scale)'}"
                )
        for table in sorted(set(range(tables.count)) - set(self.replicated)):
            of_table = [shard for shard in self.shards if shard.table == table]
            columns_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for shard in of_table:
                columns_of.setdefault((shard.column, shard.columns), []).append((shard.row_part, shard.row_parts))
            end = 0
            for (column, columns), rows in sorted(columns_of.items()):
                if sorted(rows) != [(part, len(rows)) for part in range(len(rows))]:
                    raise ValueError(f"plan: table {table} has a gap or an overlap in the rows of column {column}")
                if len(rows) > tables.rows[table]:
                    raise ValueError(f"plan: table {table} of {tables.rows[table]} rows is in {len(rows)} row parts")
                if column != end:
                    raise ValueError(f"plan: table {table} has a gap or an overlap at column {end}")
                end += columns
            if end != tables.columns:
                raise ValueError(f"plan: table {table} has {end} of {tables.columns} columns")


def bytes_of_rank(
    shards: Sequence[Shard], replicated: Sequence[int], tables: Tables, state_columns: Callable[[int], int]
) -> tuple[int, int]:
    """Returns the bytes of weights, and of optimizer state, of a rank with these shards and the replicated tables."""
    parts = [(shard.rows(tables), shard.columns) for shard in shards]
    parts += [(tables.rows[table], tables.columns) for table in replicated]
    return 4 * sum(rows * n for rows, n in parts), 4 * sum(rows * state_columns(n) for rows, n in parts)


def shards_by_rank(shards: Sequence[Shard], world_size: int) -> list[list[Shard]]:
    """Returns the shards of each rank, in their order."""
    by_rank: list[list[Shard]] = [[] for _ in range(world_size)]
    for shard in shards:
        by_rank[shard.rank].append(shard)
    return by_rank
