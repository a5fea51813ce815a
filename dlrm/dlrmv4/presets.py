"""The presets of DLRMv4."""

import math
from dataclasses import replace
from pathlib import Path
from typing import cast

from dlrm_bench.dlrm.benchmark import Preset
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.dlrmv4.config import (
    DataConfig,
    Dlrmv4Training,
    ModelConfig,
    OptimizerConfig,
    mlperf_learning_rate,
)

MLPERF_TARGET_AUC = 0.75
"""Area under the ROC curve over the evaluation's window (training_policies, pull request 594)."""
MLPERF_GLOBAL_BATCH = 8192
MLPERF_EVALUATIONS = 1000
"""Number of evaluations in an epoch; one is every thousandth of the training samples (eval_every_data_pct), once they
begin."""
SMOKE_TARGET_AUC = 0.75

_MODEL = ModelConfig()


def with_fewer_rows(model: ModelConfig, share: float) -> ModelConfig:
    """Returns the model with `share` of each table's rows, rounded up, and all else as it is."""
    item, artist, album, *context = (math.ceil(rows * share) for rows in model.rows)
    return replace(model, event_rows=(item, artist, album), context_rows=tuple(context))


_MLPERF: Dlrmv4Training = TrainingConfig(
    model=_MODEL,
    data=DataConfig(),
    optimizer=OptimizerConfig(learning_rate=mlperf_learning_rate(MLPERF_GLOBAL_BATCH)),
    local_batch_size=1024,
    precision="bf16",
)
_SMOKE: Dlrmv4Training = TrainingConfig(
    model=ModelConfig(
        event_rows=(4001, 501, 1501),
        context_rows=(6001, 20_000, 20_000, 20_000, 20_000, 12_000, 12_002, 20_000),
        embedding_dim=32,
        width=32,
        layers=2,
        heads=2,
        head_width=16,
        preprocessor_hidden=32,
        head_hidden=32,
        max_history=63,
        position_buckets=128,
        time_buckets=1024,
        last_layer="candidates",
    ),
    data=DataConfig(path=Path("data/smoke-dlrmv4")),
    optimizer=OptimizerConfig(learning_rate=2e-3, ramp_steps=50),
    local_batch_size=64,
    precision="fp32",
)
_TO_TARGET = {"target_auc": MLPERF_TARGET_AUC, "evaluations_per_epoch": MLPERF_EVALUATIONS}

PRESETS: dict[str, Preset] = {
    "mlperf-dlrmv4": Preset(
        text="DLRMv4 to its target: 559 GiB of tables, eight GPUs of 141 GB or more; 1,024 samples a GPU, GBS 8192.",
        training=_MLPERF,
        run=_TO_TARGET,
        division="closed",
    ),
    "dlrmv4-two-gpus": Preset(
        text="Batches, shapes and dense work of two of the eight GPUs, a quarter of the rows; needs matching data.",
        training=replace(_MLPERF, model=with_fewer_rows(_MODEL, 1 / 4)),
        run=_TO_TARGET,
    ),
    "dlrmv4-one-gpu": Preset(
        text="Batches, shapes and dense work of one of the eight GPUs, an eighth of the rows; needs matching data.",
        training=replace(_MLPERF, model=with_fewer_rows(_MODEL, 1 / 8)),
        run=_TO_TARGET,
    ),
    "smoke-dlrmv4": Preset(
        text="A small DLRMv4 on generated data (6,000 users, 4,000 items) to a target AUC: a minute on two CPU cores. "
        "It evaluates after every hundredth of its samples, first after the share of samples that MLPerf's rules set.",
        training=_SMOKE,
        run={"target_auc": SMOKE_TARGET_AUC, "evaluations_per_epoch": 100, "loss_interval": 20},
    ),
}


def training(preset: str) -> Dlrmv4Training:
    """Returns the training configuration of the preset of this name; ValueError names the known presets."""
    if preset not in PRESETS:
        raise ValueError(f"--preset {preset!r} is unknown: choose one of {', '.join(PRESETS)}")
    return cast(Dlrmv4Training, PRESETS[preset].training)
