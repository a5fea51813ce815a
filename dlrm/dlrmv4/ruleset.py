"""MLPerf's rules for DLRMv4, a benchmark from round v6.1 on; see benchmark.Ruleset.

Keys, values and their order follow ruleset 6.1.0 of mlperf-logging (compliance_checker/training_6.1.0/) and the
reference (mlcommons/training, recommendation/).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dlrm_bench.dlrm.benchmark import Published, SubmissionWords
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.data.dataset import Dataset
from dlrm_bench.dlrm.dlrmv4.config import DataConfig, ModelConfig, OptimizerConfig, mlperf_learning_rate
from dlrm_bench.dlrm.dlrmv4.data.mlperf_checksums import EVAL_SAMPLES, TRAIN_SAMPLES
from dlrm_bench.dlrm.dlrmv4.presets import MLPERF_EVALUATIONS, MLPERF_TARGET_AUC

versions = ("6.1.0",)
"""Rulesets that know this benchmark, the newest last."""
version = versions[-1]
target_auc = MLPERF_TARGET_AUC
train_samples = TRAIN_SAMPLES
counts_samples = True
reference_names = ("hstu",)
"""Names of the benchmark in the reference's own logs; the rules allow only 'dlrmv4'."""
submission_words = SubmissionWords(
    "dlrmv4",
    "Yambda's parquet files",
    "windows of a day in turn, each by user and then by time",
    "--preset mlperf-dlrmv4 ",
)
published = (
    Published("8 x MI350X", "reference, AMD v6.1", 8192, 730.9, 159.6, 84.9),
    Published("8 x B200", "reference, a figure without its log", 8192, 631.7, None),
    Published("16 x MI350X", "reference, AMD v6.1", 16384, 782.4, 112.0, 44.5),
    Published("32 x MI350X", "reference, AMD v6.1", 32768, 848.9, 83.3, 24.4),
)
"""MI350X: means over the 20 logs of each batch size in mlcommons/training, recommendation/rcp_logs: the runs behind the
reference convergence points, not submissions. Their iterations include the first ones, which compile, and they evaluate
from the first point of the grid on."""
published_caveats = (
    "The reference's runs read Yambda's events. Generated listeners have similar histories and repeats, but not its "
    "events, and their labels are a teacher's.",
    "Results of the reference on MI350X are means of twenty runs each, made for its convergence points; they are not "
    "submissions, and their iterations include compilation.",
)
REFERENCE_CONVERGENCE = {8192: 69_067_662, 16384: 87_545_173, 32768: 112_903_964}
"""Samples to the target by global batch: the reference convergence points of rcps_dlrmv4.json, means of 20 runs without
the fastest and the slowest. MLPerf's checker interpolates linearly between points, of which it leaves out the middle
one: it judges a batch of 16,384 by 83.68 million samples, fewer than the reference's own runs need."""
pinned_to_data = frozenset(
    (
        "train_samples",
        "eval_samples",
        "opt_base_learning_rate",
        "opt_sparse_base_learning_rate",
    )
)
"""Keys for which even the open division allows only the values of MLPerf's own data, or matching rates: a run on
generated data logs its true values, and the checker refuses them."""

_FORMATS = {"fp32": "fp32", "tf32": "tf32", "bf16": "bfloat16"}
_WIDEST_FIRST = ("fp32", "tf32", "bfloat16", "fp16")
_BATCHES = (min(REFERENCE_CONVERGENCE), max(REFERENCE_CONVERGENCE))
"""Global batches between which reference convergence points are interpolated; a run outside has none."""
_CONFIG_FILE = "run.json"
"""The record's file that has the whole configuration as it was resolved."""
_ROUNDING = 1e-9
"""Share by which a learning rate may exceed its bounds, as in closed_dlrmv4.yaml."""


