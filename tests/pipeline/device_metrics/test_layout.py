"""DeviceRecMetrics' refusals by name, and its slots."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torchrec.metrics.metric_module import REC_METRICS_MAPPING
from torchrec.metrics.metrics_config import (
    MetricsConfig,
    RecComputeMode,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    SessionMetricDef,
)
from torchrec.metrics.ne import NEMetric
from torchrec.metrics.rec_metric import RecMetricList

from dlrm_bench.pipeline.device_metrics import DeviceRecMetrics
from dlrm_bench.pipeline.device_metrics.layout import SUMS, layout_of
from tests.pipeline.device_metrics.made_metrics import WINDOWS, config, made, tasks

TAKEN = {*WINDOWS}


def refused(of: MetricsConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(DeviceRecMetrics, of)


@pytest.mark.parametrize("metric", sorted(set(REC_METRICS_MAPPING) - TAKEN, key=str), ids=str)
def test_other_metrics_are_refused_by_name(metric: RecMetricEnum) -> None:
    """Every metric that TorchRec has, with what its own constructor wants."""
    session = SessionMetricDef("session", top_threshold=1)
    of = [replace(task, session_metric_def=session, tensor_name="tensor") for task in tasks(1)]
    arguments = {
        RecMetricEnum.NDCG: {"session_key": "session", "exponential_gain": False},
        RecMetricEnum.SEGMENTED_NE: {"num_groups": 2, "grouping_keys": "group"},
        RecMetricEnum.MULTICLASS_RECALL: {"number_of_classes": 2},
    }
    refused(config(of, {metric: 100}, {metric: arguments.get(metric, {})}), "keep .* in a RecMetricModule beside it")


def first(options: dict[str, Any]) -> MetricsConfig:
    return config(tasks(2), **options)


def without_prediction() -> MetricsConfig:
    return config([RecTaskInfo("a", "l", "", "")])


def same_names() -> MetricsConfig:
    return config([RecTaskInfo("a", "l", "p", "w"), RecTaskInfo("a", "k", "q", "v")])


def unknown_task() -> MetricsConfig:
    of = config(tasks(2))
    of.rec_metrics[RecMetricEnum.NE].rec_tasks = tasks(3)
    return of


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (lambda: first({"fused_update_limit": 4}), "ne: fused_update_limit is 4"),
        (
            lambda: first({"rec_compute_mode": RecComputeMode.FUSED_TASKS_COMPUTATION, "should_validate_update": True}),
            "ne: should_validate_update under rec_compute_mode FUSED_TASKS_COMPUTATION",
        ),
        (lambda: first({"arguments": {RecMetricEnum.AUC: {"grouped_auc": True}}}), "auc: .* grouped_auc"),
        (without_prediction, "task 'a' lacks"),
        (same_names, "rec_tasks has 'a' twice"),
        (unknown_task, r"ne has the tasks \['task2'\], which rec_tasks lacks"),
        (lambda: config(tasks(1), {}), "rec_metrics is empty"),
    ],
    ids=["fused-updates", "fused-validated", "grouped-auc", "no-prediction", "same-names", "unknown-task", "no-metric"],
)
def test_what_would_differ_is_refused_by_name(of: Callable[[], MetricsConfig], message: str) -> None:
    refused(of(), message)


def ne(my_rank: int = 0, window_size: int = 100) -> NEMetric:
    return NEMetric(world_size=1, my_rank=my_rank, batch_size=8, tasks=tasks(1), window_size=window_size)


def test_lists_made_by_hand_are_checked_too() -> None:
    with pytest.raises(ValueError, match="ne twice"):
        layout_of(tasks(1), RecMetricList([ne(), ne(window_size=50)]))
    calibration = REC_METRICS_MAPPING[RecMetricEnum.CALIBRATION]
    other = calibration(world_size=1, my_rank=1, batch_size=8, tasks=tasks(1), window_size=100)
    with pytest.raises(ValueError, match="my_rank of rec_metrics differ"):
        layout_of(tasks(1), RecMetricList([ne(), other]))


def test_states_that_another_torchrec_has_are_refused() -> None:
    metric = ne()
    metric._metrics_computations[0]._add_state("surprise", [], add_window_state=False)
    with pytest.raises(ValueError, match="surprise"):
        layout_of(tasks(1), RecMetricList([metric]))


def test_an_update_limit_of_one_is_none() -> None:
    made(DeviceRecMetrics, config(tasks(1), fused_update_limit=1))


def test_slots_follow_the_metrics() -> None:
    of = config(tasks(3))
    of.rec_metrics[RecMetricEnum.AUC].rec_tasks = tasks(3)[2:]
    layout = made(DeviceRecMetrics, of, world_size=2).layout
    assert [slots.first for slots in layout.metrics] == [0, 4, 6, 8, 12]
    assert len(layout.sources) == len(layout.windows) == 14
    assert [SUMS[source] for source in layout.sources[4:8]] == ["prediction", "positive", "positive", "weight"]
    assert layout.windows[:5] == (50, 50, 50, 50, 65)
    assert layout.auc_tasks == (2,)
    assert layout.auc_window == 45


def test_tasks_of_no_metric_are_left_out() -> None:
    of = config(tasks(3))
    for metric in of.rec_metrics.values():
        metric.rec_tasks = [of.rec_tasks[1]]
    assert [task.name for task in made(DeviceRecMetrics, of).layout.tasks] == ["task1"]


def test_definitions_by_place_are_taken() -> None:
    rec_tasks = tasks(2)
    by_place = {RecMetricEnum.NE: RecMetricDef(rec_task_indices=[1], window_size=100)}
    layout = made(DeviceRecMetrics, MetricsConfig(rec_tasks=rec_tasks, rec_metrics=by_place)).layout
    assert [task.name for task in layout.tasks] == ["task1"]
