"""The checker of races by itself, on events made by hand."""

import pytest
import torch

from dlrm_bench.dlrm.runtime.peer_memory import Barrier
from tests.races import Access, Event, Everything, Meeting, Wait, _elements, races

BUFFER = (0, 0)
"""Rank 0's part of the first allocation."""


def access(stream: str, writes: bool, elements: int = 1) -> Access:
    return Access(stream, "copy_", BUFFER, elements, writes)


BARRIER = Barrier("met", "the write before the read")
WRITE, READ, MET = access("main", True), access("main", False), Meeting("main", BARRIER)


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ([[WRITE, MET], [MET, READ]], 0),
        ([[WRITE], [READ]], 1),
        ([[WRITE], [WRITE]], 1),
        ([[READ], [READ]], 0),
        ([[MET, WRITE], [MET, READ]], 1),
        ([[READ, MET], [MET, WRITE]], 0),
        # Other elements.
        ([[access("main", True, 0b0101)], [access("main", False, 0b1010)]], 0),
        # A barrier orders its own stream alone, and what waits for it.
        ([[access("side", True), MET], [MET, READ]], 1),
        ([[access("side", True), Wait("main", ("side",)), MET], [MET, READ]], 0),
        ([[WRITE, MET], [MET, access("side", False)]], 1),
        ([[WRITE, MET], [MET, Wait("side", ("main",)), access("side", False)]], 0),
        # Later work of the other stream is not waited for.
        ([[Wait("main", ("side",)), access("side", True), MET], [MET, READ]], 1),
        # Streams of one rank.
        ([[WRITE, access("side", False)], []], 1),
        ([[WRITE, Wait("side", ("main",)), access("side", False)], []], 0),
        ([[WRITE, Everything()], [Everything(), access("side", False)]], 0),
    ],
)
def test_finds_what_nothing_orders(logs: list[list[Event]], expected: int) -> None:
    assert len(races(logs)) == expected


def test_without_a_barrier_it_is_as_if_it_were_not_there() -> None:
    logs: list[list[Event]] = [[WRITE, MET], [MET, READ]]
    (race,) = races(logs, without=BARRIER)
    assert race.first == (0, WRITE)
    assert race.second == (1, READ)
    assert races(logs, without=Barrier("another", "nothing")) == []


def test_elements_are_those_of_a_view() -> None:
    matrix = torch.zeros(3, 4)
    assert _elements(matrix) == 0b1111_1111_1111
    assert _elements(matrix[1:, 2:]) == 0b1100_1100_0000
    assert _elements(matrix.t()[0]) == 0b0001_0001_0001
