"""Named complete configurations: each preset is a function that returns one."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from dlrm_bench.bench.config import MLPerfConfig, RunConfig
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.dcnv2.presets import training

MIN_TIME_S = 10.0
"""Seconds of timed iterations: in windows of 0.1 to 3.4 s, 23 of 104 committed runs had a drift of more than 2 %."""


def smoke() -> RunConfig:
    """Train tiny tables on a planted data set to a target AUC: a minute on two CPU cores or one GPU."""
    return _run("smoke", target_auc=0.82, loss_interval=20)


def mlperf_dcnv2() -> RunConfig:
    """The MLPerf model with all 26 full-size tables; 6912 samples a GPU are GBS 55296 on eight. Random batches."""
    return _run("mlperf-dcnv2", mlperf=MLPerfConfig(division="closed"), min_time=MIN_TIME_S)


def launch_bound() -> RunConfig:
    """The MLPerf model at 512 samples a GPU, the load of GBS 65536 on 16 nodes: the host is the limit."""
    return _run("launch-bound", min_time=MIN_TIME_S)


def _run(preset: str, **fields_of_run: Any) -> RunConfig:
    trained = training(preset)
    shared = {field.name: getattr(trained, field.name) for field in fields(TrainingConfig)}
    return RunConfig(preset=preset, **shared, **fields_of_run)


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "smoke": smoke,
    "mlperf-dcnv2": mlperf_dcnv2,
    "launch-bound": launch_bound,
}


def preset(name: str) -> RunConfig:
    """The preset of this name; ValueError names the known ones."""
    training(name)
    return PRESETS[name]()
