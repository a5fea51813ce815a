"""dlrm-bench data: the commands of each benchmark's data."""

from collections.abc import Sequence
from typing import Literal

from dlrm_bench.dlrm.benchmarks import BENCHMARKS, preset_of

DataCommand = Literal["generate", "fill", "preprocess", "check", "speed"]


def run_data(what: DataCommand, words: Sequence[str]) -> int:
    """Hands the flags on to a command of the benchmark that --preset names, by default the first one; returns the exit
    status. ValueError names the known presets."""
    preset, flags = _split(words)
    benchmark = preset_of(preset)[0] if preset is not None else BENCHMARKS[0]
    if benchmark.data_command is None:
        raise ValueError(f"--preset {preset}: {benchmark.title} has random batches alone, and no files")
    return benchmark.data_command(what, preset, flags)


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the value of --preset, given as `--preset NAME` or `--preset=NAME`, and all other words."""
    preset, others, rest = None, [], iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag == "--preset":
            preset = value if equals else next(rest, None)
        else:
            others.append(word)
    return preset, others
