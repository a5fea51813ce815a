import pytest

from dlrm_bench.bench.doctor.backward import backward_us
from dlrm_bench.bench.doctor.rank_file import MARK, MARKED_ITERATION
from tests.bench.profile.gpu_traces import AUTOGRAD, event

NODE = "autograd::engine::evaluate_function: "


def numbered(name: str, ts: float, dur: float, sequence: int, tid: int = 100) -> dict:
    made = event("cpu_op", name, ts, dur, tid)
    made["args"]["Sequence number"] = sequence
    return made


def test_the_mark_of_the_operation_that_made_a_node_has_its_time():
    events = [
        event("user_annotation", MARKED_ITERATION, 0, 1000),
        event("cpu_op", f"{MARK}0", 10, 40),
        numbered("aten::mul", 12, 30, 7),
        event("cpu_op", f"{MARK}1", 60, 60),
        numbered("aten::linear", 62, 50, 8),
        numbered("aten::t", 64, 10, 8),
        numbered("aten::addmm", 80, 20, 9),
        event("cpu_op", f"{MARK}2", 200, 500),  # backward()
        numbered(f"{NODE}AddmmBackward0", 210, 100, 9, AUTOGRAD),
        numbered("aten::mm", 220, 50, 9, AUTOGRAD),
        numbered(f"{NODE}MulBackward0", 320, 30, 7),  # on the loop's thread, as on a CPU
        numbered("aten::mul", 325, 10, 7),
        numbered(f"{NODE}Other", 400, 10, 77, AUTOGRAD),
        numbered(f"{NODE}MulBackward0", 2000, 30, 7),  # after the marked iterations
    ]
    assert backward_us(events) == {0: pytest.approx(30), 1: pytest.approx(100)}


def test_a_trace_without_marked_iterations():
    assert backward_us([event("cpu_op", f"{NODE}MulBackward0", 0, 10)]) == {}
