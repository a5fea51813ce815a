"""DLRMv4, MLPerf Training's recommender from v6.1 on, as a benchmark."""

from importlib import import_module
from typing import cast

from dlrm_bench.dlrm.benchmark import Benchmark, Parts
from dlrm_bench.dlrm.dlrmv4 import ruleset
from dlrm_bench.dlrm.dlrmv4.cadence import cadence
from dlrm_bench.dlrm.dlrmv4.presets import PRESETS


def _parts() -> Parts:
    return cast(Parts, import_module("dlrm_bench.dlrm.dlrmv4.parts"))


DLRMV4 = Benchmark(
    name="dlrmv4",
    title="DLRMv4",
    presets=PRESETS,
    ladders={},
    pipelines=("torchrec", "five-stage"),
    ruleset=ruleset,
    work=None,
    parts=_parts,
    cadence=cadence,
)
