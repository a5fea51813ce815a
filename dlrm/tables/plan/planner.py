"""The planner: among plans with two kinds of ranks, finds the one with the shortest predicted embedding work.

Some ranks hold column shards, all of one width, of the costliest tables; the others hold the remaining tables whole. If
there are too many ranks for that, tables are split by rows as well, each into enough parts to reduce its shards to a
rank's share of the work.

No rank holds shards of two widths, because that gains nothing: with MLPerf's tables, placing all shards of a candidate
on all ranks leaves the best plans of 2 to 64 ranks unchanged, at 512 samples a GPU and at a global batch of 135168, for
uniform and for expanded ids. These plans have one width on all ranks. By FBGEMM's costs, which fall less with narrower
shards, mixing saved up to 3 % on two ranks, 0.7 % on 8 and nothing on 16 to 128.

If rows are on two tiers of memory (--table-memory), exchanges with host memory are work too, and are counted in rows: a
missing row takes the same time at any width, so that each rank with some of its columns pays as much as a rank with all
of them. Ranks then balance embedding work and exchanges (improve.py), and each sorts its own ids.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product

from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.optimizers import Adagrad, RowWiseAdagrad, TableOptimizer
from dlrm_bench.dlrm.runtime.gpu_types import DEFAULT_COSTS, GpuCosts
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.id_statistics import UNIFORM, IdStatistics
from dlrm_bench.dlrm.tables.plan.choices import Choices
from dlrm_bench.dlrm.tables.plan.constraints import FLAG, NO_CONSTRAINTS, Constraints, described
from dlrm_bench.dlrm.tables.plan.improve import fastest
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard, bytes_of_rank, shards_by_rank
from dlrm_bench.dlrm.tables.plan.tier_costs import Exchanges, table_rates
from dlrm_bench.dlrm.tables.plan.work import Work
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory

# Tables of at most this number of rows are replicated: their summed gradients are small compared with the dense
# network's. Not with peer memory, where vectors reach other ranks without a collective and that sum would be an
# iteration's only collective: 0.469 ms without it, 0.497 with it (2 x H200, 512 samples a GPU, bf16), at little more
# than half of the CPU time.
REPLICATED_ROWS = 256
# Narrower column shards cost as much (GpuCosts' times hardly fall any more), and the sorted update rejects them.
NARROWEST = 16
# A plan that splits rows must be faster by this factor than the best plan that does not: every rank with a part looks
# at all ids of the table, and pooled vectors of the parts are summed only on the ranks of their samples.
_ROWS_GAIN = 0.9
_EXACT = Adagrad(1e-8)
# Maximum work of one shard to try, relative to a rank's share of all work.
_LARGEST_SHARDS = tuple(0.12 * 1.12**step for step in range(32))


def plan_for(
    config: TrainingConfig,
    topology: Topology,
    memory_bytes: int | None,
    replicate: bool = True,
    split_rows: bool = False,
    costs: GpuCosts = DEFAULT_COSTS,
    constraints: Constraints = NO_CONSTRAINTS,
    split_columns: bool = True,
    tiers: TableMemory | None = None,
) -> Plan:
    """Returns the balanced plan of a run, with the id statistics of its data. Other arguments and ValueError: see
    `make_plan`."""
    return make_plan(
        config.model.tables,
        topology,
        config.local_batch_size * topology.world_size,
        config.pooled_bytes,
        config.optimizer.tables,
        memory_bytes,
        replicate,
        split_rows,
        costs,
        config.data.id_statistics,
        constraints,
        split_columns,
        tiers,
    )


@dataclass(frozen=True, slots=True)
class _Grid:
    """A whole table, divided into equal shards."""

    shard: Shard

    def count(self, dim: int) -> int:
        """Returns the number of shards of a table of `dim` columns."""
        return dim // self.shard.columns * self.shard.row_parts

    def shards(self, dim: int) -> list[Shard]:
        """Returns the shards."""
        one = self.shard
        return [
            Shard(0, one.table, column, one.columns, part, one.row_parts)
            for column in range(0, dim, one.columns)
            for part in range(one.row_parts)
        ]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Tables divided in two ways, and the number of ranks for the first way."""

    narrow: list[_Grid]
    wide: list[_Grid]
    narrow_ranks: int
    everywhere: tuple[int, ...] = ()
    """Tables split by rows over all ranks, by constraints; all other tables are wide then."""

    def place(self, work: Work) -> list[Shard]:
        """Returns the shards on their ranks."""
        narrow_ranks, wide_ranks = range(self.narrow_ranks), range(self.narrow_ranks, work.world_size)
        parts = [Shard(r, t, 0, work.dim, r, work.world_size) for r in wide_ranks for t in self.everywhere]
        return parts + _place(self.narrow, narrow_ranks, work) + _place(self.wide, wide_ranks, work)

    def counted(self, dim: int) -> list[tuple[Shard, int]]:
        """Returns one shard of each grid, with the grid's number of shards."""
        return [(grid.shard, grid.count(dim)) for grid in (*self.narrow, *self.wide)]

    def leaves_no_rank_empty(self, work: Work) -> bool:
        """Whether each rank gets a shard of its kind, and each kind of shards has a rank."""
        if self.everywhere:
            return self.narrow_ranks == 0
        kinds = ((self.narrow, self.narrow_ranks), (self.wide, work.world_size - self.narrow_ranks))
        counts = ((sum(grid.count(work.dim) for grid in grids), ranks) for grids, ranks in kinds)
        return all(count >= ranks and (ranks > 0) == (count > 0) for count, ranks in counts)


