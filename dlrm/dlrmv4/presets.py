"""The models of DLRMv4's presets, with optimizer and batch; their data and the length of their runs stand elsewhere."""

import math
from dataclasses import replace

from dlrm_bench.dlrm.dlrmv4.config import ModelConfig, OptimizerConfig, TrainingConfig, mlperf_learning_rate

MLPERF_TARGET_AUC = 0.75
"""Area under the ROC curve over the evaluation's window (training_policies, pull request 594)."""
MLPERF_GLOBAL_BATCH = 8192

_MODEL = ModelConfig()


def with_fewer_rows(model: ModelConfig, share: float) -> ModelConfig:
    """Returns the model with `share` of each table's rows, rounded up, and all else as it is."""
    item, artist, album, *context = (math.ceil(rows * share) for rows in model.rows)
    return replace(model, event_rows=(item, artist, album), context_rows=tuple(context))


_MLPERF = TrainingConfig(
    model=_MODEL,
    optimizer=OptimizerConfig(learning_rate=mlperf_learning_rate(MLPERF_GLOBAL_BATCH)),
    local_batch_size=1024,
)

TRAININGS: dict[str, TrainingConfig] = {
    "smoke-dlrmv4": TrainingConfig(
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
        optimizer=OptimizerConfig(learning_rate=2e-3, ramp_steps=50),
        local_batch_size=64,
        precision="fp32",
    ),
    "mlperf-dlrmv4": _MLPERF,
    "dlrmv4-two-gpus": replace(_MLPERF, model=with_fewer_rows(_MODEL, 1 / 4)),
    "dlrmv4-one-gpu": replace(_MLPERF, model=with_fewer_rows(_MODEL, 1 / 8)),
}
"""The training configuration of each preset, by its name.

- mlperf-dlrmv4: the benchmark. 559 GiB of tables: eight GPUs of 141 GB or more; global batch 8,192.
- dlrmv4-two-gpus, dlrmv4-one-gpu: batches, shapes and dense work of two and of one of those eight GPUs, and as many
  rows for each, 70 GiB. Ids need data that were made for these tables. The rate is that of 8,192 samples still.
- smoke-dlrmv4: seconds on a CPU. Its rows hold 6,000 users, 4,000 items, 500 artists and 1,500 albums.
"""


def training(preset: str) -> TrainingConfig:
    """Returns the training configuration of the preset of this name; ValueError names the known presets."""
    if preset not in TRAININGS:
        raise ValueError(f"--preset {preset!r} is unknown: choose one of {', '.join(TRAININGS)}")
    return TRAININGS[preset]
