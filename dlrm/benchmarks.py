"""All benchmarks, by their names and by the names of their presets."""

from collections.abc import Mapping
from typing import Any

from dlrm_bench.dlrm.benchmark import Benchmark, Preset
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.dcnv2.benchmark import DCNV2
from dlrm_bench.dlrm.dlrmv4.benchmark import DLRMV4
from dlrm_bench.dlrm.zoo.benchmark import ZOO
from dlrm_bench.dlrm.zoo.hstu.benchmark import HSTU

BENCHMARKS: tuple[Benchmark, ...] = (DCNV2, DLRMV4, *ZOO, HSTU)

PRESETS: Mapping[str, tuple[Benchmark, Preset]] = {
    name: (benchmark, preset) for benchmark in BENCHMARKS for name, preset in benchmark.presets.items()
}
"""Every preset with its benchmark, by its name."""


def preset_of(name: str) -> tuple[Benchmark, Preset]:
    """Returns a preset and its benchmark; ValueError names the known presets."""
    if name not in PRESETS:
        raise ValueError(f"--preset {name!r} is unknown: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def benchmark_of(config: Mapping[str, Any]) -> Benchmark | None:
    """Returns the benchmark of a record's config; None if its name is unknown, as in records of another program's
    timings."""
    return next((benchmark for benchmark in BENCHMARKS if benchmark.name == config.get("benchmark")), None)


def named(name: str) -> Benchmark:
    """Returns the benchmark of this name; ValueError lists the known names."""
    for benchmark in BENCHMARKS:
        if benchmark.name == name:
            return benchmark
    raise ValueError(f"there is no benchmark {name!r}: known are {', '.join(b.name for b in BENCHMARKS)}")


def of_mlperf_log(name: str | None) -> Benchmark | None:
    """Returns the benchmark that an MLPerf log calls by this name; None for no name or an unknown one."""
    for benchmark in BENCHMARKS:
        rules = benchmark.ruleset
        if rules is not None and name in (benchmark.name, *rules.reference_names):
            return benchmark
    return None


def restored(config: Mapping[str, Any]) -> TrainingConfig:
    """Returns the training configuration of a record's config; ValueError if its benchmark is unknown."""
    return named(str(config.get("benchmark"))).restored(config)
