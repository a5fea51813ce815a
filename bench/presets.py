"""Named complete configurations of runs: the presets of all benchmarks."""

from dataclasses import fields
from typing import Literal, cast

from dlrm_bench.bench.config import MLPerfConfig, RunConfig
from dlrm_bench.dlrm.benchmarks import preset_of
from dlrm_bench.dlrm.config import TrainingConfig


def preset(name: str) -> RunConfig:
    """Returns the configuration of the preset of this name; ValueError names the known presets."""
    benchmark, found = preset_of(name)
    trained = {field.name: getattr(found.training, field.name) for field in fields(TrainingConfig)}
    division = cast(Literal["closed", "open"], found.division)
    return RunConfig(
        preset=name, benchmark=benchmark.name, mlperf=MLPerfConfig(division=division), **trained, **found.run
    )
