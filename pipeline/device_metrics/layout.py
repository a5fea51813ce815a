"""Table of slots for a RecMetricList: the sum that feeds each state of each metric, and its window.

A slot is one float64 state of one metric ("pos_labels" of NE), held for every task, once over the lifetime and once
over the metric's window. Metrics share the sums of a batch, but not their states: their windows differ, and a
checkpoint may contain one metric's history and not the other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrec.metrics.accuracy import AccuracyMetric
from torchrec.metrics.auc import AUCMetric
from torchrec.metrics.calibration import CalibrationMetric
from torchrec.metrics.ctr import CTRMetric
from torchrec.metrics.metrics_config import RecComputeMode, RecTaskInfo
from torchrec.metrics.mse import MSEMetric
from torchrec.metrics.ne import NEMetric
from torchrec.metrics.rec_metric import RecMetric, RecMetricList

SUMS = (
    "cross_entropy",
    "weight",
    "positive",
    "negative",
    "prediction",
    "squared_error",
    "squared_label",
    "accuracy",
)
"""The sums of one batch, in the order of the update: cross entropy in bits, w, w l, w (1 - l), w p, w (l - p)^2, w l^2
and w [(p >= threshold) = l], with weights w, labels l and predictions p."""

_STATES: dict[type[RecMetric], dict[str, str]] = {
    NEMetric: {
        "cross_entropy_sum": "cross_entropy",
        "weighted_num_samples": "weight",
        "pos_labels": "positive",
        "neg_labels": "negative",
    },
    CalibrationMetric: {"calibration_num": "prediction", "calibration_denom": "positive"},
    CTRMetric: {"ctr_num": "positive", "ctr_denom": "weight"},
    MSEMetric: {
        "error_sum": "squared_error",
        "weighted_num_samples": "weight",
        "label_sum": "positive",
        "label_squared_sum": "squared_label",
    },
    AccuracyMetric: {"accuracy_sum": "accuracy", "weighted_num_samples": "weight"},
}
"""TorchRec's state names of each metric, and the sum that feeds each state."""

_FUSED = (RecComputeMode.FUSED_TASKS_COMPUTATION, RecComputeMode.FUSED_TASKS_AND_STATES_COMPUTATION)
_ETA = 1e-12
_THRESHOLD = 0.5


@dataclass(frozen=True)
class Slots:
    """The slots of one metric."""

    metric: RecMetric
    tasks: tuple[int, ...]
    """Tasks for which the metric is reported, as indices into Layout.tasks."""
    states: tuple[str, ...]
    first: int
    """The slot of states[0]; those of the other states follow."""

    @property
    def fused(self) -> bool:
        """Whether one of TorchRec's computations holds all tasks, instead of one each."""
        return self.metric._compute_mode in _FUSED


@dataclass(frozen=True)
class Layout:
    """Everything that an update needs to know about the metrics."""

    tasks: tuple[RecTaskInfo, ...]
    metrics: tuple[Slots, ...]
    """The metrics in list order, without AUC."""
    sources: tuple[int, ...]
    """The index into SUMS of each slot's sum."""
    windows: tuple[int, ...]
    """The window of each slot, in samples of one rank."""
    auc: Slots | None
    auc_window: int
    validate: bool
    """Whether a task's batch is skipped if all its weights are zero (should_validate_update)."""
    reports_everywhere: bool
    """Whether every rank computes values from the sums of all ranks (compute_on_all_ranks), or only rank 0."""
    my_rank: int
    process_group: Any
    """Process group whose ranks' sums are added; None for all ranks."""
    eta: float
    threshold: float

    @property
    def auc_tasks(self) -> tuple[int, ...]:
        """Tasks whose samples are kept, for AUC."""
        return self.auc.tasks if self.auc else ()


