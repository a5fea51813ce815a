"""Options that mean nothing are refused, and an environment that two threads cannot do with is named."""

import pytest

from dlrm_bench.pipeline.five_stage.options import FiveStageOptions, few_queues

CPU, GPU = "cpu", "cuda"
GRAPHS = "'none' or 'dense' or 'iteration' or 'iteration-or-dense'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuda_graph": True}, f"cuda_graph must be {GRAPHS}, not True"),
        ({"cuda_graph": "whole"}, f"cuda_graph must be {GRAPHS}, not 'whole'"),
        ({"launch_threads": 4}, "launch_threads must be 1 or 2, not 4"),
        ({"launch_threads": True}, "launch_threads must be 1 or 2, not True"),
        ({"avoid_record_streams": "yes"}, "avoid_record_streams must be False or True, not 'yes'"),
        ({"peer_memory": "auto"}, "peer_memory must be False or True, not 'auto'"),
        ({"pinned_d2h": 1}, "pinned_d2h must be False or True, not 1"),
    ],
)
def test_a_value_that_means_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=rf"^FiveStageOptions\.{message}$"):
        FiveStageOptions(**options)


@pytest.mark.parametrize("graph", ["iteration", "iteration-or-dense"])
def test_an_iterations_graph_is_launched_by_one_thread(graph):
    with pytest.raises(ValueError, match="replays whole iterations: set launch_threads=1"):
        FiveStageOptions(cuda_graph=graph, launch_threads=2)


@pytest.mark.parametrize("graph", ["none", "dense"])
def test_peer_memory_is_for_graphs_of_iterations(graph):
    with pytest.raises(ValueError, match=f"not for cuda_graph='{graph}': set cuda_graph='iteration', or leave"):
        FiveStageOptions(cuda_graph=graph, peer_memory=True)
    assert FiveStageOptions(cuda_graph="iteration-or-dense", peer_memory=True).peer_memory


@pytest.mark.parametrize("given", [None, "", "8", "many"])
def test_two_threads_need_hardware_queues(monkeypatch, given):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    why = few_queues(FiveStageOptions(launch_threads=2), GPU)
    assert why is not None
    assert f"CUDA_DEVICE_MAX_CONNECTIONS is {given or 'not set'}: set CUDA_DEVICE_MAX_CONNECTIONS=32" in why
    assert few_queues(FiveStageOptions(launch_threads=2), CPU) is None
    assert few_queues(FiveStageOptions(), GPU) is None
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert few_queues(FiveStageOptions(launch_threads=2), GPU) is None
