"""DLRMv4, MLPerf Training's recommender from v6.1 on, as a benchmark."""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

from dlrm_bench.dlrm.benchmark import Benchmark, DataCommand, Parts, SampleSizes
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.dlrmv4 import ruleset, work
from dlrm_bench.dlrm.dlrmv4.cadence import cadence
from dlrm_bench.dlrm.dlrmv4.ladders import LADDERS
from dlrm_bench.dlrm.dlrmv4.many_ranks import many_ranks
from dlrm_bench.dlrm.dlrmv4.presets import PRESETS
from dlrm_bench.dlrm.dlrmv4.static_check import check_static

if TYPE_CHECKING:
    from dlrm_bench.dlrm.data.dataset import Dataset


def _parts() -> Parts:
    return cast(Parts, import_module("dlrm_bench.dlrm.dlrmv4.parts"))


def _data_command(what: str, preset: str | None, words: Sequence[str]) -> int:
    return cast(DataCommand, import_module("dlrm_bench.dlrm.dlrmv4.data.commands").main)(what, preset, words)


def _sample_sizes(dataset: "Dataset", config: TrainingConfig, world_size: int, iterations: range) -> SampleSizes:
    from dlrm_bench.dlrm.dlrmv4.data.sizes import sample_sizes  # records are read without torch

    return sample_sizes(dataset, config, world_size, iterations)


DLRMV4 = Benchmark(
    name="dlrmv4",
    title="DLRMv4",
    presets=PRESETS,
    ladders=LADDERS,
    pipelines=("torchrec", "five-stage", "static"),
    ruleset=ruleset,
    work=work,
    parts=_parts,
    data_command=_data_command,
    cadence=cadence,
    sample_sizes=_sample_sizes,
    many_ranks=many_ranks,
    activation_bytes=work.activation_bytes,
    check_static=check_static,
)
