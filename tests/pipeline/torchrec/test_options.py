"""Options of the pipelines over TorchRec's modules."""

import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

from dlrm_bench.pipeline.five_stage.options import FiveStageOptions, HostSwitches
from dlrm_bench.pipeline.torchrec.options import FiveStageSwitches, TorchRecOptions
from tests.cases import SMALL_MODEL
from tests.pipeline.small_runs import small
from tests.pipelines import changed


def test_graphs_of_the_dists_need_fixed_sizes() -> None:
    with pytest.raises(ValueError, match="--graph-dists needs --trim-input-dist"):
        FiveStageSwitches(graph_dists=True)
    assert FiveStageSwitches(graph_dists=True, trim_input_dist=True).graph_dists


@pytest.mark.parametrize("graph", ["iteration", "iteration-or-dense"])
def test_graphs_of_iterations_need_fixed_sizes_and_one_thread(graph: Any) -> None:
    with pytest.raises(ValueError, match=f"--cuda-graph {graph} needs --trim-input-dist"):
        FiveStageSwitches(cuda_graph=graph)
    with pytest.raises(ValueError, match="leave --launch-threads at 1"):
        FiveStageSwitches(cuda_graph=graph, trim_input_dist=True, launch_threads=2)
    assert FiveStageSwitches(cuda_graph=graph, trim_input_dist=True).graphs_iterations


@pytest.mark.parametrize("changed", [{"cuda_graph": "dense"}, {"row_capacity": 0.5}])
def test_a_capacity_of_rows_is_for_graphs_of_iterations(changed: Any) -> None:
    of_graphs: Any = {"cuda_graph": "iteration", "trim_input_dist": True, "row_capacity": 1.0}
    assert FiveStageSwitches(**of_graphs).row_capacity == 1.0
    with pytest.raises(ValueError, match="needs --cuda-graph iteration"):
        FiveStageSwitches(**(of_graphs | changed))


def test_peer_memory_is_for_graphs_of_iterations() -> None:
    of_graphs: Any = {"cuda_graph": "iteration", "trim_input_dist": True}
    assert FiveStageSwitches(**of_graphs, peer_memory=True).peer_memory
    with pytest.raises(ValueError, match="--peer-memory needs --cuda-graph iteration"):
        FiveStageSwitches(cuda_graph="dense", peer_memory=True)


@pytest.mark.parametrize("schedule", ["fused-sparse-dist", "prefetch-sparse-dist"])
def test_two_schedules_need_a_gpu(schedule: Any) -> None:
    said = TorchRecOptions(schedule=schedule, constraints=("1=hbm:0.5",)).needs_gpu
    assert said is not None
    assert said.startswith(f"--schedule {schedule} needs a GPU: on this machine choose")
    assert TorchRecOptions(schedule="base").needs_gpu is None
    assert FiveStageSwitches(cuda_graph="dense").needs_gpu is None


def test_prefetching_needs_a_cache_to_fill() -> None:
    with pytest.raises(ValueError, match="add --constraints TABLES=hbm:SHARE, or choose sparse-dist"):
        TorchRecOptions(schedule="prefetch-sparse-dist", constraints=("1=table-wise", "2=hbm:1"))
    with pytest.raises(ValueError, match="does not support --inplace-copy"):
        TorchRecOptions(schedule="prefetch-sparse-dist", constraints=("1=hbm:0.5",), inplace_copy=True)


def test_the_drop_ins_switches_are_flags_that_are_off() -> None:
    """They are declared once, off, for a ladder to switch on; the drop-in alone has some of them on."""
    switches = {field.name for field in fields(HostSwitches)}
    assert switches == {field.name for field in fields(FiveStageOptions)} - {"uneven_end"}
    assert switches < {field.name for field in fields(FiveStageSwitches)}
    off = {name: getattr(FiveStageSwitches(), name) for name in switches}
    assert HostSwitches(**off) == HostSwitches()
    assert not any(off[name] for name in ("avoid_record_streams", "pinned_d2h"))


def test_flags_are_known_without_torch() -> None:
    program = "import sys, dlrm_bench.pipeline.torchrec.options; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("pipeline", ["torchrec", "five-stage"])
def test_raw_ids_are_refused_by_the_flag(pipeline: str) -> None:
    with pytest.raises(ValueError, match=r"--model\.raw-ids: the tables of --pipeline torchrec and five-stage have"):
        changed(small(), pipeline, model=replace(SMALL_MODEL, raw_ids=True))


@pytest.mark.parametrize("kind", [FiveStageSwitches, partial(TorchRecOptions, schedule="prefetch-sparse-dist")])
def test_a_share_that_is_no_number_is_named_with_its_flag(kind: Any) -> None:
    options = kind(constraints=("1=hbm:0,2",))
    assert options.in_host_memory() == "1=hbm:0,2"
    options = kind(constraints=("1=hbm:half",))
    with pytest.raises(ValueError, match="--constraints 1=hbm:half: hbm:half is not a share"):
        options.constraints_on(SMALL_MODEL.tables)
