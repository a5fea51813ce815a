"""Which rank holds which columns of which table, and the planner that balances it.

The slowest rank sets the pace: everybody waits for its pooled vectors in the all-to-all. FBGEMM picks its kernel for
the widest table of a rank, so a narrow column shard beside whole tables is slow; every rank of a plan has one width.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from dlrm.config import ModelConfig, OptimizerConfig, TableOptimizer

# Measured on one H200 (fbgemm-gpu 1.6.0, 40M-row tables, uniform ids, exact Adagrad, bf16 output, 5.5 million ids):
# microseconds of FBGEMM's forward and backward for a million ids, by shard width, and for each call of a rank's tables.
US_PER_MILLION_IDS = {16: 191.0, 32: 223.0, 64: 367.0, 128: 658.0}
US_PER_CALL = 180.0
# One rank's all-to-all bandwidth; pooled vectors and their gradients each cross once.
ALL_TO_ALL_BYTES_PER_US = 257e3
# Tables of at most so many rows are replicated: their summed gradients are small beside the dense network's.
REPLICATED_ROWS = 256
# Narrower column shards cost as much (the costs above hardly fall any more), and the sorted update does not take them.
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
        """The shards that `rank` holds, in the order in which its pooled columns lie side by side."""
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


def rank_cost_us(shards: Sequence[Shard], model: ModelConfig, global_batch_size: int, pooled_bytes: int) -> float:
    """Predicted microseconds of one rank's embedding work in an iteration: lookup, update and both all-to-alls.

    Other optimizers than exact Adagrad take less, by much the same share on every rank.

    pooled_bytes: of one pooled element on the wire (2 in bf16, 4 in fp32).
    """
    widths = sorted(US_PER_MILLION_IDS)
    compute = US_PER_CALL
    for shard in shards:
        million_ids = global_batch_size * model.multi_hot_sizes[shard.table] / 1e6
        width = next((width for width in widths if shard.columns <= width), widths[-1])
        compute += million_ids * US_PER_MILLION_IDS[width] * max(1.0, shard.columns / widths[-1])
    columns = sum(shard.columns for shard in shards)
    return compute + 2 * global_batch_size * columns * pooled_bytes / ALL_TO_ALL_BYTES_PER_US


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What a plan gives one rank."""

    embedding_us: float
    """Predicted microseconds of embedding work in an iteration, as `rank_cost_us` has them."""
    table_bytes: int
    """fp32 weights, replicated tables included."""
    state_bytes: int
    """Optimizer state of the same tables."""
    columns: int
    """Pooled columns that the rank sends for each sample of the global batch, and whose gradients it receives."""


def rank_loads(
    plan: Plan, model: ModelConfig, optimizer: OptimizerConfig, global_batch_size: int, pooled_bytes: int
) -> list[RankLoad]:
    """The load of each rank. pooled_bytes: as for `rank_cost_us`."""
    replicated = [(model.rows[table], model.embedding_dim) for table in plan.replicated]
    loads = []
    for rank in range(plan.world_size):
        shards = plan.of_rank(rank)
        parts = [*((model.rows[shard.table], shard.columns) for shard in shards), *replicated]
        loads.append(
            RankLoad(
                embedding_us=rank_cost_us(shards, model, global_batch_size, pooled_bytes),
                table_bytes=4 * sum(rows * columns for rows, columns in parts),
                state_bytes=4 * sum(rows * optimizer.state_columns(columns) for rows, columns in parts),
                columns=sum(shard.columns for shard in shards),
            )
        )
    return loads


def make_plan(
    model: ModelConfig,
    world_size: int,
    global_batch_size: int,
    pooled_bytes: int = 2,
    optimizer: TableOptimizer = "adagrad",
) -> Plan:
    """The plan of least predicted cost of the slowest rank, among those of two kinds of ranks.

    Some ranks hold column shards, all of one width, of the hottest tables; the others hold the remaining tables whole.
    All numbers of hot tables, widths and splits of the ranks are tried; within a kind, the most costly shard goes to
    the least loaded rank. Rowwise Adagrad, whose state is of whole rows, splits no table, and only exact Adagrad, whose
    update replicated.py has, replicates any. ValueError if there are fewer shards than ranks at every width.
    """
    dim = model.embedding_dim
    tables = list(range(model.num_features))
    replicated = (
        tuple(t for t in tables if model.rows[t] <= REPLICATED_ROWS)
        if world_size > 1 and optimizer == "adagrad" and dim & (dim - 1) == 0  # what row_sums can add up
        else ()
    )
    if len(tables) - len(replicated) < world_size:
        replicated = ()
    hottest = sorted(set(tables) - set(replicated), key=lambda table: -model.multi_hot_sizes[table])
    splits = (1,) if optimizer == "rowwise_adagrad" else (1, 2, 4, 8)
    widths = [dim // parts for parts in splits if parts == 1 or dim % (NARROWEST * parts) == 0]
    best: tuple[float, tuple[Shard, ...]] | None = None
    for split, width, narrow_ranks in product(range(len(hottest) + 1), widths, range(world_size + 1)):
        wide_ranks = world_size - narrow_ranks
        if (split > 0) != (narrow_ranks > 0) or (split < len(hottest)) != (wide_ranks > 0):
            continue
        narrow = [(table, column, width) for table in hottest[:split] for column in range(0, dim, width)]
        wide = [(table, 0, dim) for table in hottest[split:]]
        if len(narrow) < narrow_ranks or len(wide) < wide_ranks:
            continue
        shards = _place(narrow, range(narrow_ranks), model) + _place(wide, range(narrow_ranks, world_size), model)
        cost = max(
            rank_cost_us([s for s in shards if s.rank == rank], model, global_batch_size, pooled_bytes)
            for rank in range(world_size)
        )
        if best is None or cost < best[0]:
            best = (cost, tuple(sorted(shards)))
    if best is None:
        raise ValueError(
            f"{model.num_features} tables of {dim} columns cannot give each of {world_size} ranks a shard: "
            "use fewer ranks"
        )
    plan = Plan(world_size=world_size, shards=best[1], replicated=replicated)
    plan.check(model)
    return plan


def _place(parts: list[tuple[int, int, int]], ranks: range, model: ModelConfig) -> list[Shard]:
    """Longest processing time first: each part, hottest first, goes to the least loaded rank."""
    load = [(0.0, rank) for rank in ranks]
    shards = []
    for table, column, columns in sorted(parts, key=lambda part: -model.multi_hot_sizes[part[0]]):
        busy, rank = heapq.heappop(load)
        shards.append(Shard(rank=rank, table=table, column=column, columns=columns))
        # A pooled vector costs about as much to send as three ids of its table cost to look up and update.
        heapq.heappush(load, (busy + model.multi_hot_sizes[table] + 3, rank))
    return shards
