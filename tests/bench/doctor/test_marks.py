import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dlrm_bench.bench.doctor import process_state
from dlrm_bench.bench.doctor.marks import Marks


class Other(TorchFunctionMode):
    """A mode of the script's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def marks():
    made = Marks()
    assert not made.reduced
    made.iteration = 0
    made.switch_on()
    yield made
    made.switch_off()


def names(marks: Marks) -> list[str]:
    return [call["name"] for call in marks.calls]


def test_every_call_is_kept_with_its_line(marks):
    x = torch.ones(3)
    if x.sum() > 2:
        assert x.tolist() == [1, 1, 1]
    assert names(marks) == [
        "torch.ones",
        "torch.Tensor.sum",
        "torch.Tensor.gt",
        "torch.Tensor.__bool__",
        "torch.Tensor.tolist",
    ]
    frames = [marks.stacks[call["stack"]][0] for call in marks.calls]
    assert {frame["file"] for frame in frames} == {__file__}
    assert frames[1]["text"] == "if x.sum() > 2:"
    assert frames[1]["line"] == frames[0]["line"] + 1
    assert all(call["us"] > 0 for call in marks.calls)


def test_operators_are_told_from_calls(marks):
    x = torch.ones(3)
    for _ in range(20):  # CPython specializes the instructions
        x + 1
        x[x > 0]
        x.add(1)
        if x.sum():
            torch.zeros(2, dtype=torch.int32)
        x[0] = 2
    by_operator = {call["name"] for call in marks.calls if call["stack"] in marks.operators}
    by_call = {call["name"] for call in marks.calls if call["stack"] not in marks.operators}
    tensor = "torch.Tensor"
    assert by_operator == {f"{tensor}.{name}" for name in ("add", "__getitem__", "gt", "__bool__", "__setitem__")}
    assert by_call == {"torch.ones", f"{tensor}.add", f"{tensor}.sum", "torch.zeros"}


def test_a_loop_has_one_stack(marks):
    for _ in range(3):
        torch.ones(1)
    assert [call["stack"] for call in marks.calls] == [0, 0, 0]
    torch.ones(1)
    assert marks.calls[-1]["stack"] == 1


def test_what_calls_are_about(marks):
    x = torch.arange(4)
    x[x > 1]
    x[1:]
    x.to("cpu")
    x.to(torch.float32)
    torch.tensor([1, 2])
    torch.as_tensor(x)
    about = {(call["name"], i): call["about"] for i, call in enumerate(marks.calls)}
    assert about["torch.Tensor.__getitem__", 2] | {"shape": [2]} == about["torch.Tensor.__getitem__", 2]
    assert (about["torch.Tensor.__getitem__", 2]["mask"], about["torch.Tensor.__getitem__", 3]["mask"]) == (True, False)
    assert (about["torch.Tensor.to", 4]["names_device"], about["torch.Tensor.to", 5]["names_device"]) == (True, False)
    assert about["torch.Tensor.to", 4]["pinned"] is False
    assert (about["torch.tensor", 6]["from_list"], about["torch.as_tensor", 7]["from_list"]) == (True, False)


def test_a_mode_that_the_script_leaves_meanwhile_is_its_own():
    marks = Marks()
    marks.iteration = 0
    with Other():
        marks.switch_on()
        torch.ones(1)
    torch.ones(1)
    with Other():
        torch.ones(1)
        marks.switch_off()
        torch.ones(1)
    torch.ones(1)
    assert len(marks.calls) == 3


def test_backward_is_marked_inside():
    x = torch.ones(2, requires_grad=True)
    marks = Marks()
    marks.iteration = 0
    marks.switch_on()
    seen = []
    hook_handle = x.register_hook(lambda gradient: seen.append(gradient.sum().item()))
    with process_state.state.around_backward():
        torch.autograd.graph._engine_run_backward(
            (x * 2,), (torch.ones(2),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    marks.switch_off()
    hook_handle.remove()
    assert seen == [4.0]
    assert "torch.Tensor.item" in names(marks)


def test_what_marks_within_a_call_take_is_not_its_own(marks, monkeypatch):
    """Marks read files' lines and walk stacks: seconds of a clock that each look at it moves on by one."""
    clock = itertools.count()
    monkeypatch.setattr("dlrm_bench.bench.doctor.marks.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    begin = next(clock)

    def new_group():
        inner()
        torch.ones(1)

    inner = process_state.recorded("inner", lambda: torch.ones(1))
    process_state.recorded("new_group", new_group)()
    all_us = (next(clock) - begin - 2) * 1e6  # the looks from the first mark's to the last one's
    assert names(marks) == ["new_group", "inner", "torch.ones", "torch.ones"]
    assert [call["within"] for call in marks.calls] == [None, 0, 1, 0]
    assert [call["us"] for call in marks.calls] == [7e6, 3e6, 1e6, 1e6]
    assert marks.own_us + 7e6 == all_us


def test_before_the_first_iteration_nothing_is_kept(marks):
    marks.iteration = -1
    torch.ones(1)
    assert marks.calls == []


def test_other_threads_are_left_alone(marks):
    thread = threading.Thread(target=lambda: torch.ones(1))
    thread.start()
    thread.join()
    assert marks.calls == []


def test_reduced_marks_leave_no_trace(monkeypatch):
    before = {name: getattr(Tensor, name) for name in ("item", "tolist", "__bool__", "to", "cpu")}
    own = {name for name in before if name in vars(Tensor)}
    monkeypatch.setattr("dlrm_bench.bench.doctor.marks.compiles", lambda: True)
    marks = Marks()
    marks.iteration = 0
    marks.switch_on()
    assert torch.ones(1).item() == 1
    assert bool(torch.ones(1))
    assert str(torch.ones(1)) == "tensor([1.])"  # which reads values, too
    marks.switch_off()
    assert names(marks) == ["torch.Tensor.item", "torch.Tensor.__bool__", "torch.Tensor.__repr__"]
    assert {name: getattr(Tensor, name) for name in before} == before
    assert {name for name in before if name in vars(Tensor)} == own
    assert torch.ones(1).item() == 1
    assert len(marks.calls) == 3
