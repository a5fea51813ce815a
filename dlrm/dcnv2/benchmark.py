"""DLRM-DCNv2, the recommender of MLPerf Training v3.0 to v6.0, as a benchmark."""

from collections.abc import Sequence
from importlib import import_module
from typing import cast

from dlrm_bench.dlrm.benchmark import Benchmark, DataCommand, Parts
from dlrm_bench.dlrm.dcnv2 import ruleset, work
from dlrm_bench.dlrm.dcnv2.ladders import LADDERS
from dlrm_bench.dlrm.dcnv2.presets import PRESETS
from dlrm_bench.dlrm.dcnv2.static_check import check_static
from dlrm_bench.dlrm.dcnv2.static_schedule import static_schedule


def _parts() -> Parts:
    return cast(Parts, import_module("dlrm_bench.dlrm.dcnv2.parts"))


def _data_command(what: str, preset: str | None, words: Sequence[str]) -> int:
    return cast(DataCommand, import_module("dlrm_bench.dlrm.dcnv2.data.commands").main)(what, preset, words)


DCNV2 = Benchmark(
    name="dlrm_dcnv2",
    title="DLRM-DCNv2",
    presets=PRESETS,
    ladders=LADDERS,
    pipelines=("torchrec", "five-stage", "static"),
    ruleset=ruleset,
    work=work,
    parts=_parts,
    data_command=_data_command,
    table_ids=lambda config, batch: import_module("dlrm_bench.dlrm.dcnv2.parts").table_ids(config, batch),
    check_static=check_static,
    static_parts=lambda samples, options: static_schedule(samples, options).parts,
)