def layout_of(rec_tasks: list[RecTaskInfo], rec_metrics: RecMetricList) -> Layout:
    """Returns the layout of these metrics.

    Raises ValueError, naming the metric or the task, for anything that DeviceRecMetrics cannot compute as TorchRec
    does.
    """
    names = [task.name for task in rec_tasks]
    for task in rec_tasks:
        _check_task(task, names)
    metrics: list[RecMetric] = list(rec_metrics.rec_metrics)
    if not metrics:
        raise ValueError("rec_metrics is empty: name at least one metric in MetricsConfig.rec_metrics")
    of_metrics = {}
    for metric in metrics:
        name = str(metric._namespace)
        if name in of_metrics:
            raise ValueError(f"rec_metrics has {name} twice, which would give equal keys: leave one out")
        of_metrics[name] = _tasks_of(metric, names)
        _check_metric(metric, name)
    used = sorted({task for tasks in of_metrics.values() for task in tasks})
    slots: list[Slots] = []
    sources: list[int] = []
    windows: list[int] = []
    auc = None
    for metric in metrics:
        tasks = tuple(used.index(task) for task in of_metrics[str(metric._namespace)])
        if type(metric) is AUCMetric:
            auc = Slots(metric, tasks, (), 0)
            continue
        states = _STATES[type(metric)]
        slots.append(Slots(metric, tasks, tuple(states), len(sources)))
        sources += [SUMS.index(source) for source in states.values()]
        windows += [metric._window_size] * len(states)
    common = [_common_options(metric) for metric in metrics]
    differing = [name for name in common[0] if any(options[name] is not common[0][name] for options in common)]
    if differing:
        raise ValueError(f"{', '.join(differing)} of rec_metrics differ: give all metrics the same values")
    return Layout(
        tasks=tuple(rec_tasks[task] for task in used),
        metrics=tuple(slots),
        sources=tuple(sources),
        windows=tuple(windows),
        auc=auc,
        auc_window=auc.metric._window_size if auc else 0,
        validate=common[0]["should_validate_update"],
        reports_everywhere=common[0]["compute_on_all_ranks"],
        my_rank=common[0]["my_rank"],
        process_group=common[0]["process_group"],
        eta=_option(metrics, NEMetric, "eta", _ETA),
        threshold=_option(metrics, AccuracyMetric, "_threshold", _THRESHOLD),
    )


def _check_task(task: RecTaskInfo, names: list[str]) -> None:
    if names.count(task.name) > 1:
        raise ValueError(f"rec_tasks has {task.name!r} twice: give every task a unique name")
    if not (task.label_name and task.prediction_name and task.weight_name):
        raise ValueError(f"task {task.name!r} lacks label_name, prediction_name or weight_name: set all three")


def _tasks_of(metric: RecMetric, names: list[str]) -> list[int]:
    """Returns the indices into rec_tasks of a metric's tasks."""
    missing = [task.name for task in metric._tasks if task.name not in names]
    if missing:
        raise ValueError(
            f"{metric._namespace} has the tasks {missing}, which rec_tasks lacks, so they would never be updated: "
            "add them to rec_tasks"
        )
    return [names.index(task.name) for task in metric._tasks]


def _check_metric(metric: RecMetric, name: str) -> None:
    kinds = [*_STATES, AUCMetric]
    if type(metric) not in kinds:
        taken = ", ".join(str(kind._namespace) for kind in kinds)
        raise ValueError(
            f"DeviceRecMetrics does not compute {name} ({type(metric).__name__}), only {taken}: "
            f"keep {name} in a RecMetricModule beside it"
        )
    if metric._fused_update_limit > 1:
        raise ValueError(
            f"{name}: fused_update_limit is {metric._fused_update_limit}, which makes windows coarser: set it to 0; "
            "an update is one kernel without it"
        )
    if metric._should_validate_update and metric._compute_mode in _FUSED:
        raise ValueError(
            f"{name}: should_validate_update under rec_compute_mode {metric._compute_mode.name} skips a batch only if "
            "no task has a weight: use UNFUSED_TASKS_COMPUTATION, which costs the same here"
        )
    computation: Any = metric._metrics_computations[0]
    if type(metric) is AUCMetric:
        if computation._grouped_auc:
            raise ValueError(f"{name}: DeviceRecMetrics does not compute grouped_auc: keep it in a RecMetricModule")
        return
    states = {state for state in computation._defaults if not state.startswith("window_")} - {"has_valid_update"}
    if states != set(_STATES[type(metric)]):
        raise ValueError(f"{name} of this TorchRec has the states {sorted(states)}: DeviceRecMetrics expects others")


def _common_options(metric: RecMetric) -> dict[str, Any]:
    """Returns the options that TorchRec gives to every metric alike, except in a hand-made list."""
    computation: Any = metric._metrics_computations[0]
    return {
        "should_validate_update": metric._should_validate_update,
        "compute_on_all_ranks": computation._compute_on_all_ranks,
        "my_rank": metric._my_rank,
        "process_group": computation.process_group,
    }


def _option(metrics: list[RecMetric], kind: type[RecMetric], name: str, default: float) -> float:
    """Returns an attribute of the computation of one kind of metric, or the default if there is no such metric."""
    found = [getattr(metric._metrics_computations[0], name) for metric in metrics if type(metric) is kind]
    return float(found[0]) if found else default
