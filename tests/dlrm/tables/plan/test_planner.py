"""The planner: plans that hold everything once, are balanced where it matters, and fit."""

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_bench.dlrm.dcnv2.config import ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.runtime.gpu_types import DEFAULT_COSTS
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.id_statistics import UNIFORM, IdStatistics
from dlrm_bench.dlrm.tables.plan.choices import Choices
from dlrm_bench.dlrm.tables.plan.constraints import NO_CONSTRAINTS
from dlrm_bench.dlrm.tables.plan.costs import imbalance, iteration_us, rank_loads
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.plan.planner import REPLICATED_ROWS, _by_columns, _Candidate, _Grid, make_plan
from dlrm_bench.dlrm.tables.plan.work import Work
from tests.dlrm.tables.plan.test_plan import model_of


def plan_of(model: ModelConfig, gpus: int, *sizes: Any, **options: Any) -> Plan:
    """The plan of one node."""
    return make_plan(model, Topology.one_node(gpus), *sizes, **options)


@st.composite
def models(draw) -> ModelConfig:
    rows = draw(st.lists(st.sampled_from([1, REPLICATED_ROWS, REPLICATED_ROWS + 1, 10**7]), min_size=1, max_size=20))
    hot = draw(st.lists(st.integers(1, 100), min_size=len(rows), max_size=len(rows)))
    return model_of(rows, hot, draw(st.sampled_from([4, 16, 24, 32, 128, 256])))


@given(models(), st.integers(1, 16), st.sampled_from([1, 512, 55296]), st.sampled_from([2, 4]))
@settings(max_examples=60, deadline=None)
def test_every_column_is_held_once_and_ranks_have_one_width(model, world_size, global_batch_size, pooled_bytes):
    if model.count < world_size:
        with suppress(ValueError):  # there may or may not be a way to split the tables
            plan_of(model, world_size, global_batch_size, pooled_bytes).check(model)
        return
    plan = plan_of(model, world_size, global_batch_size, pooled_bytes)
    assert plan.world_size == world_size
    assert all(0 <= shard.rank < world_size for shard in plan.shards)
    for rank in range(world_size):
        assert len({shard.columns for shard in plan.of_rank(rank)}) == 1
    held = Counter((s.table, column) for s in plan.shards for column in range(s.column, s.column + s.columns))
    sharded = set(range(model.count)) - set(plan.replicated)
    assert held == {(table, column): 1 for table in sharded for column in range(model.columns)}
    assert all(model.rows[table] <= REPLICATED_ROWS for table in plan.replicated)
    # FBGEMM's kernels read four columns at once.
    assert all(shard.column % 4 == shard.columns % 4 == 0 for shard in plan.shards)
    # The order in which every rank lays out what it sends to, and receives from, the others.
    assert list(plan.shards) == sorted(plan.shards)
    assert [s for rank in range(world_size) for s in plan.of_rank(rank)] == list(plan.shards)
    plan.check(model)
    assert plan == plan_of(model, world_size, global_batch_size, pooled_bytes), "ranks plan alone and must agree"


def test_only_what_leaves_no_rank_empty_is_tried_and_all_of_it():
    model = model_of([10**6] * 3, [1, 2, 3], 64)
    for ranks in (1, 2, 5, 12, 13):
        work = Work(model, Topology.one_node(ranks), 512, 2, DEFAULT_COSTS, UNIFORM)
        costliest = [2, 1, 0]
        every = [
            _Candidate(
                [_Grid(Shard(0, table, 0, width)) for table in costliest[:split]],
                [_Grid(Shard(0, table, 0, 64)) for table in costliest[split:]],
                narrow_ranks,
            )
            for split in range(4)
            for width in (64, 32, 16)
            for narrow_ranks in range(ranks + 1)
        ]
        choices = Choices(model, NO_CONSTRAINTS, [64, 32, 16], ranks)
        tried = [candidate for candidate in _by_columns(work, (), choices) if candidate.leaves_no_rank_empty(work)]
        assert tried == [candidate for candidate in every if candidate.leaves_no_rank_empty(work)]
        assert bool(tried) == (ranks <= 12)


