"""Plans: which rank holds which columns and rows of which table, and what that costs each rank.

The slowest rank sets the pace: everybody waits for its pooled vectors in the all-to-all. FBGEMM picks its kernel for
the widest table of a rank, so a narrow column shard beside whole tables is slow; every rank of a plan has one width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlrm_bench.dlrm.config import ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.embedding.id_statistics import UNIFORM, IdStatistics
from dlrm_bench.dlrm.gpu_costs import DEFAULT, GpuCosts
from dlrm_bench.dlrm.topology import Topology


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Columns [column, column + columns) of one table on one rank: all rows, or every `row_parts`-th from `row_part`
    on.

    Rows that lie `row_parts` apart spread the hot ids, which data sets tend to number first, over all parts.
    """

    rank: int
    table: int
    column: int
    columns: int
    row_part: int = 0
    row_parts: int = 1

    def rows(self, model: ModelConfig) -> int:
        """Returns how many rows of the table it has."""
        return len(range(self.row_part, model.rows[self.table], self.row_parts))


@dataclass(frozen=True, slots=True)
class Plan:
    """The shards of the sharded tables, sorted by rank, table and column; the other tables are replicated."""

    world_size: int
    shards: tuple[Shard, ...]
    replicated: tuple[int, ...] = ()

    def of_rank(self, rank: int) -> tuple[Shard, ...]:
        """Returns the shards that `rank` holds, in the order in which its pooled columns lie side by side."""
        return tuple(shard for shard in self.shards if shard.rank == rank)

    def check(self, model: ModelConfig) -> None:
        """ValueError unless every element of every sharded table lies on exactly one rank and no rank mixes widths."""
        for rank in range(self.world_size):
            widths = {shard.columns for shard in self.of_rank(rank)}
            if len(widths) != 1:
                raise ValueError(f"plan: rank {rank} holds shards of widths {sorted(widths)}; it needs exactly one")
        for table in sorted(set(range(model.num_features)) - set(self.replicated)):
            of_table = [shard for shard in self.shards if shard.table == table]
            columns_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for shard in of_table:
                columns_of.setdefault((shard.column, shard.columns), []).append((shard.row_part, shard.row_parts))
            end = 0
            for (column, columns), rows in sorted(columns_of.items()):
                if sorted(rows) != [(part, len(rows)) for part in range(len(rows))]:
                    raise ValueError(f"plan: table {table} has a gap or an overlap in the rows of column {column}")
                if len(rows) > model.rows[table]:
                    raise ValueError(f"plan: table {table} of {model.rows[table]} rows is in {len(rows)} row parts")
                if column != end:
                    raise ValueError(f"plan: table {table} has a gap or an overlap at column {end}")
                end += columns
            if end != model.embedding_dim:
                raise ValueError(f"plan: table {table} has {end} of {model.embedding_dim} columns")


def tables_us(
    shards: Sequence[Shard],
    model: ModelConfig,
    global_batch_size: int,
    costs: GpuCosts = DEFAULT,
    ids: IdStatistics = UNIFORM,
) -> float:
    """Returns the predicted microseconds of one rank's lookup, sort and update in an iteration.

    Other optimizers than exact Adagrad take less, by much the same share on every rank. A rank that holds a part of a
    table's rows picks its ids out of those of all its tables first.
    """
    picked = costs.picking_us + sum(picking_us(shard.table, model, global_batch_size, costs) for shard in shards)
    own = sum(shard_us(shard, model, global_batch_size, costs, ids) for shard in shards)
    return costs.us_per_call + own + (picked if any(shard.row_parts > 1 for shard in shards) else 0.0)


def picking_us(table: int, model: ModelConfig, global_batch_size: int, costs: GpuCosts) -> float:
    """Returns the predicted microseconds in which a rank picks out the ids of a table whose rows it has, without the
    fixed part."""
    return global_batch_size * model.multi_hot_sizes[table] / 1e6 * costs.picking_us_per_million_ids


def shard_us(shard: Shard, model: ModelConfig, global_batch_size: int, costs: GpuCosts, ids: IdStatistics) -> float:
    """Returns the predicted microseconds that a shard adds to its rank's lookup, sort and update: of a part of the
    rows, the same part of the whole table's."""
    widths = sorted(costs.us_per_million_ids)
    width = next((width for width in widths if shard.columns <= width), widths[-1])
    hot = model.multi_hot_sizes[shard.table]
    distinct = ids.distinct_rows(model.rows[shard.table], hot, global_batch_size)
    million = (distinct + costs.repeated_id * (global_batch_size * hot - distinct)) / 1e6
    return million * costs.us_per_million_ids[width] * max(1.0, shard.columns / widths[-1]) / shard.row_parts


