"""Named complete configurations: each preset is a function that returns one."""

from collections.abc import Callable
from pathlib import Path

from dlrm_bench.dlrm.config import DataConfig, MLPerfConfig, ModelConfig, OptimizerConfig, RunConfig

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


def smoke() -> RunConfig:
    """Trains tiny tables on a planted data set to a target AUC: a minute on two CPU cores or one GPU."""
    return RunConfig(
        preset="smoke",
        model=ModelConfig(
            num_embeddings=tuple(min(rows, 1000) for rows in MLPERF_NUM_EMBEDDINGS),
            multi_hot_sizes=tuple(min(size, 4) for size in MLPERF_MULTI_HOT_SIZES),
            embedding_dim=16,
            bottom_mlp=(32, 16),
            cross_layers=2,
            cross_rank=16,
            top_mlp=(64, 32, 1),
        ),
        data=DataConfig(source="multi_hot", path=Path("data/smoke"), train_days=3),
        optimizer=OptimizerConfig(learning_rate=0.02),
        local_batch_size=512,
        precision="fp32",
        target_auc=0.82,
        loss_interval=20,
    )


def mlperf_dcnv2() -> RunConfig:
    """The MLPerf model with all 26 full-size tables; 6912 samples a GPU are GBS 55296 on eight. Random batches."""
    return RunConfig(
        preset="mlperf-dcnv2",
        model=MLPERF_MODEL,
        data=DataConfig(source="random"),
        mlperf=MLPerfConfig(division="closed"),
        local_batch_size=6912,
        iterations=250,
    )


def launch_bound() -> RunConfig:
    """The MLPerf model at 512 samples a GPU, the load of GBS 65536 on 16 nodes: the host is the limit."""
    return RunConfig(
        preset="launch-bound",
        model=MLPERF_MODEL,
        data=DataConfig(source="random"),
        local_batch_size=512,
        iterations=250,
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "smoke": smoke,
    "mlperf-dcnv2": mlperf_dcnv2,
    "launch-bound": launch_bound,
}


def preset(name: str) -> RunConfig:
    """The preset called `name`; ValueError names the known ones."""
    if name not in PRESETS:
        raise ValueError(f"--preset {name!r} is unknown: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]()
