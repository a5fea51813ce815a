"""Options of the static pipeline."""

import pytest

from dlrm_bench.pipeline.static.options import StaticOptions


def test_peer_memory_needs_presorted_ids() -> None:
    with pytest.raises(ValueError, match="--peer-memory needs --presort-ids"):
        StaticOptions(peer_memory=True)
    assert StaticOptions(peer_memory=True, presort_ids=True).peer_memory


@pytest.mark.parametrize("graph", ["iteration", "try"])
def test_graphs_need_a_gpu(graph: str) -> None:
    said = StaticOptions(cuda_graph=graph).needs_gpu  # type: ignore[arg-type]
    assert said == f"--cuda-graph {graph} needs a GPU: on this machine choose --cuda-graph none"
    assert StaticOptions().needs_gpu is None
