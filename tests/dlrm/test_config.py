"""Every bad value is refused by an error that names the flag to change."""

import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.dlrm.config import DataConfig, MLPerfConfig, ModelConfig, OptimizerConfig, RunConfig
from dlrm_bench.dlrm.presets import preset

MODEL = preset("smoke").model

BAD_MODEL: list[tuple[str, dict[str, Any]]] = [
    ("--model.num-embeddings", {"num_embeddings": (), "multi_hot_sizes": ()}),
    ("--model.num-embeddings", {"num_embeddings": (1, 2)}),
    ("--model.num-embeddings", {"num_embeddings": (0,) * 26}),
    ("--model.num-embeddings", {"num_embeddings": (2**31,) * 26}),
    ("--model.multi-hot-sizes", {"multi_hot_sizes": (1,) * 25}),
    ("--model.multi-hot-sizes", {"multi_hot_sizes": (1,) * 25 + (0,)}),
    ("--model.table-scale", {"table_scale": 0.0}),
    ("--model.table-scale", {"table_scale": 1.5}),
    ("--model.table-scale", {"table_scale": math.nan}),
    ("--model.embedding-dim", {"embedding_dim": 0}),
    ("--model.embedding-dim", {"embedding_dim": 6, "bottom_mlp": (6,)}),
    ("--model.dense-in-features", {"dense_in_features": 0}),
    ("--model.bottom-mlp", {"bottom_mlp": ()}),
    ("--model.bottom-mlp", {"bottom_mlp": (-1, 16)}),
    ("--model.bottom-mlp", {"bottom_mlp": (32, 8)}),
    ("--model.cross-layers", {"cross_layers": 0}),
    ("--model.cross-rank", {"cross_rank": -1}),
    ("--model.top-mlp", {"top_mlp": ()}),
    ("--model.top-mlp", {"top_mlp": (64, 2)}),
]
BAD_DATA: list[tuple[str, dict[str, Any]]] = [
    ("--data.path", {"source": "multi_hot"}),
    ("--data.path", {"source": "one_hot"}),
    ("--data.train-days", {"train_days": 0}),
    ("--data.prefetch-batches", {"prefetch_batches": 0}),
    ("--data.random-batches", {"random_batches": -3}),
    ("--data.random-skew", {"random_skew": -0.1}),
    ("--data.random-skew", {"random_skew": math.inf}),
    ("--data.variable-lengths", {"variable_lengths": True, "source": "multi_hot", "path": Path("data")}),
]
THEIRS = ("base", "sparse-dist", "fused-sparse-dist")
FIVE_STAGE: list[tuple[str, dict[str, Any]]] = [
    ("--avoid-record-streams", {"avoid_record_streams": True}),
    ("--pinned-d2h", {"pinned_d2h": True}),
    ("--launch-threads", {"launch_threads": 2}),
    ("--trim-input-dist", {"trim_input_dist": True}),
    ("--(trim-input-dist|graph-dists)", {"trim_input_dist": True, "graph_dists": True}),
]
BAD_RUN: list[tuple[str, dict[str, Any]]] = [
    ("--overlap", {"overlap": True}),
    ("--graph-dists needs --trim-input-dist", {"pipeline": "five-stage", "graph_dists": True}),
    ("--presort-ids", {"presort_ids": True}),
    ("--presort-ids", {"presort_ids": True, "ebc": "static", "optimizer": OptimizerConfig(embedding="sgd")}),
    ("--peer-memory needs --ebc static", {"peer_memory": True}),
    ("--peer-memory needs --presort-ids", {"peer_memory": True, "ebc": "static"}),
    ("--cuda-graph iteration needs --ebc static", {"cuda_graph": "iteration"}),
    ("--cuda-graph iteration needs --ebc static", {"cuda_graph": "iteration", "pipeline": "five-stage"}),
    ("--cuda-graph dense needs --pipeline five-stage", {"cuda_graph": "dense"}),
    ("--cuda-graph dense needs --pipeline five-stage and --ebc torchrec", {"cuda_graph": "dense", "ebc": "static"}),
    *[("--pipeline .*: leave it out", {"pipeline": name, "ebc": "static"}) for name in THEIRS],
    *[(flag, switch | schedule) for flag, switch in FIVE_STAGE for schedule in ({}, {"ebc": "static"})],
    ("--inplace-copy", {"inplace_copy": True, "pipeline": "five-stage"}),
    ("--inplace-copy", {"inplace_copy": True, "ebc": "static"}),
    ("--quantized-comms", {"quantized_comms": "bf16", "ebc": "static"}),
    ("--no-row-wise", {"row_wise": False, "ebc": "static"}),
    ("--data.variable-lengths", {"data": DataConfig(variable_lengths=True), "target_auc": None, "iterations": 100}),
    ("--local-batch-size", {"local_batch_size": 0}),
    ("--iterations", {"iterations": 0}),
    ("--iterations", {"data": DataConfig(), "target_auc": None}),
    ("--warmup-iterations", {"warmup_iterations": -1}),
    ("--warmup-iterations", {"warmup_iterations": 50, "iterations": 50}),
    ("--target-auc", {"target_auc": 0.5}),
    ("--target-auc", {"target_auc": 1.0}),
    ("--target-auc", {"target_auc": math.nan}),
    ("--target-auc", {"data": DataConfig(), "iterations": 100}),
    ("--evaluations-per-epoch", {"evaluations_per_epoch": 0}),
    ("--loss-interval", {"loss_interval": 0}),
    ("--seed", {"seed": -1}),
    ("--seed", {"seed": 2**63}),
    ("--cuda-graph-fallback", {"cuda_graph_fallback": True}),
    ("--plan", {"plan": "torchrec"}),
    ("--run-id", {"run_id": "a/b"}),
    ("--run-id", {"run_id": ""}),
    ("--run-id", {"run_id": ".."}),
]


