"""The tables' learning rates in captured graphs: marked at the capture, put back after it, followed from then on."""

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dlrm_bench.pipeline.five_stage.table_rates
from dlrm_bench.pipeline.five_stage.node_parameters import _Params, marks
from dlrm_bench.pipeline.five_stage.table_rates import CAPTURES_IN_A_ROW, TableRates

GRAPHS: list[Any] = ["one", "other"]


class Arguments:
    """Stands for the arguments of a graph's kernels."""

    missing = 0
    """How many of the marks have come to no kernel."""
    made: "list[Arguments]"

    def __init__(self, graph: Any, of: list[float]) -> None:
        self.graph, self.found, self.values = graph, set(range(len(of) - Arguments.missing)), list(of)
        Arguments.made.append(self)

    def set(self, values: list[float]) -> None:
        self.values = list(values)


@pytest.fixture
def changeable(monkeypatch: pytest.MonkeyPatch) -> None:
    Arguments.missing, Arguments.made = 0, []
    monkeypatch.setattr(dlrm_bench.pipeline.five_stage.table_rates, "keeps_graphs", lambda: True)
    monkeypatch.setattr(dlrm_bench.pipeline.five_stage.table_rates, "MarkedArguments", Arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def kernels(*rates: float) -> list[Any]:
    return [SimpleNamespace(learning_rate_tensor=torch.tensor(rate)) for rate in rates]


def rates_of(of: list[Any]) -> list[float]:
    return [round(kernel.learning_rate_tensor.item(), 6) for kernel in of]


def capture(rates: TableRates) -> bool:
    rates.begin_capture()
    rates.mark()
    return rates.end_capture(GRAPHS)


def test_marks_are_there_in_the_capture_alone(changeable: None) -> None:
    of = kernels(0.5, 0.25)
    rates = TableRates(of)
    assert rates.begin_capture()
    rates.mark()
    assert [kernel.learning_rate_tensor.item() for kernel in of] == marks(2)
    assert rates.end_capture(GRAPHS)
    assert rates_of(of) == [0.5, 0.25]
    rates.mark()  # a rehearsal's
    assert rates_of(of) == [0.5, 0.25]
    for graph in GRAPHS:
        rates.bring(graph)
    assert [arguments.values for arguments in Arguments.made] == [[0.5, 0.25]] * 2


def test_graphs_follow(changeable: None) -> None:
    of = kernels(0.5)
    rates = TableRates(of)
    assert capture(rates)
    assert rates.followed
    for step in range(3 * CAPTURES_IN_A_ROW):
        of[0].learning_rate_tensor.fill_(1 / 2**step)
        assert rates.follow()
        one, other = Arguments.made
        replayed, left = (one, other) if step % 2 else (other, one)
        rates.bring(replayed.graph)
        assert replayed.values == [1 / 2**step]
        assert left.values != replayed.values
        replayed.values = []
        rates.bring(replayed.graph)
        assert replayed.values == []  # nothing has changed
    assert rates.failure is None


def test_graphs_that_come_later_are_followed_too(changeable: None) -> None:
    of = kernels(0.5)
    rates = TableRates(of)
    assert capture(rates)
    rates.begin_capture()
    rates.mark()
    assert rates.end_capture(["later"])  # type: ignore[list-item]
    of[0].learning_rate_tensor.fill_(0.25)
    assert rates.follow()
    for made in Arguments.made:
        rates.bring(made.graph)
        assert made.values == [0.25]
    rates.dropped()
    assert not rates.followed
    of[0].learning_rate_tensor.fill_(0.125)
    assert not rates.follow()


def test_a_mark_that_no_kernel_has_takes_captures_anew(changeable: None) -> None:
    of = kernels(0.5, 0.25)
    Arguments.missing = 1
    rates = TableRates(of)
    assert not capture(rates)
    assert not rates.begin_capture()
    rates.mark()
    assert rates_of(of) == [0.5, 0.25]
    assert rates.end_capture(GRAPHS)
    assert not rates.followed
    assert rates.follow()
    of[1].learning_rate_tensor.fill_(0.125)
    assert not rates.follow()
    assert rates.follow()
    for step in range(CAPTURES_IN_A_ROW):
        assert rates.failure is None
        of[0].learning_rate_tensor.fill_(0.5**step / 3)
        assert not rates.follow()
    assert f"changed with each of {CAPTURES_IN_A_ROW} steps" in (rates.failure or "")


def test_a_rank_without_tables_has_nothing_to_follow(changeable: None) -> None:
    rates = TableRates([])
    assert not rates.begin_capture()
    assert rates.end_capture(GRAPHS)
    assert rates.followed
    assert rates.follow()


def test_marks_are_exact_and_distinct() -> None:
    found = marks(300)
    assert len(set(found)) == 300
    assert [struct.unpack("<f", struct.pack("<f", mark))[0] for mark in found] == found
    assert torch.tensor(found, dtype=torch.float32).double().tolist() == found


def test_the_drivers_structure() -> None:
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h, on a machine of 64 bits."""
    assert ctypes.sizeof(_Params) == 72
    assert (_Params.arguments.offset, _Params.kern.offset) == (40, 56)
