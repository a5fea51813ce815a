"""Costs of a plan for each rank: lookup, sort and update of its tables by our kernels, its all-to-alls, its memory.

The slowest rank sets the pace: all ranks wait for its pooled vectors in the all-to-all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_bench.dlrm.optimizers import TableOptimizer
from dlrm_bench.dlrm.runtime.gpu_types import DEFAULT_COSTS, GpuCosts
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.id_statistics import UNIFORM, IdStatistics
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard, bytes_of_rank, shards_by_rank
from dlrm_bench.dlrm.tables.plan.sort_shares import SavedBySharing
from dlrm_bench.dlrm.tables.tables import Tables

_VECTOR_BYTES = 2
"""Bytes per element of the pooled vectors' gradients in bf16, which the update reads once for each id."""
_LEAST_COLUMNS = 32
"""A lookup reads whole lines of 128 bytes from memory, even for narrower rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTimes:
    """Microseconds of one rank's tables in an iteration."""

    lookup: float
    sort: float
    update: float
    picking: float
    """Finding the ids whose rows this rank has, if tables are split by rows."""

    @property
    def all(self) -> float:
        """Their sum."""
        return self.lookup + self.sort + self.update + self.picking


def table_times(
    shards: Sequence[Shard],
    tables: Tables,
    global_batch_size: int,
    costs: GpuCosts = DEFAULT_COSTS,
    ids: IdStatistics = UNIFORM,
    saved_us: float = 0.0,
) -> TableTimes:
    """Returns the predicted times of one rank's kernels. ids: how often they repeat rows. saved_us: of the sort, as
    other ranks share it (sort_shares.py).

    Optimizers other than exact Adagrad take less, by a similar share on every rank. A rank that holds part of a table's
    rows first picks its ids from the ids of all its tables.
    """
    parts = [shard_times(shard, tables, global_batch_size, costs, ids) for shard in shards]
    picking = 0.0
    if any(shard.row_parts > 1 for shard in shards):
        picking = costs.picking_us + sum(picking_us(shard.table, tables, global_batch_size, costs) for shard in shards)
    return TableTimes(
        lookup=costs.lookup_us + sum(part.lookup for part in parts),
        sort=costs.sort_us + sum(part.sort for part in parts) - saved_us,
        update=costs.update_us + sum(part.update for part in parts),
        picking=picking,
    )


def shard_times(shard: Shard, tables: Tables, global_batch_size: int, costs: GpuCosts, ids: IdStatistics) -> TableTimes:
    """Returns the times that a shard adds to its rank, without picking: for a part of the rows, that share of the whole
    table's times.

    For the lookup, a row that the batch names comes from memory once, and from the cache for its further ids; for the
    update it is read and written with its Adagrad state, and each id's gradient comes from the cache.
    """
    hot, share = tables.hot[shard.table], 1 / shard.row_parts
    num_ids = share * global_batch_size * hot
    distinct = share * ids.distinct_rows(tables.rows[shard.table], hot, global_batch_size)
    memory, cache = costs.memory_bytes_per_us, costs.cache_bytes_per_us
    read = 4 * max(shard.columns, _LEAST_COLUMNS) * distinct / memory + 4 * shard.columns * (num_ids - distinct) / cache
    gradients = _VECTOR_BYTES * shard.columns * num_ids / cache
    updated = 16 * shard.columns * distinct / memory
    return TableTimes(
        lookup=read,
        sort=costs.sort_us_per_million_ids * num_ids / 1e6,
        update=updated + gradients + costs.update_us_per_million_ids * num_ids / 1e6,
        picking=0.0,
    )


def tables_us(
    shards: Sequence[Shard],
    tables: Tables,
    global_batch_size: int,
    costs: GpuCosts = DEFAULT_COSTS,
    ids: IdStatistics = UNIFORM,
    saved_us: float = 0.0,
) -> float:
    """Returns the sum of `table_times`."""
    return table_times(shards, tables, global_batch_size, costs, ids, saved_us).all


def picking_us(table: int, tables: Tables, global_batch_size: int, costs: GpuCosts) -> float:
    """Returns the predicted microseconds in which a rank picks out the ids of a table whose rows it has, without the
    fixed part."""
    return global_batch_size * tables.hot[table] / 1e6 * costs.picking_us_per_million_ids


