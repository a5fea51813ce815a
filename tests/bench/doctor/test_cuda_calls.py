import pytest

from dlrm_bench.bench.doctor.cuda_calls import ALLOCATOR, COPY, LAUNCH, SYNC, counts, cuda_calls, take_costs
from dlrm_bench.bench.doctor.rank_file import MARK, MARKED_ITERATION
from dlrm_bench.bench.doctor.trace import ITERATION
from tests.bench.doctor.made import stock_events
from tests.bench.profile.gpu_traces import AUTOGRAD, call, event, graph_trace, stock_trace


def test_calls_know_their_iteration_mark_range_and_direction():
    events = stock_events(False) + stock_events(True)
    calls = cuda_calls(events, MARKED_ITERATION)
    first = [c for c in calls if c.iteration == 0]
    assert [(c.kind, c.mark, c.within, c.direction) for c in first] == [
        (COPY, 0, "aten::_local_scalar_dense", "DtoH pageable"),
        (SYNC, 0, "aten::_local_scalar_dense", None),
        (COPY, 1, "aten::copy_", "HtoD pageable"),
        (SYNC, 1, "aten::copy_", None),
        (COPY, None, "", "HtoD pinned"),
        (LAUNCH, None, "", None),
        (ALLOCATOR, None, "", None),
    ]
    assert [c.mark for c in calls if c.iteration == 1 and c.kind == SYNC] == [2, 3]


def test_counts_are_an_iterations_and_leave_out_threads_that_launch_nothing():
    traced = cuda_calls(stock_events(False), ITERATION)
    assert counts(traced, 2) == {
        "sync": 2,
        "copy": 3,
        "launch": 1,
        "allocator": 1,
        "DtoH pageable": 1,
        "HtoD pageable": 1,
        "HtoD pinned": 1,
    }


def test_the_same_counts_as_those_of_the_instrumented_twin():
    """The traces are those with which bench/profile/trace.py is tested."""
    counted = counts(cuda_calls(stock_trace(), ITERATION), 2)
    assert (counted["launch"], counted["sync"], counted["copy"]) == (4, 1, 1)
    assert counts(cuda_calls(graph_trace(), ITERATION), 3) == {"copy": 1, "graph_launch": 1, "HtoD pinned": 1}


def test_costs_come_from_iterations_without_marks():
    events = stock_events(False) + stock_events(True)
    traced, marked = cuda_calls(events, ITERATION), cuda_calls(events, MARKED_ITERATION)
    assert [c.us for c in marked if c.kind == SYNC] == [200, 20, 200, 20]
    take_costs(marked, traced)
    assert [c.us for c in marked if c.kind == SYNC] == [400, 20, 400, 20]


def test_costs_stay_where_the_iterations_differ():
    events = stock_events(False) + stock_events(True)
    traced, marked = cuda_calls(events, ITERATION), cuda_calls(events, MARKED_ITERATION)
    del traced[1]  # a sync of the first traced iteration
    take_costs(marked, traced)
    assert [c.us for c in marked if c.kind == SYNC] == [200, 20, 200, 20]


def test_a_mark_on_autograds_thread_is_its_calls_mark():
    events = [
        event("user_annotation", MARKED_ITERATION, 0, 100),
        event("cpu_op", "autograd::engine::evaluate_function: X", 5, 90, AUTOGRAD),
        event("cpu_op", f"{MARK}7", 10, 50, AUTOGRAD),
        call("cudaStreamSynchronize", 20, 30, 1, AUTOGRAD),
        call("cudaLaunchKernel", 70, 5, 2, AUTOGRAD),
    ]
    sync, launch = cuda_calls(events, MARKED_ITERATION)
    assert (sync.mark, launch.mark) == (7, None)
    assert launch.within == "autograd::engine::evaluate_function: X"


@pytest.mark.parametrize("name", ["cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "cuMemMap"])
def test_allocator_calls(name):
    events = [event("user_annotation", ITERATION, 0, 100), call(name, 10, 5, 1)]
    assert [c.kind for c in cuda_calls(events, ITERATION)] == [ALLOCATOR]


def test_event_queries_wait_for_nothing():
    events = [event("user_annotation", ITERATION, 0, 100), call("cudaEventQuery", 10, 5, 1)]
    assert cuda_calls(events, ITERATION) == []
    assert cuda_calls([], ITERATION) == []
