"""TorchRec's plans become ours: the same columns on the same ranks, in one width a rank."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.config import ModelConfig, TableOptimizer
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.plan.torchrec_plan import DATA_PARALLEL_ROWS, convert, make_torchrec_plan
from tests.pipelines import changed

DIM = 128
MODEL = ModelConfig(num_embeddings=(1000,) * 4, multi_hot_sizes=(1,) * 4)


def sharded(*parts: tuple[int, int]) -> ParameterSharding:
    """Parts of (rank, columns), from column 0 on: table-wise if there is one."""
    shards, column = [], 0
    for rank, columns in parts:
        shards.append(ShardMetadata([0, column], [1000, columns], torch.distributed._remote_device(f"rank:{rank}/cpu")))
        column += columns
    kind = "table_wise" if len(parts) == 1 else "column_wise"
    return ParameterSharding(kind, "fused", [rank for rank, _ in parts], EnumerableShardingSpec(shards))


REPLICATED = ParameterSharding("data_parallel", "dense", [0, 1], None)


def converted(*tables: ParameterSharding, optimizer: TableOptimizer = "adagrad", world_size: int = 2) -> Plan:
    model = replace(MODEL, num_embeddings=(1000,) * len(tables), multi_hot_sizes=(1,) * len(tables))
    shardings = dict(zip(model.feature_names, tables, strict=True))
    plan = convert(shardings, model, world_size, optimizer)
    plan.check(model)
    return plan


def test_types_and_widths():
    plan = converted(sharded((0, 128)), sharded((1, 64), (0, 64)), REPLICATED, sharded((1, 64), (1, 64)))
    on_rank_0 = [Shard(0, 0, 0, 64), Shard(0, 0, 64, 64), Shard(0, 1, 64, 64)]
    on_rank_1 = [Shard(1, 1, 0, 64), Shard(1, 3, 0, 64), Shard(1, 3, 64, 64)]
    assert plan == Plan(2, (*on_rank_0, *on_rank_1), (2,))


def test_widths_of_one_rank_do_not_split_those_of_another():
    plan = converted(sharded((0, 128)), sharded((1, 96), (1, 32)))
    assert plan.of_rank(0) == (Shard(0, 0, 0, 128),)
    assert [shard.column for shard in plan.of_rank(1)] == [0, 32, 64, 96]


@pytest.mark.parametrize(
    ("tables", "optimizer", "world_size", "message"),
    [
        ([sharded((0, 64), (1, 64)), sharded((1, 128))], "rowwise_adagrad", 2, "state is of whole rows"),
        ([REPLICATED, sharded((0, 128))], "sgd", 2, "cat_0 is data_parallel"),
        ([REPLICATED, sharded((0, 128))], "adagrad", 1, "cat_0 is data_parallel"),
        ([ParameterSharding("row_wise", "fused", [0, 1], None)], "adagrad", 2, "cat_0 is sharded row_wise"),
    ],
)
def test_what_the_static_ebc_cannot_do_is_refused(tables, optimizer, world_size, message):
    with pytest.raises(ValueError, match=message) as raised:
        converted(*tables, optimizer=optimizer, world_size=world_size)
    assert "--plan torchrec" in str(raised.value)
    assert "--plan balanced" in str(raised.value)


def test_whole_rows_suit_rowwise_adagrad():
    assert converted(sharded((0, 128)), sharded((1, 128)), optimizer="rowwise_adagrad").of_rank(1) == (
        Shard(1, 1, 0, 128),
    )


def static(name: str, embedding: TableOptimizer = "adagrad", **changes: object) -> RunConfig:
    config = preset(name)
    return changed(config, "static", optimizer=replace(config.optimizer, embedding=embedding), **changes)


@pytest.mark.parametrize("embedding", ["adagrad", "rowwise_adagrad", "sgd"])
@pytest.mark.parametrize("world_size", [2, 8])
def test_the_mlperf_model(embedding, world_size):
    config = static("mlperf-dcnv2", embedding)
    plan = make_torchrec_plan(config, world_size, world_size, "cuda", 141 * 10**9)
    plan.check(config.model)
    assert plan == make_torchrec_plan(config, world_size, world_size, "cuda", 141 * 10**9)
    widths = {shard.columns for shard in plan.shards}
    if embedding == "rowwise_adagrad":
        assert widths == {DIM}
    if embedding != "adagrad":
        assert not plan.replicated
    if (embedding, world_size) == ("adagrad", 8):
        assert min(widths) < DIM, "TorchRec splits the hottest table where it may"


@given(st.lists(st.integers(0, 7), min_size=1, max_size=12), st.sampled_from([2, 3, 4]))
@settings(max_examples=25, deadline=None)
def test_every_column_is_held_once(powers, world_size):
    model = replace(
        preset("smoke").model,
        num_embeddings=tuple(10**power for power in powers),
        multi_hot_sizes=tuple(1 + power for power in powers),
        embedding_dim=64,
        bottom_mlp=(64,),
    )
    arguments = (static("smoke", model=model), world_size, world_size, "cpu", 64 * 10**9)
    if len(powers) < world_size:
        with suppress(ValueError):  # there may or may not be a way to split the tables
            make_torchrec_plan(*arguments).check(model)
        return
    plan = make_torchrec_plan(*arguments)
    plan.check(model)
    assert all(model.rows[table] <= DATA_PARALLEL_ROWS for table in plan.replicated)


def test_too_little_memory_is_said():
    with pytest.raises(ValueError, match=r"--plan torchrec: TorchRec's planner cannot place the tables in 1\.0 GB"):
        make_torchrec_plan(static("mlperf-dcnv2"), 8, 8, "cuda", 10**9)
