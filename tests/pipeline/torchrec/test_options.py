"""Options of the pipelines over TorchRec's modules."""

from typing import get_type_hints

import pytest

from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.torchrec.options import FiveStageSwitches, TorchRecOptions


def test_graphs_of_the_dists_need_fixed_sizes() -> None:
    with pytest.raises(ValueError, match="--graph-dists needs --trim-input-dist"):
        FiveStageSwitches(graph_dists=True)
    assert FiveStageSwitches(graph_dists=True, trim_input_dist=True).graph_dists


def test_only_the_fused_schedule_needs_a_gpu() -> None:
    said = TorchRecOptions(schedule="fused-sparse-dist").needs_gpu
    assert said is not None
    assert said.startswith("--schedule fused-sparse-dist needs a GPU: on this machine choose")
    assert TorchRecOptions(schedule="base").needs_gpu is None
    assert FiveStageSwitches(cuda_graph="dense").needs_gpu is None


def test_the_harness_has_a_switch_for_each_option_of_the_drop_in() -> None:
    """By one name and with the same values; here they are all off by default, for a ladder to switch on."""
    ours, theirs = get_type_hints(FiveStageSwitches), get_type_hints(FiveStageOptions)
    del theirs["uneven_end"]  # a run gives all ranks the same number of batches
    assert {name: ours[name] for name in theirs} == theirs
    off = FiveStageOptions(**{name: getattr(FiveStageSwitches(), name) for name in theirs})
    assert off == FiveStageOptions(avoid_record_streams=False, pinned_d2h=False, cuda_graph="none", launch_threads=1)
