"""Plans: which rank holds which columns of which table, and the planner that balances them.

The slowest rank sets the pace: everybody waits for its pooled vectors in the all-to-all. FBGEMM picks its kernel for
the widest table of a rank, so a narrow column shard beside whole tables is slow; every rank of a plan has one width.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dlrm_bench.dlrm.config import ModelConfig, OptimizerConfig, TableOptimizer, TrainingConfig
from dlrm_bench.dlrm.gpu_costs import DEFAULT, GpuCosts

# Tables of at most so many rows are replicated: their summed gradients are small beside the dense network's. Not in
# peer memory, where vectors come to other ranks without a collective and that sum would be an iteration's only one:
# 0.469 ms without it, 0.497 with it (2 x H200, 512 samples a GPU, bf16), at little more than half of the CPU time.
REPLICATED_ROWS = 256
# Narrower column shards cost as much (GpuCosts' hardly fall any more), and the sorted update does not take them.
NARROWEST = 16


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Columns [column, column + columns) of one table, all rows, on one rank."""

    rank: int
    table: int
    column: int
    columns: int


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
        """ValueError unless every column of every sharded table lies on exactly one rank and no rank mixes widths."""
        for rank in range(self.world_size):
            widths = {shard.columns for shard in self.of_rank(rank)}
            if len(widths) != 1:
                raise ValueError(f"plan: rank {rank} holds shards of widths {sorted(widths)}; it needs exactly one")
        for table in sorted(set(range(model.num_features)) - set(self.replicated)):
            parts = sorted((shard.column, shard.columns) for shard in self.shards if shard.table == table)
            end = 0
            for column, columns in parts:
                if column != end:
                    raise ValueError(f"plan: table {table} has a gap or an overlap at column {end}")
                end += columns
            if end != model.embedding_dim:
                raise ValueError(f"plan: table {table} has {end} of {model.embedding_dim} columns")


def tables_us(shards: Sequence[Shard], model: ModelConfig, global_batch_size: int, costs: GpuCosts = DEFAULT) -> float:
    """Returns the predicted microseconds of one rank's lookup, sort and update in an iteration, with uniform ids.

    Other optimizers than exact Adagrad take less, by much the same share on every rank.
    """
    return costs.us_per_call + sum(_shard_us(shard, model, global_batch_size, costs) for shard in shards)


def _shard_us(shard: Shard, model: ModelConfig, global_batch_size: int, costs: GpuCosts) -> float:
    widths = sorted(costs.us_per_million_ids)
    width = next((width for width in widths if shard.columns <= width), widths[-1])
    ids, rows = global_batch_size * model.multi_hot_sizes[shard.table], model.rows[shard.table]
    distinct = -rows * math.expm1(-ids / rows)
    million = (distinct + costs.repeated_id * (ids - distinct)) / 1e6
    return million * costs.us_per_million_ids[width] * max(1.0, shard.columns / widths[-1])


def all_to_alls_us(
    columns: int, world_size: int, global_batch_size: int, pooled_bytes: int, costs: GpuCosts = DEFAULT
) -> float:
    """Returns the predicted microseconds of the two all-to-alls of a rank that holds so many columns of pooled vectors.

    Vectors cross once and their gradients once; what a rank sends to itself does not travel. pooled_bytes: of one
    pooled element on the wire (2 in bf16, 4 in fp32).
    """
    if world_size == 1:
        return 0.0
    travels = global_batch_size * columns * pooled_bytes * (world_size - 1) / world_size
    return 2 * (costs.all_to_all_us + travels / costs.all_to_all_bytes_per_us)


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
) -> list[RankLoad]:
    """Returns the load of each rank. pooled_bytes: as for `all_to_alls_us`."""
    loads = []
    for rank in range(plan.world_size):
        shards = plan.of_rank(rank)
        table_bytes, state_bytes = _bytes_of_rank(shards, plan.replicated, model, optimizer.state_columns)
        columns = sum(shard.columns for shard in shards)
        own_us = tables_us(shards, model, global_batch_size, costs)
        exchange_us = all_to_alls_us(columns, plan.world_size, global_batch_size, pooled_bytes, costs)
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


def _bytes_of_rank(
    shards: Sequence[Shard], replicated: Sequence[int], model: ModelConfig, state_columns: Callable[[int], int]
) -> tuple[int, int]:
    """Weights, and optimizer state, of a rank with these shards and the replicated tables."""
    parts = [(model.rows[shard.table], shard.columns) for shard in shards]
    parts += [(model.rows[table], model.embedding_dim) for table in replicated]
    return 4 * sum(rows * n for rows, n in parts), 4 * sum(rows * state_columns(n) for rows, n in parts)


def _by_rank(shards: Sequence[Shard], world_size: int) -> list[list[Shard]]:
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
    world_size: int,
    global_batch_size: int,
    pooled_bytes: int,
    costs: GpuCosts = DEFAULT,
) -> float:
    """Returns the predicted microseconds of all ranks' embedding work: the slowest rank's tables and the largest
    all-to-alls.

    They add up because no rank gets through an all-to-all before all have come to it and the largest sender is done:
    with 800 of 3328 columns on each of four ranks of eight, at GBS 55296 in bf16, gradients took 300 us, not the 157 us
    of equal shares.
    """
    by_rank = _by_rank(shards, world_size)
    columns = max(sum(shard.columns for shard in own) for own in by_rank)
    slowest = max(tables_us(own, model, global_batch_size, costs) for own in by_rank)
    return slowest + all_to_alls_us(columns, world_size, global_batch_size, pooled_bytes, costs)


