"""dlrm-bench data: the commands of each benchmark's data."""

from collections.abc import Sequence
from typing import Literal

from dlrm_bench.dlrm.benchmarks import preset_of
from dlrm_bench.dlrm.dlrmv4.benchmark import DLRMV4

DataCommand = Literal["generate", "fill", "preprocess", "check", "speed"]


def run_data(what: DataCommand, words: Sequence[str]) -> int:
    """Hands the flags on to a command of the benchmark that --preset names, by default DLRM-DCNv2; returns the exit
    status. ValueError names the known presets."""
    preset, others = _split(words)
    if preset is not None and preset_of(preset)[0] is DLRMV4:
        from dlrm_bench.dlrm.dlrmv4.data.commands import main as of_dlrmv4

        return of_dlrmv4(what, preset, others)
    if what == "generate":
        from dlrm_bench.dlrm.dcnv2.data.planted import main
    elif what == "fill":
        from dlrm_bench.dlrm.dcnv2.data.fill import main
    elif what == "speed":
        from dlrm_bench.dlrm.dcnv2.data.speed import main
    elif what == "preprocess":
        from dlrm_bench.dlrm.dcnv2.data.preprocess import main
    else:
        from dlrm_bench.dlrm.dcnv2.data.check import main
    return main(words)


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
