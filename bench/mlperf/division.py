"""Which MLPerf division a run's log may name: closed is only what trains MLPerf's model on its data by its rules."""

from collections.abc import Iterator

from dlrm_bench.bench.config import Division, RunConfig
from dlrm_bench.dlrm.config import OptimizerConfig
from dlrm_bench.dlrm.dcnv2.data.dataset import Dataset
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL, MLPERF_TARGET_AUC

# Samples of days 0 to 22 and of the first half of day 23 (training_rules.adoc; ruleset 6.0.0 checks the latter).
MLPERF_TRAIN_SAMPLES = 4195197692
MLPERF_EVAL_SAMPLES = 89137319
MLPERF_EVALUATIONS = 20


def division_of(config: RunConfig, dataset: Dataset) -> tuple[Division, list[str]]:
    """The division that the log names, and why it is not closed where --mlperf.division asks for that.

    Only global batch size and learning rate are free in the closed division (training_rules.adoc, Hyperparameters).
    """
    if config.mlperf.division == "open":
        return "open", []
    obstacles = list(_obstacles(config, dataset))
    return ("open" if obstacles else "closed"), obstacles


def _obstacles(config: RunConfig, dataset: Dataset) -> Iterator[str]:
    if config.data.source == "random":
        yield "the data are random"
    elif dataset.best_auc is not None:
        yield "a generator made the data"
    elif (dataset.train_samples, dataset.eval_samples) != (MLPERF_TRAIN_SAMPLES, MLPERF_EVAL_SAMPLES):
        yield (
            f"the data have {dataset.train_samples} training and {dataset.eval_samples} evaluation samples, MLPerf's "
            f"{MLPERF_TRAIN_SAMPLES} and {MLPERF_EVAL_SAMPLES}"
        )
    if config.model != MLPERF_MODEL:
        yield "the model is not MLPerf's"
    if config.target_auc != MLPERF_TARGET_AUC:
        yield f"--target-auc is {config.target_auc}, MLPerf's {MLPERF_TARGET_AUC}"
    if config.evaluations_per_epoch != MLPERF_EVALUATIONS:
        yield f"--evaluations-per-epoch is {config.evaluations_per_epoch}, MLPerf's {MLPERF_EVALUATIONS}"
    if (config.optimizer.embedding, config.optimizer.eps) != ("adagrad", OptimizerConfig().eps):
        yield "the optimizer is not MLPerf's Adagrad"
