"""Plans: nothing lost, nothing twice, one width a rank, and a load that is balanced where it matters."""

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm.config import ModelConfig
from dlrm.embedding.plan import REPLICATED_ROWS, Plan, Shard, make_plan, rank_cost_us
from dlrm.presets import MLPERF_MODEL


def model_of(rows: list[int], hot: list[int], dim: int = 32) -> ModelConfig:
    return ModelConfig(
        num_embeddings=tuple(rows), multi_hot_sizes=tuple(hot), embedding_dim=dim, bottom_mlp=(dim,), top_mlp=(8, 1)
    )


@st.composite
def models(draw) -> ModelConfig:
    rows = draw(st.lists(st.sampled_from([1, REPLICATED_ROWS, REPLICATED_ROWS + 1, 10**7]), min_size=1, max_size=20))
    hot = draw(st.lists(st.integers(1, 100), min_size=len(rows), max_size=len(rows)))
    return model_of(rows, hot, draw(st.sampled_from([4, 16, 24, 32, 128, 256])))


@given(models(), st.integers(1, 16), st.sampled_from([1, 512, 55296]), st.sampled_from([2, 4]))
@settings(max_examples=60, deadline=None)
def test_every_column_is_held_once_and_ranks_have_one_width(model, world_size, global_batch_size, pooled_bytes):
    if model.num_features < world_size:
        with suppress(ValueError):  # there may or may not be a way to split the tables
            make_plan(model, world_size, global_batch_size, pooled_bytes).check(model)
        return
    plan = make_plan(model, world_size, global_batch_size, pooled_bytes)
    assert plan.world_size == world_size
    assert all(0 <= shard.rank < world_size for shard in plan.shards)
    for rank in range(world_size):
        assert len({shard.columns for shard in plan.of_rank(rank)}) == 1
    held = Counter((s.table, column) for s in plan.shards for column in range(s.column, s.column + s.columns))
    sharded = set(range(model.num_features)) - set(plan.replicated)
    assert held == {(table, column): 1 for table in sharded for column in range(model.embedding_dim)}
    assert all(model.rows[table] <= REPLICATED_ROWS for table in plan.replicated)
    # FBGEMM's kernels read four columns at once.
    assert all(shard.column % 4 == shard.columns % 4 == 0 for shard in plan.shards)
    # The order in which every rank lays out what it sends to, and receives from, the others.
    assert list(plan.shards) == sorted(plan.shards)
    assert [s for rank in range(world_size) for s in plan.of_rank(rank)] == list(plan.shards)
    plan.check(model)
    assert plan == make_plan(model, world_size, global_batch_size, pooled_bytes), "ranks plan alone and must agree"


def test_small_tables_are_replicated_where_there_are_others_to_shard():
    model = model_of([10**6, REPLICATED_ROWS, 3, 10**6, REPLICATED_ROWS + 1], [1] * 5)
    assert make_plan(model, 2, 1024).replicated == (1, 2)
    assert make_plan(model, 1, 1024).replicated == ()
    assert make_plan(model_of([3, 3, 3], [1] * 3), 2, 1024).replicated == ()


def test_the_hottest_mlperf_table_is_split_by_columns():
    plan = make_plan(MLPERF_MODEL, 8, 55296)
    assert MLPERF_MODEL.multi_hot_sizes[20] == 100
    assert len({shard.rank for shard in plan.shards if shard.table == 20}) > 1


@pytest.mark.parametrize("global_batch_size", [4096, 55296])
@pytest.mark.parametrize("pooled_bytes", [2, 4])
def test_the_mlperf_model_on_eight_ranks_is_balanced(global_batch_size, pooled_bytes):
    plan = make_plan(MLPERF_MODEL, 8, global_batch_size, pooled_bytes)
    cost = [rank_cost_us(plan.of_rank(rank), MLPERF_MODEL, global_batch_size, pooled_bytes) for rank in range(8)]
    assert max(cost) < 1.1 * sum(cost) / 8
    round_robin = [[Shard(rank, table, 0, 128) for table in range(rank, 26, 8)] for rank in range(8)]
    assert max(cost) < max(rank_cost_us(s, MLPERF_MODEL, global_batch_size, pooled_bytes) for s in round_robin)


def test_cost_counts_ids_columns_and_bytes():
    model = model_of([100, 100], [1, 10], dim=128)
    cost = rank_cost_us([Shard(0, 0, 0, 128)], model, 10000, 2)
    assert rank_cost_us([Shard(0, 1, 0, 128)], model, 10000, 2) > cost
    assert rank_cost_us([Shard(0, 0, 0, 64)], model, 10000, 2) < cost
    assert rank_cost_us([Shard(0, 0, 0, 128)], model, 20000, 2) > cost
    assert rank_cost_us([Shard(0, 0, 0, 128)], model, 10000, 4) > cost


def test_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match="3 tables of 4 columns cannot give each of 4 ranks a shard: use fewer ranks"):
        make_plan(model_of([10**6] * 3, [1] * 3, dim=4), 4, 1024)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(0, 0, 0, 32)], r"rank 1 holds shards of widths \[\]"),
        ([(0, 0, 0, 32), (0, 1, 0, 16), (1, 1, 16, 16)], r"rank 0 holds shards of widths \[16, 32\]"),
        ([(0, 0, 0, 32), (1, 1, 16, 16)], "table 1 has a gap or an overlap at column 0"),
        ([(0, 0, 0, 16), (0, 0, 0, 16), (1, 1, 0, 32)], "table 0 has a gap or an overlap at column 16"),
        ([(0, 0, 0, 32), (1, 1, 0, 16)], "table 1 has 16 of 32 columns"),
        ([(0, 0, 0, 32), (1, 0, 0, 32)], "table 0 has a gap or an overlap at column 32"),
    ],
)
def test_bad_plans_are_refused(shards, message):
    with pytest.raises(ValueError, match=message):
        Plan(world_size=2, shards=tuple(Shard(*s) for s in shards)).check(model_of([100, 100], [1, 1]))