def plan_for(
    config: TrainingConfig, world_size: int, memory_bytes: int, replicate: bool = True, costs: GpuCosts = DEFAULT
) -> Plan:
    """Returns the balanced plan of a run. memory_bytes, replicate, costs, ValueError: see `make_plan`."""
    return make_plan(
        config.model,
        world_size,
        config.local_batch_size * world_size,
        config.pooled_bytes,
        config.optimizer.embedding,
        memory_bytes,
        replicate,
        costs,
    )


def make_plan(
    model: ModelConfig,
    world_size: int,
    global_batch_size: int,
    pooled_bytes: int = 2,
    optimizer: TableOptimizer = "adagrad",
    memory_bytes: int | None = None,
    replicate: bool = True,
    costs: GpuCosts = DEFAULT,
) -> Plan:
    """Returns the plan of least `iteration_us` among those of two kinds of ranks that fit.

    Some ranks hold column shards, all of one width, of the costliest tables; the others hold the remaining tables
    whole. All numbers of split tables, widths and splits of the ranks are tried; within a kind, the most costly shard
    goes to the least loaded rank. Rowwise Adagrad, whose state is of whole rows, splits no table, and only exact
    Adagrad, whose update replicated.py has, replicates any. memory_bytes: what the tables and optimizer state of one
    rank may take. replicate: whether any table may be. costs: of the GPUs, the same on all ranks. ValueError if there
    are fewer shards than ranks at every width, or no plan fits.
    """
    dim = model.embedding_dim
    tables = list(range(model.num_features))
    replicate = replicate and can_replicate(dim, world_size, optimizer)
    replicated = tuple(t for t in tables if replicate and model.rows[t] <= REPLICATED_ROWS)
    if len(tables) - len(replicated) < world_size:
        replicated = ()
    cost = {t: _shard_us(Shard(0, t, 0, dim), model, global_batch_size, costs) for t in tables if t not in replicated}
    costliest = sorted(cost, key=lambda table: -cost[table])
    splits = (1,) if optimizer == "rowwise_adagrad" else (1, 2, 4, 8)
    widths = [dim // parts for parts in splits if parts == 1 or dim % (NARROWEST * parts) == 0]
    best: tuple[float, tuple[Shard, ...]] | None = None
    least_bytes, state_columns = math.inf, OptimizerConfig(embedding=optimizer).state_columns
    for split, width, narrow_ranks in product(range(len(costliest) + 1), widths, range(world_size + 1)):
        wide_ranks = world_size - narrow_ranks
        if (split > 0) != (narrow_ranks > 0) or (split < len(costliest)) != (wide_ranks > 0):
            continue
        narrow = [Shard(0, table, column, width) for table in costliest[:split] for column in range(0, dim, width)]
        wide = [Shard(0, table, 0, dim) for table in costliest[split:]]
        if len(narrow) < narrow_ranks or len(wide) < wide_ranks:
            continue
        sizes = (model, world_size, global_batch_size, pooled_bytes, costs)
        shards = _place(narrow, range(narrow_ranks), *sizes) + _place(wide, range(narrow_ranks, world_size), *sizes)
        ranks = _by_rank(shards, world_size)
        largest = max(sum(_bytes_of_rank(own, replicated, model, state_columns)) for own in ranks)
        least_bytes = min(least_bytes, largest)
        if memory_bytes is not None and largest > memory_bytes:
            continue
        time = iteration_us(shards, *sizes)
        if best is None or time < best[0]:
            best = (time, tuple(sorted(shards)))
    if best is None and memory_bytes is not None and least_bytes < math.inf:
        raise ValueError(
            f"no plan of {world_size} rank(s) fits: the fullest rank's tables and optimizer state take at least "
            f"{least_bytes / 1e9:.1f} GB of the {memory_bytes / 1e9:.1f} GB that a rank has; use more GPUs or "
            "smaller tables (--model.table-scale)"
        )
    if best is None:
        raise ValueError(
            f"{model.num_features} tables of {dim} columns cannot give each of {world_size} ranks a shard: "
            "use fewer ranks"
        )
    plan = Plan(world_size=world_size, shards=best[1], replicated=replicated)
    plan.check(model)
    return plan


def can_replicate(dim: int, world_size: int, optimizer: TableOptimizer) -> bool:
    """Whether replicated.py can hold tables of so many columns, and there is another rank to share them with."""
    return world_size > 1 and optimizer == "adagrad" and dim & (dim - 1) == 0  # what row_sums can add up


def _place(
    parts: list[Shard],
    ranks: range,
    model: ModelConfig,
    world_size: int,
    global_batch_size: int,
    pooled_bytes: int,
    costs: GpuCosts,
) -> list[Shard]:
    """Longest processing time first: each part, costliest first, goes to the least loaded rank."""
    none = all_to_alls_us(0, world_size, global_batch_size, pooled_bytes, costs)
    cost = {
        part: _shard_us(part, model, global_batch_size, costs)
        + all_to_alls_us(part.columns, world_size, global_batch_size, pooled_bytes, costs)
        - none
        for part in parts
    }
    load = [(0.0, rank) for rank in ranks]
    shards = []
    for part in sorted(parts, key=lambda part: -cost[part]):
        busy, rank = heapq.heappop(load)
        shards.append(replace(part, rank=rank))
        heapq.heappush(load, (busy + cost[part], rank))
    return shards