def make_plan(
    tables: Tables,
    topology: Topology,
    global_batch_size: int,
    pooled_bytes: int = 2,
    optimizer: TableOptimizer = _EXACT,
    memory_bytes: int | None = None,
    replicate: bool = True,
    split_rows: bool = False,
    costs: GpuCosts = DEFAULT_COSTS,
    ids: IdStatistics = UNIFORM,
    constraints: Constraints = NO_CONSTRAINTS,
    split_columns: bool = True,
    tiers: TableMemory | None = None,
) -> Plan:
    """Returns the plan with the least `iteration_us` among the plans with two kinds of ranks that fit.

    Tries all numbers of tables split by columns, all widths and all divisions of the ranks; within a kind, the
    costliest shard goes to the least loaded rank. Row-wise Adagrad, whose state belongs to whole rows, splits no
    columns, and only exact Adagrad, which replicated.py implements, replicates any. memory_bytes: limit for the tables
    and optimizer state of one rank. replicate: whether tables may be replicated. split_rows: whether tables may be
    split by rows, if that gains. costs: of the GPUs, the same on all ranks. ids: how often they repeat rows.
    constraints: the user's, which the plan satisfies. split_columns: whether tables may be split by columns. tiers: the
    part of the rows that the device holds, if host memory holds the others; None for all rows on the device. ValueError
    if there are fewer shards than ranks at every width, if no plan fits, or none satisfies the constraints.
    """
    dim, world_size = tables.columns, topology.world_size
    exchanges = None
    if tiers is not None:
        sizes = (global_batch_size, table_rates(tables, ids, tiers.counts), costs, world_size)
        exchanges = Exchanges(tables, optimizer, tiers, *sizes)
    work = Work(tables, topology, global_batch_size, pooled_bytes, costs, ids, exchanges)
    replicate = replicate and can_replicate(dim, world_size, optimizer)
    splits = (1,) if isinstance(optimizer, RowWiseAdagrad) or not split_columns else (1, 2, 4, 8)
    widths = [dim // parts for parts in splits if parts == 1 or dim % (NARROWEST * parts) == 0]
    choices = Choices(tables, constraints, widths, world_size)
    choices.check(replicate, split_rows and world_size > 1)
    small = choices.replicated(REPLICATED_ROWS if replicate else 0)
    fixed = choices.replicated(0)
    replicated = fixed if tables.count - len(small) < world_size and not choices.everywhere else small
    best, least_bytes = _fastest(_by_columns(work, replicated, choices), replicated, work, optimizer, memory_bytes)
    if split_rows and world_size > 1 and len(small) + len(choices.everywhere) < tables.count:
        candidates = _by_rows(work, small, choices)
        by_rows, bytes_by_rows = _fastest(candidates, small, work, optimizer, memory_bytes)
        least_bytes = min(least_bytes, bytes_by_rows)
        if by_rows is not None and (best is None or by_rows[0] < _ROWS_GAIN * best[0]):
            best, replicated = by_rows, small
    if best is None:
        may_split = split_rows or not split_columns
        raise ValueError(_no_plan(tables, world_size, memory_bytes, least_bytes, may_split, constraints))
    plan = Plan(world_size=world_size, shards=best[1], replicated=replicated)
    plan.check(tables)
    return plan


def can_replicate(dim: int, world_size: int, optimizer: TableOptimizer) -> bool:
    """Whether replicated.py can hold tables of `dim` columns, and there are several ranks."""
    return world_size > 1 and isinstance(optimizer, Adagrad) and dim & (dim - 1) == 0  # row_sums needs a power of two


def _fastest(
    candidates: Iterator[_Candidate],
    replicated: tuple[int, ...],
    work: Work,
    optimizer: TableOptimizer,
    memory_bytes: int | None,
) -> tuple[tuple[float, tuple[Shard, ...]] | None, float]:
    """Returns time and shards of the fastest candidate that fits, and, if none fits, the least memory of any
    candidate."""
    best: tuple[float, tuple[Shard, ...]] | None = None
    least_bytes, state_columns = math.inf, optimizer.state_columns
    if work.exchanges is not None:
        placed = (candidate.place(work) for candidate in candidates if candidate.leaves_no_rank_empty(work))
        held = partial(bytes_of_rank, replicated=replicated, tables=work.tables, state_columns=state_columns)
        return fastest(placed, work, lambda own: sum(held(own)), memory_bytes)
    for candidate in candidates:
        if not candidate.leaves_no_rank_empty(work):
            continue
        if best is not None and work.least_us(candidate.counted(work.dim)) >= best[0]:
            continue
        shards = candidate.place(work)
        time = work.iteration_us(shards)
        if best is not None and time >= best[0]:
            continue
        ranks = shards_by_rank(shards, work.world_size)
        largest = max(sum(bytes_of_rank(own, replicated, work.tables, state_columns)) for own in ranks)
        least_bytes = min(least_bytes, largest)
        if memory_bytes is None or largest <= memory_bytes:
            best = (time, tuple(sorted(shards)))
    return best, least_bytes


def _no_plan(
    tables: Tables,
    world_size: int,
    memory_bytes: int | None,
    least_bytes: float,
    split_rows: bool,
    constraints: Constraints,
) -> str:
    """Returns the error of a search without a result. least_bytes: of the fullest rank; infinite if no candidate gave
    each rank a shard."""
    given = f"{FLAG} {described(constraints, tables)}"
    if memory_bytes is not None and least_bytes < math.inf:
        return (
            f"no plan of {world_size} rank(s) fits: the fullest rank's tables and optimizer state take at least "
            f"{least_bytes / 1e9:.1f} GB of the {memory_bytes / 1e9:.1f} GB that a rank has; use more GPUs or "
            f"smaller tables (--model.table-scale){f', or leave out some of {given}' if constraints else ''}"
        )
    if constraints:
        return (
            f"no plan of {world_size} rank(s) satisfies {given}: each rank needs one shard or more, and shards of only "
            "one width; leave some constraints out, or use another number of ranks"
        )
    return f"{tables.count} tables of {tables.columns} columns cannot give each of {world_size} ranks a shard: " + (
        "use fewer ranks" if split_rows else "use fewer ranks, or --presort-ids, which splits tables by rows"
    )


def _by_columns(work: Work, replicated: tuple[int, ...], choices: Choices) -> Iterator[_Candidate]:
    """Yields the candidates that split rows only if constraints require it."""
    for half in chain(*(choices.halves(order) for order in _orders(work, replicated))):
        narrow = [_Grid(Shard(0, table, 0, half.narrow_width)) for table in half.narrow]
        wide = [_Grid(Shard(0, table, 0, half.wide_width)) for table in half.wide]
        narrow_shards, wide_shards = (sum(grid.count(work.dim) for grid in grids) for grids in (narrow, wide))
        if choices.everywhere:
            yield _Candidate(narrow, wide, 0, choices.everywhere)
            continue
        # No rank is left empty; with many more ranks than shards, trying each number would take a minute.
        for narrow_ranks in range(max(0, work.world_size - wide_shards), min(work.world_size, narrow_shards) + 1):
            yield _Candidate(narrow, wide, narrow_ranks)


def _by_rows(work: Work, replicated: tuple[int, ...], choices: Choices) -> Iterator[_Candidate]:
    """Yields the candidates that split rows: for each maximum work of a shard, the fewest parts within that maximum,
    with the ranks divided in proportion to the work of the two kinds."""
    costliest = _costliest(work, replicated)
    whole = sum(work.shard_us(Shard(0, table, 0, work.dim)) for table in costliest)
    # With thousands of shards, trying a maximum takes long, and the results differ less.
    largest_shards = _LARGEST_SHARDS[:: 1 if work.world_size <= 256 else 4]
    for half, factor in product(choices.halves(costliest), largest_shards):
        if half.narrow and half.narrow_width == half.wide_width:
            continue  # one kind only, which the first half covers
        largest = factor * whole / work.world_size
        narrow = _row_parts(half.narrow, half.narrow_width, largest, work, choices)
        wide = _row_parts(half.wide, half.wide_width, largest, work, choices)
        if choices.everywhere:
            yield _Candidate(narrow, wide, 0, choices.everywhere)
            continue
        narrow_us, wide_us = (
            sum(grid.count(work.dim) * work.shard_us(grid.shard) for grid in grids) for grids in (narrow, wide)
        )
        share = round(work.world_size * narrow_us / (narrow_us + wide_us))
        for narrow_ranks in range(max(0, share - 1), min(work.world_size, share + 1) + 1):
            yield _Candidate(narrow, wide, narrow_ranks)


def _row_parts(tables: Sequence[int], width: int, largest_us: float, work: Work, choices: Choices) -> list[_Grid]:
    """Returns the tables in shards of this width, none of which takes longer, unless constraints keep its rows
    together; the time to find its ids counts if that leaves time for anything else."""
    grids = []
    for table in tables:
        whole, room, parts = work.tables_us(Shard(0, table, 0, width)), largest_us - work.picking_us[table], 1
        if whole > largest_us and choices.may_split_rows(table):
            parts = math.ceil(whole / (room if room > 0 else largest_us))
            parts = min(parts, work.world_size, work.tables.rows[table])
        grids.append(_Grid(Shard(0, table, 0, width, 0, parts)))
    return grids


def _orders(work: Work, replicated: tuple[int, ...]) -> list[list[int]]:
    """Returns the orders of the sharded tables in which the first ones become narrow: costliest first, and if rows are
    on two tiers also by most work relative to exchanges, because a row crosses the host link once per shard."""
    costliest, exchanges = _costliest(work, replicated), work.exchanges
    if exchanges is None:
        return [costliest]
    whole = {table: work.tables_us(Shard(0, table, 0, work.dim)) for table in costliest}
    return [costliest, sorted(costliest, key=lambda table: exchanges.table_us(table) - whole[table])]


def _costliest(work: Work, replicated: tuple[int, ...]) -> list[int]:
    """Returns the sharded tables, the costliest first."""
    tables = set(range(work.tables.count)) - set(replicated)
    whole = {table: work.tables_us(Shard(0, table, 0, work.dim)) for table in sorted(tables)}
    return sorted(whole, key=lambda table: -whole[table])


def _place(grids: Sequence[_Grid], ranks: range, work: Work) -> list[Shard]:
    """Places shards by longest processing time first: each, costliest first, goes to the least loaded rank."""
    cost = [(work.shard_us(grid.shard), part) for grid in grids for part in grid.shards(work.dim)]
    load = [(0.0, rank) for rank in ranks]
    shards = []
    for us, part in sorted(cost, key=lambda pair: -pair[0]):
        busy, rank = heapq.heappop(load)
        shards.append(Shard(rank, part.table, part.column, part.columns, part.row_part, part.row_parts))
        heapq.heappush(load, (busy + us, rank))
    return shards