@pytest.mark.parametrize(("flag", "changes"), BAD_MODEL)
def test_bad_model(flag, changes):
    with pytest.raises(ValueError, match=flag):
        replace(MODEL, **changes)


@pytest.mark.parametrize(("flag", "changes"), BAD_DATA)
def test_bad_data(flag, changes):
    with pytest.raises(ValueError, match=flag):
        DataConfig(**changes)


@pytest.mark.parametrize("flag", ["learning_rate", "eps"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bad_optimizer(flag, value):
    with pytest.raises(ValueError, match=f"--optimizer.{flag.replace('_', '-')}"):
        OptimizerConfig(**{flag: value})


@pytest.mark.parametrize(("flag", "changes"), BAD_RUN)
def test_bad_run(flag, changes):
    with pytest.raises(ValueError, match=flag):
        replace(preset("smoke"), **changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "sparse-dist"),
        *[({"pipeline": name, "inplace_copy": True, "quantized_comms": "bf16"}, name) for name in THEIRS],
        ({"pipeline": "five-stage", "cuda_graph": "dense", "quantized_comms": "fp16"}, "five-stage"),
        *[({"pipeline": "five-stage"} | switch, "five-stage") for _, switch in FIVE_STAGE],
        ({"ebc": "static", "cuda_graph": "iteration", "overlap": True, "presort_ids": True}, "five-stage"),
        ({"ebc": "static", "pipeline": "five-stage"}, "five-stage"),
    ],
)
def test_every_schedule_has_a_name_and_its_switches(changes, name):
    assert replace(preset("smoke"), **changes).pipeline_name == name


def test_smallest_good_values():
    model = ModelConfig(
        num_embeddings=(1,),
        multi_hot_sizes=(1,),
        embedding_dim=4,
        bottom_mlp=(4,),
        top_mlp=(1,),
        cross_layers=1,
        cross_rank=1,
        dense_in_features=1,
    )
    data = DataConfig(train_days=1, prefetch_batches=1, random_batches=1, random_skew=0)
    run = RunConfig(preset="", model=model, data=data, local_batch_size=1, iterations=1, warmup_iterations=0)
    assert run.mlperf == MLPerfConfig()
    assert run.optimizer == OptimizerConfig(learning_rate=0.004, eps=1e-8)


def test_derived_sizes():
    model = replace(MODEL, num_embeddings=(1000, 3, 7), multi_hot_sizes=(4, 1, 2), table_scale=0.25)
    assert model.rows == (250, 1, 2)
    assert (model.num_features, model.ids_per_sample) == (3, 7)
    assert model.feature_names == ("cat_0", "cat_1", "cat_2")
    assert model.table_bytes == 253 * 16 * 4


def test_configurations_do_not_change():
    with pytest.raises(FrozenInstanceError):
        preset("smoke").seed = 1
    assert preset("smoke").results_dir == Path("results")