def test_many_more_ranks_than_shards_are_refused_at_once():
    work = Work(MLPERF_MODEL.tables, Topology.one_node(100_000), 512, 2, DEFAULT_COSTS, UNIFORM)
    choices = Choices(MLPERF_MODEL.tables, NO_CONSTRAINTS, [128, 64, 32, 16], 100_000)
    assert next(_by_columns(work, (), choices), None) is None


def test_small_tables_are_replicated_where_there_are_others_to_shard():
    model = model_of([10**6, REPLICATED_ROWS, 3, 10**6, REPLICATED_ROWS + 1], [1] * 5)
    assert plan_of(model, 2, 1024).replicated == (1, 2)
    assert plan_of(model, 1, 1024).replicated == ()
    assert plan_of(model, 2, 1024, replicate=False).replicated == ()
    assert plan_of(model_of([3, 3, 3], [1] * 3), 2, 1024).replicated == ()


@pytest.mark.parametrize(
    ("ranks", "samples", "narrow"),
    [(1, 512, ()), (1, 6912, ()), (2, 512, ()), (2, 6912, ()), (8, 512, (3, 7, 20, 23)), (8, 6912, (3, 6, 17, 20, 23))],
)
def test_plans_of_mlperf_with_all_rows_on_the_device(ranks: int, samples: int, narrow: tuple[int, ...]) -> None:
    """As they were before the planner knew of two tiers of memory: with eight ranks, four hold columns of the tables
    `narrow` and four of the others, with fewer, all ranks of all tables."""
    plan = plan_of(MLPERF_MODEL.tables, ranks, samples * ranks, ids=IdStatistics(skew=1.05, expanded=True))
    sharded = set(range(26)) - {5, 8, 12, 15, 16, 18, 24, 25} if ranks > 1 else set(range(26))
    kinds = [sorted(narrow), sorted(sharded - set(narrow))] if narrow else [sorted(sharded)]
    of_kind = ranks // len(kinds)
    columns = 128 // of_kind
    for rank in range(ranks):
        held = [(shard.table, shard.column, shard.columns) for shard in plan.of_rank(rank)]
        assert held == [(table, columns * (rank % of_kind), columns) for table in kinds[rank // of_kind]]


def test_the_hottest_mlperf_table_is_split_by_columns():
    plan = plan_of(MLPERF_MODEL.tables, 8, 55296)
    assert MLPERF_MODEL.tables.hot[20] == 100
    assert len({shard.rank for shard in plan.shards if shard.table == 20}) > 1


@pytest.mark.parametrize("local_batch_size", [512, 6912])
@pytest.mark.parametrize("world_size", [4, 8])
@pytest.mark.parametrize("pooled_bytes", [2, 4])
def test_the_mlperf_model_is_balanced(local_batch_size, world_size, pooled_bytes):
    sizes = (local_batch_size * world_size, pooled_bytes)
    plan = plan_of(MLPERF_MODEL.tables, world_size, *sizes)
    loads = rank_loads(plan, MLPERF_MODEL.tables, OptimizerConfig().tables, *sizes)
    # Four of eight ranks have the hottest table, and can share little of its sort (sort_shares.py).
    most = 1.045 if (world_size, local_batch_size) == (8, 6912) else 1.03
    assert 1 <= imbalance([load.embedding_us for load in loads]) < most
    if (world_size, local_batch_size) == (8, 6912):
        # The hottest table's quarters alone on four ranks, all others whole, and the others split as it is.
        quarters = [Shard(rank, 20, 32 * rank, 32) for rank in range(4)]
        others = [table for table in range(26) if table != 20 and table not in plan.replicated]
        whole = quarters + [Shard(4 + i % 4, table, 0, 128) for i, table in enumerate(others)]
        round_robin = [Shard(i % 8, table, 0, 128) for i, table in enumerate([20, *others])]
        times = [
            iteration_us(shards, MLPERF_MODEL.tables, Topology.one_node(8), *sizes)
            for shards in (plan.shards, whole, round_robin)
        ]
        assert times == sorted(times)
        assert times[0] < 0.97 * times[1]


def test_a_plan_fits_where_one_can():
    """The fastest plan has the hot table alone on one rank, and both large ones, 10.2 GB with their state, on the
    other."""
    model = model_of([40_000_000, 40_000_000, 1_000_000], [1, 1, 20], dim=16)

    def gigabytes(plan: Plan) -> list[float]:
        loads = rank_loads(plan, model, OptimizerConfig().tables, 1024, 2)
        return [(load.table_bytes + load.state_bytes) / 1e9 for load in loads]

    assert max(gigabytes(plan_of(model, 2, 1024))) > 10
    fits = plan_of(model, 2, 1024, memory_bytes=int(8e9))
    assert max(gigabytes(fits)) <= 8
    assert plan_of(model, 2, 1024, memory_bytes=int(8e9)) == fits
    with pytest.raises(
        ValueError, match=r"the fullest rank's tables and optimizer state take at least 5\.\d GB of the 4\.0 GB"
    ):
        plan_of(model, 2, 1024, memory_bytes=int(4e9))


def test_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match="3 tables of 4 columns cannot give each of 4 ranks a shard: use fewer ranks"):
        plan_of(model_of([10**6] * 3, [1] * 3, dim=4), 4, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 16, 32, 64, 128])
