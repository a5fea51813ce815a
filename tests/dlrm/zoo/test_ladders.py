"""The ladders of the TorchRec models: one switch more on each rung, and launch/dlrm.py takes their flags."""

from itertools import pairwise
from typing import Any

import pytest

from dlrm_bench.dlrm.benchmarks import PRESETS
from dlrm_bench.dlrm.zoo.benchmark import ZOO
from dlrm_bench.dlrm.zoo.hstu.benchmark import HSTU
from dlrm_bench.launch.dlrm import parse

NAMES = [name for benchmark in (*ZOO, HSTU) for name in benchmark.presets]


@pytest.mark.parametrize("preset", NAMES)
def test_every_rung_adds_to_the_one_before(preset: str) -> None:
    benchmark, _ = PRESETS[preset]
    for name, rungs in benchmark.ladders.items():
        configs = [parse(["--preset", preset, *rung.flags]) for rung in rungs]
        assert {config.benchmark for config in configs} == {benchmark.name}
        assert all(rung.note for rung in rungs[1:])
        for before, after in pairwise(rungs):
            assert after.flags[: len(before.flags)] == before.flags
            assert (after.flags == before.flags) == (name == "same")
    assert [rung.name for rung in benchmark.ladders["ends"]] == ["stock", "graph-dists", "iteration-graph"]
    exchanges: Any = [parse(["--preset", preset, *rung.flags]).pipeline for rung in benchmark.ladders["exchange"]]
    assert [pipeline.peer_memory for pipeline in exchanges] == [False, True]
    assert benchmark.ladders["exchange"][0] == benchmark.ladders["ends"][-1]
    assert benchmark.ladders["drop-in"] == (*benchmark.ladders["ends"], benchmark.ladders["exchange"][1])
    last: Any = parse(["--preset", preset, *benchmark.ladders["ends"][-1].flags]).pipeline
    assert last.cuda_graph == ("iteration-or-dense" if preset.startswith("hstu") else "iteration")


@pytest.mark.parametrize("preset", ["hstu-tiny", "hstu-small", "zoo-sequence"])
def test_batches_of_sequences_are_padded_where_graphs_need_it(preset: str) -> None:
    ladders = PRESETS[preset][0].ladders
    configs = [parse(["--preset", preset, *rung.flags]) for rung in (*ladders["full"], *ladders["main"])]
    for config in configs:
        assert config.data.padded == (getattr(config.pipeline, "cuda_graph", "none") != "none")


def test_each_benchmark_has_a_name_of_its_own() -> None:
    names = [benchmark.name for benchmark, _ in PRESETS.values()]
    assert len(set(names)) == len(ZOO) + 3  # beside DLRM-DCNv2, DLRMv4 and HSTU
    assert len({benchmark.title for benchmark in ZOO}) == len(ZOO)
