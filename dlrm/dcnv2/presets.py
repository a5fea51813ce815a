"""The models and data of the presets; bench/presets.py adds how a run of each goes."""

from pathlib import Path

from dlrm_bench.dlrm.config import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig

# MLPerf Training DLRM-DCNv2 (mlcommons/training, recommendation_v2/torchrec_dlrm/README.MD).
# fmt: off
MLPERF_NUM_EMBEDDINGS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10,
    2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)
MLPERF_MULTI_HOT_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# fmt: on
MLPERF_TARGET_AUC = 0.80275
MLPERF_MODEL = ModelConfig(num_embeddings=MLPERF_NUM_EMBEDDINGS, multi_hot_sizes=MLPERF_MULTI_HOT_SIZES)


SMOKE_MODEL = ModelConfig(
    num_embeddings=tuple(min(rows, 1000) for rows in MLPERF_NUM_EMBEDDINGS),
    multi_hot_sizes=tuple(min(size, 4) for size in MLPERF_MULTI_HOT_SIZES),
    embedding_dim=16,
    bottom_mlp=(32, 16),
    cross_layers=2,
    cross_rank=16,
    top_mlp=(64, 32, 1),
)

TRAININGS: dict[str, TrainingConfig] = {
    "smoke": TrainingConfig(
        model=SMOKE_MODEL,
        data=DataConfig(source="multi_hot", path=Path("data/smoke"), train_days=3),
        optimizer=OptimizerConfig(learning_rate=0.02),
        local_batch_size=512,
        precision="fp32",
    ),
    "mlperf-dcnv2": TrainingConfig(model=MLPERF_MODEL, data=DataConfig(source="random"), local_batch_size=6912),
    "launch-bound": TrainingConfig(model=MLPERF_MODEL, data=DataConfig(source="random"), local_batch_size=512),
}
"""The training configuration of each preset, by its name."""


def training(preset: str) -> TrainingConfig:
    """Returns the training configuration of the preset of this name; ValueError names the known presets."""
    if preset not in TRAININGS:
        raise ValueError(f"--preset {preset!r} is unknown: choose one of {', '.join(TRAININGS)}")
    return TRAININGS[preset]
