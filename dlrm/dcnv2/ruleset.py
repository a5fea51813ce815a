"""MLPerf's rules for DLRM-DCNv2, a benchmark of the rounds v3.0 to v6.0; see benchmark.Ruleset.

Keys, values and their order follow the reference (mlcommons/training, recommendation_v2/torchrec_dlrm).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dlrm_bench.dlrm.benchmark import Published, SubmissionWords
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.data.dataset import Dataset
from dlrm_bench.dlrm.dcnv2.config import DataConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL, MLPERF_TARGET_AUC

versions = ("3.0.0", "3.1.0", "4.0.0", "4.1.0", "5.0.0", "5.1.0", "6.0.0")
"""Rounds with this benchmark."""
version = versions[-1]
"""The newest ruleset with this benchmark; the checkers' own default lacks it, and either passes or crashes."""
target_auc = MLPERF_TARGET_AUC
counts_samples = False
reference_names: tuple[str, ...] = ()
pinned_to_data: frozenset[str] = frozenset()
submission_words = SubmissionWords("dcnv2", "Criteo's 24 raw days", "that of the files", "")
published = (
    Published("8 x H200", "HugeCTR, NVIDIA v4.0", 55296, 3.25, 3.47),
    Published("8 x H200", "HugeCTR, HPE v5.0", 65536, 3.71, 3.44),
    Published("8 x H100", "HugeCTR, NVIDIA v4.0", 55296, 3.53, 3.84),
    Published("8 x B200", "HugeCTR, NVIDIA v5.0", 55296, 2.15, 2.26),
    Published("64 x H100", "HugeCTR, NVIDIA v4.1", 135168, 2.35, 1.32),
    Published("128 x H100", "HugeCTR, NVIDIA v4.1", 135168, 1.77, 0.94),
    Published("64 x GB200", "HugeCTR, Supermicro v5.0", 135168, 1.30, 0.713),
)
"""Results from the logs in mlcommons/training_results_v4.0, v4.1 and v5.0."""
published_caveats = (
    "Published runs read the Criteo data set from disks. Runs with random batches read memory. Random ids have "
    "MLPerf's multi-hot sizes and a similar skew, but not its ids.",
    "HugeCTR submissions compute in fp16 with fp32 master weights. The precision of ours is in their records.",
)

# Samples of days 0 to 22 and of the first half of day 23 (training_rules.adoc; ruleset 6.0.0 checks the latter).
TRAIN_SAMPLES = 4195197692
EVAL_SAMPLES = 89137319
EVALUATIONS = 20
train_samples = TRAIN_SAMPLES
EPS = 1e-8


def hyperparameters(
    config: TrainingConfig, global_batch_size: int, train_samples: int, eval_samples: int
) -> list[tuple[str, Any]]:
    """Returns the keys and values that the closed division fixes or requires to be logged."""
    optimizer = config.optimizer
    assert isinstance(optimizer, OptimizerConfig)
    return [
        ("seed", config.seed),
        ("global_batch_size", global_batch_size),
        ("opt_name", _optimizer_name(optimizer)),
        ("opt_base_learning_rate", optimizer.learning_rate),
        ("opt_adagrad_learning_rate_decay", 0),
        ("opt_weight_decay", 0),
        ("opt_adagrad_initial_accumulator_value", 0),
        ("opt_adagrad_epsilon", optimizer.eps),
        ("opt_learning_rate_warmup_steps", 0),
        ("opt_learning_rate_decay_start_step", 0),
        ("opt_learning_rate_decay_steps", 0),
        ("gradient_accumulation_steps", 1),
        ("train_samples", train_samples),
        ("eval_samples", eval_samples),
    ]


def obstacles(config: TrainingConfig, run: Mapping[str, Any], data: Dataset) -> Iterator[str]:
    """Yields the reasons why a run is not valid in the closed division, where only global batch size and learning rate
    are free (training_rules.adoc, Hyperparameters)."""
    options, optimizer = config.data, config.optimizer
    assert isinstance(options, DataConfig)
    assert isinstance(optimizer, OptimizerConfig)
    if options.source == "random":
        yield "the data are random"
    elif data.best_auc is not None:
        yield "a generator made the data"
    elif (data.train_samples, data.eval_samples) != (TRAIN_SAMPLES, EVAL_SAMPLES):
        yield (
            f"the data have {data.train_samples} training and {data.eval_samples} evaluation samples, MLPerf's "
            f"{TRAIN_SAMPLES} and {EVAL_SAMPLES}"
        )
    if config.model != MLPERF_MODEL:
        yield "the model is not MLPerf's"
    if run["target_auc"] != MLPERF_TARGET_AUC:
        yield f"--target-auc is {run['target_auc']}, MLPerf's {MLPERF_TARGET_AUC}"
    if run["evaluations_per_epoch"] != EVALUATIONS:
        yield f"--evaluations-per-epoch is {run['evaluations_per_epoch']}, MLPerf's {EVALUATIONS}"
    if (optimizer.embedding, optimizer.eps) != ("adagrad", EPS):
        yield "the optimizer is not MLPerf's Adagrad"


def _optimizer_name(optimizer: OptimizerConfig) -> str:
    """Returns `adagrad`, the closed division's only optimizer, or both names if tables use another one."""
    return "adagrad" if optimizer.embedding == "adagrad" else f"{optimizer.embedding} for tables, adagrad"
