"""The presets of DLRM-DCNv2."""

from pathlib import Path
from typing import cast

from dlrm_bench.dlrm.benchmark import Preset
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.dcnv2.config import DataConfig, DcnTraining, ModelConfig, OptimizerConfig

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


def _mlperf(local_batch_size: int) -> DcnTraining:
    return TrainingConfig(
        model=MLPERF_MODEL, data=DataConfig(), optimizer=OptimizerConfig(), local_batch_size=local_batch_size
    )


MIN_TIME_S = 10.0
"""Seconds of timed iterations: with 0.1 to 3.4 s, 23 of 104 committed runs drifted by more than 2 %."""

WARMUP_TIME_S = 2.0
"""Seconds of warm-up: an H200 reaches its power cap after 0.7 s at 6912 samples."""

PRESETS: dict[str, Preset] = {
    "smoke": Preset(
        text="Train tiny tables on a planted data set to a target AUC: a minute on two CPU cores or one GPU.",
        training=TrainingConfig(
            model=SMOKE_MODEL,
            data=DataConfig(source="multi_hot", path=Path("data/smoke"), train_days=3),
            optimizer=OptimizerConfig(learning_rate=0.02),
            local_batch_size=512,
            precision="fp32",
        ),
        run={"target_auc": 0.82, "loss_interval": 20},
    ),
    "mlperf-dcnv2": Preset(
        text="The MLPerf model with all 26 full-size tables; 6912 samples a GPU, GBS 55296 on eight. Random batches.",
        training=TrainingConfig(
            model=MLPERF_MODEL, data=DataConfig(), optimizer=OptimizerConfig(), local_batch_size=6912
        ),
        run={"min_time": MIN_TIME_S, "warmup_time": WARMUP_TIME_S},
        division="closed",
    ),
    "launch-bound": Preset(
        text="The MLPerf model at 512 samples a GPU, the load of GBS 65536 on 16 nodes: the host is the limit.",
        training=TrainingConfig(
            model=MLPERF_MODEL, data=DataConfig(), optimizer=OptimizerConfig(), local_batch_size=512
        ),
        run={"min_time": MIN_TIME_S, "warmup_time": WARMUP_TIME_S},
    ),
}


def training(preset: str) -> DcnTraining:
    """Returns the training configuration of one of these presets; ValueError lists them."""
    if preset not in PRESETS:
        raise ValueError(f"--preset {preset!r} has no DLRM-DCNv2 data: choose one of {', '.join(PRESETS)}")
    return cast(DcnTraining, PRESETS[preset].training)