def shard_us(shard: Shard, tables: Tables, global_batch_size: int, costs: GpuCosts, ids: IdStatistics) -> float:
    """Returns the sum of `shard_times`."""
    return shard_times(shard, tables, global_batch_size, costs, ids).all


def all_to_alls_us(
    columns: float, topology: Topology, global_batch_size: int, pooled_bytes: int, costs: GpuCosts = DEFAULT_COSTS
) -> float:
    """Returns the predicted microseconds of the two all-to-alls of a rank that holds `columns` columns of pooled
    vectors.

    Vectors cross once and their gradients once; a rank's own part does not travel. Within the node they travel at the
    GPU's rate, in parallel with those for other nodes at the network's rate. pooled_bytes: of one pooled element in
    transit (2 in bf16, 4 in fp32).
    """
    if topology.world_size == 1:
        return 0.0
    to_each = global_batch_size * columns * pooled_bytes / topology.world_size
    inside = costs.all_to_all_us + to_each * (topology.gpus_per_node - 1) / costs.all_to_all_bytes_per_us
    return 2 * max(inside, topology.between_nodes_us(to_each))


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The work and the memory of one rank in a plan."""

    tables_us: float
    """Predicted microseconds of lookup, sort and update in an iteration."""
    embedding_us: float
    """Time of the tables and of the rank's own all-to-alls."""
    table_bytes: int
    """fp32 weights, replicated tables included."""
    state_bytes: int
    """Optimizer state of the same tables."""
    columns: int
    """Pooled columns that the rank sends for each sample of the global batch, and whose gradients it receives."""


def rank_loads(
    plan: Plan,
    tables: Tables,
    optimizer: TableOptimizer,
    global_batch_size: int,
    pooled_bytes: int,
    costs: GpuCosts = DEFAULT_COSTS,
    topology: Topology | None = None,
    ids: IdStatistics = UNIFORM,
    in_tiers: bool = False,
) -> list[RankLoad]:
    """Returns the load of each rank. pooled_bytes: as for `all_to_alls_us`. topology: None is one node. ids: how often
    they repeat rows. in_tiers: whether rows are on two tiers of memory (tier_costs.py computes the exchanges)."""
    loads, topology = [], topology or Topology.one_node(plan.world_size)
    by_rank = shards_by_rank(plan.shards, plan.world_size)
    times = _ranks_us(by_rank, tables, topology, global_batch_size, costs, ids, in_tiers)
    for shards, own_us in zip(by_rank, times, strict=True):
        table_bytes, state_bytes = bytes_of_rank(shards, plan.replicated, tables, optimizer.state_columns)
        columns = sum(shard.columns for shard in shards)
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


def imbalance(times: Sequence[float]) -> float:
    """Returns the ratio of the maximum to the mean: 1 if all ranks have equal work."""
    return max(times) * len(times) / sum(times)


def iteration_us(
    shards: Sequence[Shard],
    tables: Tables,
    topology: Topology,
    global_batch_size: int,
    pooled_bytes: int,
    costs: GpuCosts = DEFAULT_COSTS,
    ids: IdStatistics = UNIFORM,
    in_tiers: bool = False,
) -> float:
    """Returns the predicted microseconds of all ranks' embedding work: the slowest rank's tables and the largest
    all-to-alls. in_tiers: as for `rank_loads`.

    They add up because no rank finishes an all-to-all before all ranks have reached it and the largest sender is done:
    with 800 of 3328 columns on each of four of eight ranks, at GBS 55296 in bf16, gradients took 300 us, not the 157 us
    of equal shares.
    """
    by_rank = shards_by_rank(shards, topology.world_size)
    columns = max(sum(shard.columns for shard in own) for own in by_rank)
    times = _ranks_us(by_rank, tables, topology, global_batch_size, costs, ids, in_tiers)
    return max(times) + all_to_alls_us(columns, topology, global_batch_size, pooled_bytes, costs)


def _ranks_us(
    by_rank: Sequence[Sequence[Shard]],
    tables: Tables,
    topology: Topology,
    global_batch_size: int,
    costs: GpuCosts,
    ids: IdStatistics,
    in_tiers: bool,
) -> list[float]:
    """Returns each rank's `tables_us`, where ranks share their sorts."""
    saved = SavedBySharing(tables, global_batch_size, costs).us(by_rank, topology, in_tiers)
    return [tables_us(own, tables, global_batch_size, costs, ids, us) for own, us in zip(by_rank, saved, strict=True)]