def all_to_alls_us(
    columns: float, topology: Topology, global_batch_size: int, pooled_bytes: int, costs: GpuCosts = DEFAULT
) -> float:
    """Returns the predicted microseconds of the two all-to-alls of a rank that holds so many columns of pooled vectors.

    Vectors cross once and their gradients once; what a rank sends to itself does not travel. Inside the node they
    travel at the GPU's rate, beside those for other nodes at the network's. pooled_bytes: of one pooled element on the
    wire (2 in bf16, 4 in fp32).
    """
    if topology.world_size == 1:
        return 0.0
    to_each = global_batch_size * columns * pooled_bytes / topology.world_size
    inside = costs.all_to_all_us + to_each * (topology.gpus_per_node - 1) / costs.all_to_all_bytes_per_us
    return 2 * max(inside, topology.between_nodes_us(to_each))


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The work and the memory that a plan gives one rank."""

    tables_us: float
    """Returns the predicted microseconds of lookup, sort and update in an iteration."""
    embedding_us: float
    """The same and the rank's own all-to-alls."""
    table_bytes: int
    """fp32 weights, replicated tables included."""
    state_bytes: int
    """Optimizer state of the same tables."""
    columns: int
    """Pooled columns that the rank sends for each sample of the global batch, and whose gradients it receives."""


def rank_loads(
    plan: Plan,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    global_batch_size: int,
    pooled_bytes: int,
    costs: GpuCosts = DEFAULT,
    topology: Topology | None = None,
    ids: IdStatistics = UNIFORM,
) -> list[RankLoad]:
    """Returns the load of each rank. pooled_bytes: as for `all_to_alls_us`. topology: None is one node. ids: how often
    they name the same rows."""
    loads, topology = [], topology or Topology.one_node(plan.world_size)
    for rank in range(plan.world_size):
        shards = plan.of_rank(rank)
        table_bytes, state_bytes = bytes_of_rank(shards, plan.replicated, model, optimizer.state_columns)
        columns = sum(shard.columns for shard in shards)
        own_us = tables_us(shards, model, global_batch_size, costs, ids)
        exchange_us = all_to_alls_us(columns, topology, global_batch_size, pooled_bytes, costs)
        loads.append(
            RankLoad(
                tables_us=own_us,
                embedding_us=own_us + exchange_us,
                table_bytes=table_bytes,
                state_bytes=state_bytes,
                columns=columns,
            )
        )
    return loads


def bytes_of_rank(
    shards: Sequence[Shard], replicated: Sequence[int], model: ModelConfig, state_columns: Callable[[int], int]
) -> tuple[int, int]:
    """Returns the bytes of weights, and of optimizer state, of a rank with these shards and the replicated tables."""
    parts = [(shard.rows(model), shard.columns) for shard in shards]
    parts += [(model.rows[table], model.embedding_dim) for table in replicated]
    return 4 * sum(rows * n for rows, n in parts), 4 * sum(rows * state_columns(n) for rows, n in parts)


def shards_by_rank(shards: Sequence[Shard], world_size: int) -> list[list[Shard]]:
    """Returns the shards of each rank, in their order."""
    by_rank: list[list[Shard]] = [[] for _ in range(world_size)]
    for shard in shards:
        by_rank[shard.rank].append(shard)
    return by_rank


def imbalance(times: Sequence[float]) -> float:
    """Returns the largest by the mean: 1 where all ranks have as much to do."""
    return max(times) * len(times) / sum(times)


def iteration_us(
    shards: Sequence[Shard],
    model: ModelConfig,
    topology: Topology,
    global_batch_size: int,
    pooled_bytes: int,
    costs: GpuCosts = DEFAULT,
    ids: IdStatistics = UNIFORM,
) -> float:
    """Returns the predicted microseconds of all ranks' embedding work: the slowest rank's tables and the largest
    all-to-alls.

    They add up because no rank gets through an all-to-all before all have come to it and the largest sender is done:
    with 800 of 3328 columns on each of four ranks of eight, at GBS 55296 in bf16, gradients took 300 us, not the 157 us
    of equal shares.
    """
    by_rank = shards_by_rank(shards, topology.world_size)
    columns = max(sum(shard.columns for shard in own) for own in by_rank)
    slowest = max(tables_us(own, model, global_batch_size, costs, ids) for own in by_rank)
    return slowest + all_to_alls_us(columns, topology, global_batch_size, pooled_bytes, costs)
