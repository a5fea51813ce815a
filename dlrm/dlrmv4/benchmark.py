"""DLRMv4, MLPerf Training's recommender from v6.1 on, as a benchmark."""

from collections.abc import Sequence
from importlib import import_module
from typing import cast

from dlrm_bench.dlrm.benchmark import Benchmark, DataCommand, Parts
from dlrm_bench.dlrm.dlrmv4 import ruleset
from dlrm_bench.dlrm.dlrmv4.cadence import cadence
from dlrm_bench.dlrm.dlrmv4.ladders import LADDERS
from dlrm_bench.dlrm.dlrmv4.presets import PRESETS
from dlrm_bench.dlrm.dlrmv4.static_check import check_static


def _parts() -> Parts:
    return cast(Parts, import_module("dlrm_bench.dlrm.dlrmv4.parts"))


def _data_command(what: str, preset: str | None, words: Sequence[str]) -> int:
    return cast(DataCommand, import_module("dlrm_bench.dlrm.dlrmv4.data.commands").main)(what, preset, words)


DLRMV4 = Benchmark(
    name="dlrmv4",
    title="DLRMv4",
    presets=PRESETS,
    ladders=LADDERS,
    pipelines=("torchrec", "five-stage", "static"),
    ruleset=ruleset,
    work=None,
    parts=_parts,
    data_command=_data_command,
    cadence=cadence,
    check_static=check_static,
)