def hyperparameters(
    config: TrainingConfig, global_batch_size: int, train_samples: int, eval_samples: int
) -> list[tuple[str, Any]]:
    """Returns the keys and values that the closed division fixes or asks to know. The global batch stands before the
    learning rate: the checker reads the one with the other."""
    model, optimizer = config.model, config.optimizer
    assert isinstance(model, ModelConfig)
    assert isinstance(optimizer, OptimizerConfig)
    computed = _FORMATS[config.precision]
    multiplied = "fp8" if getattr(getattr(config, "pipeline", None), "fp8", False) else computed
    return [
        ("seed", config.seed),
        ("global_batch_size", global_batch_size),
        ("gradient_accumulation_steps", 1),
        ("train_samples", train_samples),
        ("eval_samples", eval_samples),
        ("max_sequence_length", model.max_length + 1),  # 4096 of the longest sequence, 4095
        ("opt_name", "Adam"),
        ("opt_base_learning_rate", optimizer.learning_rate),
        ("opt_adam_beta_1", optimizer.adam_betas[0]),
        ("opt_adam_beta_2", optimizer.adam_betas[1]),
        ("opt_adam_epsilon", optimizer.adam_eps),
        ("opt_weight_decay", 0.0),
        ("opt_gradient_clip_norm", optimizer.clip_norm),
        ("opt_sparse_name", "RowWiseAdagrad"),
        ("opt_sparse_base_learning_rate", optimizer.learning_rate),
        ("opt_learning_rate_warmup_steps", optimizer.ramp_steps),
        ("opt_learning_rate_warmup_start_lr", 0.0),
        ("eval_every_data_pct", 1 / getattr(config, "evaluations_per_epoch", MLPERF_EVALUATIONS)),
        ("lowest_numerical_precision_in_linear", multiplied),
        ("lowest_numerical_precision_in_attn", computed),
        ("lowest_numerical_precision_in_comm", _exchanged(config)),
        ("tensor_parallelism", 1),
        ("pipeline_parallelism", 1),
        ("context_parallelism", 1),
        ("expert_parallelism", 1),
        ("micro_batch_size", config.local_batch_size),
        ("config_filename", _CONFIG_FILE),
    ]


def _exchanged(config: TrainingConfig) -> str:
    """Returns the lowest number format of what ranks exchange: rows with their gradients, and dense gradients."""
    options = getattr(config, "pipeline", None)
    formats = {"fp32": "fp32", "none": "fp32", "bf16": "bfloat16", "fp16": "fp16"}
    found = {formats[getattr(options, switch, "fp32")] for switch in ("quantized_comms", "dense_all_reduce")}
    return max(found, key=_WIDEST_FIRST.index)


def obstacles(config: TrainingConfig, run: Mapping[str, Any], data: Dataset) -> Iterator[str]:
    """Yields what keeps a run out of the closed division, where only global batch size and learning rate are free, both
    within bounds (closed_dlrmv4.yaml; rcps_dlrmv4.json; training_policies, pull request 594)."""
    optimizer, windows = config.optimizer, config.data
    assert isinstance(optimizer, OptimizerConfig)
    assert isinstance(windows, DataConfig)
    if data.best_auc is not None:
        yield "a generator made the data"
    elif (data.train_samples, data.eval_samples) != (TRAIN_SAMPLES, EVAL_SAMPLES):
        yield (
            f"the data have {data.train_samples} training and {data.eval_samples} evaluation samples, MLPerf's "
            f"{TRAIN_SAMPLES} and {EVAL_SAMPLES}"
        )
    if _as_mlperfs(config.model) != ModelConfig():
        yield "the model is not MLPerf's"
    if windows.train_windows is not None:
        yield f"--data.train-windows is {windows.train_windows}: MLPerf's runs may use all windows"
    if run["target_auc"] != MLPERF_TARGET_AUC:
        yield f"--target-auc is {run['target_auc']}, MLPerf's {MLPERF_TARGET_AUC}"
    if run["evaluations_per_epoch"] != MLPERF_EVALUATIONS:
        yield f"--evaluations-per-epoch is {run['evaluations_per_epoch']}, MLPerf's {MLPERF_EVALUATIONS}"
    if replace(optimizer, learning_rate=1e-6) != OptimizerConfig(learning_rate=1e-6):
        yield "the optimizers are not MLPerf's Adam and row-wise Adagrad"
    batch = run["global_batch_size"]
    if not _BATCHES[0] <= batch <= _BATCHES[1]:
        yield f"the global batch is {batch}: reference convergence points are of {_BATCHES[0]} to {_BATCHES[1]}"
    least, most = (share * mlperf_learning_rate(batch) for share in (0.5, 1.5))
    if not least * (1 - _ROUNDING) <= optimizer.learning_rate <= most * (1 + _ROUNDING):
        yield f"--optimizer.learning-rate is {optimizer.learning_rate}: at this batch it is {least:.3g} to {most:.3g}"


def _as_mlperfs(model: Any) -> Any:
    """Returns the model with MLPerf's value of each field that decides on rounding and dropout's masks alone."""
    assert isinstance(model, ModelConfig)
    same = ModelConfig()
    return replace(
        model,
        last_layer=same.last_layer,
        recompute_layers=same.recompute_layers,
        dropout_seed=same.dropout_seed,
        kernels=same.kernels,
        content=same.content,
        network=same.network,
        reference=same.reference,
    )
