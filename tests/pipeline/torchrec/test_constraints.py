"""TorchRec's planner obeys the user's constraints, or refuses them by name; on GPUs, tables that a cache serves."""

import re
from itertools import islice
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.constraints import parse_constraints
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.pipeline.interface import check_device
from dlrm_bench.pipeline.torchrec.constraints import with_constraints
from dlrm_bench.pipeline.torchrec.planner import sharding_planner
from tests.pipelines import changed, stock_pipeline

TABLES = Tables(names=("a", "b", "c", "d"), rows=(1000, 2000, 3000, 50), columns=64, hot=(1, 2, 3, 4))
WORDS = ("a=column-wise:32", "b=hbm:0.25,table-wise", "2=row-wise,hbm:0", "d=data-parallel")


def test_the_planner_of_gpus_obeys() -> None:
    """Planning needs no GPU."""
    configs = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=64, num_embeddings=rows, feature_names=[name])
        for name, rows in zip(TABLES.names, TABLES.rows, strict=True)
    ]
    given = {"t_b": ParameterConstraints(pooling_factors=[2.0])}
    constraints = with_constraints(given, parse_constraints(WORDS, TABLES), TABLES, "t_", prefetches=True)
    assert constraints["t_b"].pooling_factors == [2.0]
    planner = sharding_planner(constraints, 512, 2, 2, "cuda", 10**9, 10**9)
    ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    plan = planner.plan(ebc, [EmbeddingBagCollectionSharder()])  # type: ignore[list-item]
    (tables,) = plan.plan.values()
    of = {name.removeprefix("t_"): sharding for name, sharding in tables.items()}  # type: ignore[attr-defined]
    assert {name: (s.sharding_type, s.compute_kernel) for name, s in of.items()} == {
        "a": ("column_wise", "fused"),
        "b": ("table_wise", "fused_uvm_caching"),
        "c": ("row_wise", "fused_uvm"),
        "d": ("data_parallel", "dense"),
    }
    assert (of["b"].cache_params.load_factor, of["b"].cache_params.prefetch_pipeline) == (0.25, True)
    assert {tuple(shard.shard_sizes) for shard in of["a"].sharding_spec.shards} == {(1000, 32)}


def small(**changes: Any) -> RunConfig:
    data, sizes = DataConfig(random_batches=4, random_ids="uniform"), {"iterations": 4, "warmup_iterations": 0}
    return changed(preset("smoke"), data=data, target_auc=None, local_batch_size=16, **sizes, **changes)


def train(ranks: Ranks, config: RunConfig) -> tuple[list[float], dict[str, Any]]:
    batches = RandomDataset(config.data, config.model, config.seed).train_batches(
        ranks.rank, ranks.world_size, config.local_batch_size
    )
    pipeline = stock_pipeline(config, ranks)
    prepared = map(pipeline.prepare, islice(batches, 4))
    losses = [pipeline.train_step(prepared).item() for _ in range(4)]
    plan = pipeline.describe()["sharding_plan"]
    pipeline.close()
    return losses, plan


def train_twice(ranks: Ranks, words: tuple[str, ...], refused: str) -> tuple[list[float], list[float], Any, str]:
    """Losses without and with constraints, the plan of the latter, and the error about another one."""
    free, _ = train(ranks, small())
    constrained, plan = train(ranks, small(constraints=words))
    with pytest.raises(ValueError, match=refused) as error:
        train(ranks, small(constraints=(refused,)))
    return free, constrained, plan, str(error.value)


def test_a_training_obeys_and_its_losses_are_the_same(run_ranks: Any) -> None:
    words = ("0-2=table-wise", "20=column-wise:8", "5=data-parallel")
    for free, constrained, plan, error in run_ranks(2, train_twice, words, "cat_3=row-wise"):
        assert "TorchRec offers no row-wise tables on this device" in error
        types = {name: table["sharding_type"] for name, table in plan.items()}
        asked = {"cat_0": "table_wise", "cat_2": "table_wise", "cat_5": "data_parallel"}
        assert types | asked | {"cat_20": "column_wise"} == types
        assert constrained == pytest.approx(free, rel=1e-6)


def test_tables_in_host_memory_need_a_gpu_and_no_graph_of_iterations() -> None:
    config = small(constraints=("0=table-wise", "4=hbm:0.5"))
    with pytest.raises(ValueError, match=re.escape("--constraints 4=hbm:0.5 needs a GPU: on this machine leave hbm")):
        check_device(config.pipeline, torch.device("cpu"))
    check_device(small(constraints=("4=hbm:1",)).pipeline, torch.device("cpu"))
    cached = changed(preset("smoke"), "five-stage", constraints=("4=hbm:0.5",)).pipeline
    assert cached.prefetches
    with pytest.raises(ValueError, match=re.escape("--constraints 4=hbm:0.5 needs a GPU: on this machine leave hbm")):
        check_device(cached, torch.device("cpu"))
    with pytest.raises(ValueError, match="--constraints 4=hbm:0: --cuda-graph iteration needs tables in GPU memory"):
        changed(preset("smoke"), "five-stage", constraints=("4=hbm:0",), cuda_graph="iteration", trim_input_dist=True)
    with pytest.raises(ValueError, match="cat_4=row-wise: --no-row-wise forbids it"):
        changed(preset("smoke"), "torchrec", constraints=("4=row-wise",), row_wise=False)


def prefetch(ranks: Ranks) -> tuple[list[float], str]:
    options: dict[str, Any] = {
        "schedule": "prefetch-sparse-dist",
        "constraints": ("0=table-wise,hbm:0.5", "20=hbm:0.2"),
    }
    with pytest.raises(ValueError, match="--schedule prefetch-sparse-dist") as error:
        stock_pipeline(small(**options), ranks).warm_up(evaluates=True)
    return train(ranks, small(**options))[0], str(error.value)


@pytest.mark.gpu
def test_prefetched_rows_change_no_loss(run_ranks: Any) -> None:
    ((losses, error),) = run_ranks(1, prefetch, gpu=True)
    ((free, _),) = run_ranks(1, train, small(), gpu=True)
    assert losses == pytest.approx(free, rel=1e-5)
    assert "cannot evaluate" in error


@pytest.mark.gpu
def test_a_cache_on_the_gpu_changes_no_loss(run_ranks: Any) -> None:
    words = ("0=table-wise,hbm:0.5", "20=hbm:0.2", "9=hbm:0")
    ((free, constrained, plan, _),) = run_ranks(1, train_twice, words, "cat_5=data-parallel,hbm:0.5", gpu=True)
    assert plan["cat_20"]["compute_kernel"] == "fused_uvm_caching"
    assert plan["cat_20"]["cache_load_factor"] == 0.2
    assert plan["cat_9"]["compute_kernel"] == "fused_uvm"
    assert constrained == pytest.approx(free, rel=1e-5)
