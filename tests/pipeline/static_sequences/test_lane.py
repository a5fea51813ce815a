"""Which rooms for tokens a lane captures, and when."""

from typing import Any

import torch

from dlrm_bench.pipeline.static.streams import IterationStreams
from dlrm_bench.pipeline.static_sequences import lane
from dlrm_bench.pipeline.static_sequences.lane import EAGER, Lane
from dlrm_bench.pipeline.static_sequences.room import IdRoom, room_for_tokens


class Recorded:
    """Stands for graphs: what was captured, in order, and what ran."""

    def __init__(self) -> None:
        self.works: list[Any] = []
        self.captured: list[list[int]] = []
        self.cleared = 0

    def clear(self) -> None:
        self.works.clear()
        self.cleared += 1

    def add(self, work: Any) -> int:
        self.works.append(work)
        return len(self.works) - 1

    def run(self, number: int) -> None:
        assert number < len(self.works)


def made() -> tuple[Lane, Recorded]:
    graphs: Any = Recorded()
    nothing: Any = None
    of_work: Any = lambda *_: None  # noqa: E731
    space: Any = lambda room: object()  # noqa: E731
    streams = IterationStreams(torch.device("cpu"), overlap=False)
    made = Lane(of_work, space, IdRoom(8, 8, 8), nothing, nothing, nothing, nothing, streams, graphs)
    return made, graphs


def rooms_of(graphs: Recorded) -> list[tuple[int, int]]:
    """Slot and room of each function, in the order of their capture."""
    return [work.args[1:] for work in graphs.works]


def test_rooms_are_captured_down_from_a_margin_once_spaces_have_settled() -> None:
    lane_, graphs = made()
    small, large = room_for_tokens(1000), room_for_tokens(1500)
    for _ in range(EAGER):
        lane_._execute(0, small)
    assert graphs.works == []
    lane_._execute(0, small)
    assert rooms_of(graphs) == [(0, small), (1, small)]
    lane_._execute(1, large)  # which begins anew: its memory holds the small one's, and not the other way round
    assert rooms_of(graphs) == [(1, large), (0, large)]
    for _ in range(lane._SETTLED):
        lane_._execute(0, large)
    assert len(graphs.works) == 2
    lane_._execute(0, small)
    rooms = [room for _, room in rooms_of(graphs)[::2]]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[0] == room_for_tokens(int(1.1 * large))
    assert rooms[-1] <= small
    assert rooms[-1] >= large // 2 - 64
    before, cleared = len(graphs.works), graphs.cleared
    for room in rooms:
        lane_._execute(1, room)
    assert len(graphs.works) == before
    lane_._execute(0, room_for_tokens(100))
    assert rooms_of(graphs)[before:] == [(0, room_for_tokens(100)), (1, room_for_tokens(100))]
    assert graphs.cleared == cleared
    lane_._execute(0, room_for_tokens(4000))
    assert graphs.cleared == cleared + 1
    assert rooms_of(graphs)[0] == (0, room_for_tokens(int(1.1 * room_for_tokens(4000))))


def test_a_larger_space_forgets_all_and_begins_with_an_eager_iteration() -> None:
    lane_, graphs = made()
    for _ in range(EAGER + 1):
        lane_._execute(0, 1024)
    lane_._grow(IdRoom(16, 16, 16))
    lane_._execute(0, 512)
    assert graphs.works == []
    lane_._execute(1, 512)
    assert rooms_of(graphs) == [(1, 512), (0, 512)]
    assert lane_.room == IdRoom(16, 16, 16)


def test_a_larger_space_takes_none_of_the_first_eager_iterations() -> None:
    lane_, graphs = made()
    lane_._grow(IdRoom(16, 16, 16))
    for _ in range(EAGER):
        lane_._execute(0, 512)
    assert graphs.works == []
    lane_._execute(0, 512)
    assert rooms_of(graphs) == [(0, 512), (1, 512)]
