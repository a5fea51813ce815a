"""Every bad value is refused by an error that names the flag to change."""

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.dcnv2.config import DataConfig, ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.presets import training

MODEL = training("smoke").model

BAD_MODEL: list[tuple[str, dict[str, Any]]] = [
    ("--model.num-embeddings", {"num_embeddings": (), "multi_hot_sizes": ()}),
    ("--model.num-embeddings", {"num_embeddings": (1, 2)}),
    ("--model.num-embeddings", {"num_embeddings": (0,) * 26}),
    ("--model.num-embeddings", {"num_embeddings": (2**31,) * 26}),
    ("--model.multi-hot-sizes", {"multi_hot_sizes": (1,) * 25}),
    ("--model.multi-hot-sizes", {"multi_hot_sizes": (1,) * 25 + (0,)}),
    ("--model.table-scale", {"table_scale": 0.0}),
    ("--model.table-scale", {"table_scale": math.inf}),
    ("--model.table-scale", {"table_scale": math.nan}),
    (r"--model.table-scale 3e\+06 makes a table of 3000000000 rows.* fewer than 2\^31", {"table_scale": 3e6}),
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
]
BAD_TRAINING: list[tuple[str, dict[str, Any]]] = [
    ("--local-batch-size", {"local_batch_size": 0}),
    ("--seed", {"seed": -1}),
    ("--seed", {"seed": 2**63}),
]


@pytest.mark.parametrize(("flag", "changes"), BAD_MODEL)
def test_bad_model(flag, changes):
    with pytest.raises(ValueError, match=flag):
        replace(MODEL, **changes)


@pytest.mark.parametrize(("flag", "changes"), BAD_DATA)
def test_bad_data(flag, changes):
    with pytest.raises(ValueError, match=flag):
        DataConfig(**changes)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("learning_rate", 1e39), ("learning_rate", 1e-46), ("eps", 1e39), ("eps", 1e-46), ("eps", 1e-38)],
)
def test_a_number_of_the_optimizer_that_float32_does_not_hold(flag: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"--optimizer\.{flag.replace('_', '-')} is 1e.*float32"):
        OptimizerConfig(**{flag: value})


@pytest.mark.parametrize("flag", ["learning_rate", "eps"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bad_optimizer(flag, value):
    with pytest.raises(ValueError, match=f"--optimizer.{flag.replace('_', '-')}"):
        OptimizerConfig(**{flag: value})


@pytest.mark.parametrize(("flag", "changes"), BAD_TRAINING)
def test_bad_training(flag, changes):
    with pytest.raises(ValueError, match=flag):
        replace(training("smoke"), **changes)


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
    optimizer = OptimizerConfig()
    assert optimizer == OptimizerConfig(learning_rate=0.004, eps=1e-8)
    TrainingConfig(model=model, data=data, optimizer=optimizer, local_batch_size=1)


def test_derived_sizes():
    model = replace(MODEL, num_embeddings=(1000, 3, 7), multi_hot_sizes=(4, 1, 2), table_scale=0.25)
    assert model.rows == (250, 1, 2)
    assert (model.num_features, model.ids_per_sample) == (3, 7)
    assert model.feature_names == ("cat_0", "cat_1", "cat_2")
    assert model.tables.bytes == 253 * 16 * 4
    assert replace(model, table_scale=2.0).rows == (2000, 6, 14)
    assert replace(model, num_embeddings=(1,) * 3, table_scale=2.0**31 - 1).rows == (2**31 - 1,) * 3


def test_configurations_do_not_change():
    with pytest.raises(FrozenInstanceError):
        training("smoke").seed = 1