def test_the_mlperf_model_is_balanced_over_nodes(ranks):
    """MLPerf's model at 512 samples a GPU and at GBS 135168, on nodes of eight GPUs of 141 GB."""
    topology = Topology.of(ranks, 8)
    for global_batch_size in (512 * ranks, 135168):
        plan = make_plan(MLPERF_MODEL.tables, topology, global_batch_size, memory_bytes=int(134e9), split_rows=True)
        loads = rank_loads(plan, MLPERF_MODEL.tables, OptimizerConfig().tables, global_batch_size, 2, topology=topology)
        assert imbalance([load.tables_us for load in loads]) <= 1.15
        assert max(load.table_bytes + load.state_bytes for load in loads) <= 134e9
        held = sum(s.columns * s.rows(MLPERF_MODEL.tables) for s in plan.shards)
        replicated = sum(MLPERF_MODEL.tables.rows[table] for table in plan.replicated)
        assert held + 128 * replicated == 128 * sum(MLPERF_MODEL.tables.rows)
        if ranks >= 64:
            columns_alone = make_plan(MLPERF_MODEL.tables, topology, global_batch_size)
            times = [
                iteration_us(p.shards, MLPERF_MODEL.tables, topology, global_batch_size, 2)
                for p in (plan, columns_alone)
            ]
            assert times[0] < 0.9 * times[1]


@given(models(), st.integers(2, 40), st.sampled_from([512, 55296]))
@settings(max_examples=12, deadline=None)
def test_every_element_is_held_once(model, ranks, global_batch_size):
    try:
        plan = plan_of(model, ranks, global_batch_size, split_rows=True)
    except ValueError:  # such as one table of one row
        assert sum(model.rows) < 10**7
        return
    plan.check(model)
    sharded = set(range(model.count)) - set(plan.replicated)
    for table in sharded:
        assert sum(s.columns * s.rows(model) for s in plan.shards if s.table == table) == (
            model.rows[table] * model.columns
        )
    assert plan == plan_of(model, ranks, global_batch_size, split_rows=True), "ranks plan alone and must agree"


def test_more_ranks_than_column_shards_need_rows():
    with pytest.raises(ValueError, match="cannot give each of 256 ranks a shard: use fewer ranks, or --presort-ids"):
        plan_of(MLPERF_MODEL.tables, 256, 256 * 512)
    plan = make_plan(MLPERF_MODEL.tables, Topology.of(256, 8), 256 * 512, split_rows=True)
    assert {shard.rank for shard in plan.shards} == set(range(256))


def test_columns_stay_together_where_asked():
    tables = MLPERF_MODEL.tables
    whole = make_plan(tables, Topology.one_node(8), 8 * 512, replicate=False, split_columns=False)
    assert sorted(shard.table for shard in whole.shards) == list(range(tables.count))
    assert all(shard.columns == tables.columns and shard.row_parts == 1 for shard in whole.shards)
    assert any(shard.columns < tables.columns for shard in make_plan(tables, Topology.one_node(8), 8 * 512).shards)
    with pytest.raises(ValueError, match=r"cannot give each of 27 ranks a shard: use fewer ranks$"):
        make_plan(tables, Topology.one_node(27), 27 * 512, replicate=False, split_columns=False)
