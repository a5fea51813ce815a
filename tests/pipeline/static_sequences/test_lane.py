"""The rooms that a lane captures, and when it does so."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.dense.static_sequences import BatchRoom, Needs, Prepared
from dlrm_bench.pipeline.static.streams import IterationStreams
from dlrm_bench.pipeline.static_sequences.lane import EAGER, Lane
from dlrm_bench.pipeline.static_sequences.room import Agreement, IdRoom, room_for_tokens

AHEAD = 6
IDS = (1024, 1024, 1024)


class Recorded:
    """Stands for graphs: their functions, in the order of their capture, and what ran."""

    def __init__(self) -> None:
        self.works: list[Any] = []
        self.replayed: list[tuple[int, int]] = []
        self.captures = self.cleared = 0
        self.most = 1 << 62
        """The largest room that memory is there for."""

    def clear(self) -> None:
        self.works.clear()
        self.cleared += 1

    def add(self, work: Any) -> int:
        self.works.append(work)
        self.captures += 1
        return len(self.works) - 1

    def capture(self, attempt: bool) -> bool:
        done = all(of <= self.most for _, of in self.rooms)
        assert done or attempt
        if not done:
            self.works.clear()
        return done

    def run(self, number: int) -> None:
        self.replayed.append(self.works[number].args[1:])

    @property
    def rooms(self) -> list[tuple[int, int]]:
        """Slot and room of each function."""
        return [work.args[1:] for work in self.works]


class Noted(IterationStreams):
    """Notes when the host limits its run ahead, and when an iteration has been launched."""

    def __init__(self, launches: list[str]) -> None:
        super().__init__(torch.device("cpu"), overlap=False)
        self._launches = launches

    def limit_run_ahead(self) -> None:
        self._launches.append("limited")

    def end_iteration(self) -> None:
        self._launches.append("launched")


class Run:
    """A lane over batches of given tokens, and of `ids` where these are given by the batch's number."""

    def __init__(self, tokens: Sequence[int], ids: dict[int, tuple[int, int, int]] | None = None) -> None:
        graphs: Any = Recorded()
        self.graphs: Recorded = graphs
        self.eager: list[int] = []
        self.read = 0
        self.agreements: list[tuple[str, int]] = []
        """What happens to a slot's agreement on its ids, with the number of the slot over all spaces."""
        self.launches: list[str] = []
        """What the host does about its run ahead, and the batches that it names."""
        self._batches = self._made(tokens, ids or {})
        self._slots = 0
        one_rank: Any = SimpleNamespace(world_size=1)
        nothing: Any = SimpleNamespace(
            input_dist=lambda _, slot: self.agreements.append(("distributed", slot.rows)),
            name=lambda batch: self._name(batch),
            padded=lambda prepared, room: replace(prepared, batch=SimpleNamespace(room=room), room=room),
        )
        self.streams = Noted(self.launches)
        self.lane = Lane(
            self._work,
            *(self._new_space, IdRoom(*IDS), nothing, nothing, nothing, Agreement(one_rank), self.streams, graphs),
            forget_all=lambda: self.lane.forget(),
            ahead=AHEAD,
        )

    def _new_space(self, room: IdRoom) -> Any:
        tables = SimpleNamespace(
            eager_rows=lambda rows: self.agreements.append(("read", rows)),
            expect=lambda rows: self.agreements.append(("expected", rows)),
        )
        self._slots += 2
        return SimpleNamespace(tables=tables, slots=[SimpleNamespace(rows=self._slots - n) for n in (2, 1)])

    def _name(self, batch: Any) -> None:
        assert batch is None or batch.room == self.lane.room.batch, "the device copies the bytes of its own room"
        self.launches.append("named")

    def _work(self, space: Any, slot: int, room: int) -> None:
        self.agreements.append(("distributed", space.slots[1 - slot].rows))
        self.eager.append(room)

    def _made(self, tokens: Sequence[int], ids: dict[int, tuple[int, int, int]]) -> Iterator[Prepared]:
        for number, count in enumerate(tokens):
            self.read += 1
            room = BatchRoom(*IDS[:2])
            batch: Any = SimpleNamespace(number=number, room=room)
            yield Prepared(batch, room, Needs(*ids.get(number, IDS), count))

    def runs(self, count: int) -> None:
        for _ in range(count):
            assert self.lane.run(self._batches) is not None

    def ends(self) -> bool:
        return self.lane.run(self._batches) is None


def room(tokens: int) -> int:
    return room_for_tokens(tokens)


def test_rooms_from_the_least_known_to_beyond_the_largest_are_captured_together() -> None:
    run = Run([1000] * EAGER + [1200, 1100, 1500, 1400, 1100, 1200, 1000, 1700])
    run.runs(EAGER)
    assert run.eager == [room(1000)] * EAGER
    assert run.graphs.works == []
    run.runs(1)  # with all up to batch 3 + AHEAD known: 1000 to 1500, so up to 2250
    captured = [of for _, of in run.graphs.rooms[::2]]
    assert captured == sorted(captured, reverse=True)
    assert (captured[0], captured[-1]) == (room(2250), room(1000))
    assert run.graphs.rooms == [(slot, of) for of in captured for slot in (1, 0)]  # that of the batch at hand first
    run.runs(7)
    assert run.graphs.captures == 2 * len(captured)
    assert [of for _, of in run.graphs.replayed] == [
        room(of) for of in (1200, 1100, 1500, 1400, 1100, 1200, 1000, 1700)
    ]
    assert [slot for slot, _ in run.graphs.replayed] == [1, 0] * 4
    assert run.ends()


@pytest.mark.parametrize(("memory_for", "largest"), [(2250, 2250), (2000, 1750), (1750, 1750), (1600, 1500)])
def test_rooms_beyond_the_largest_known_are_captured_only_if_there_is_memory_for_them(
    memory_for: int, largest: int
) -> None:
    run = Run([1000] * EAGER + [1200, 1500] * 4)
    run.graphs.most = room(memory_for)
    run.runs(EAGER + 8)
    captured = [of for _, of in run.graphs.rooms[::2]]
    assert (captured[0], captured[-1]) == (room(largest), room(1000))
    assert len(run.graphs.replayed) == 8


def test_batches_of_one_room_capture_that_room_alone() -> None:
    run = Run([1000] * 12)
    run.runs(12)
    assert run.graphs.rooms == [(1, room(1000)), (0, room(1000))]


def test_a_smaller_room_is_captured_alone_and_a_larger_one_with_all_that_are_known() -> None:
    late = EAGER + 1 + AHEAD
    run = Run([1000, 1500] * 8 + [700] + [1000] * AHEAD + [4000] + [1500] * late)
    run.runs(16)
    before, cleared = list(run.graphs.rooms), run.graphs.cleared
    run.runs(1)
    assert run.graphs.rooms[len(before) :] == [(0, room(700)), (1, room(700))]
    assert run.graphs.cleared == cleared
    run.runs(AHEAD)
    captures = run.graphs.captures
    run.runs(1)
    assert run.graphs.cleared == cleared + 1
    captured = [of for _, of in run.graphs.rooms[::2]]
    assert (captured[0], captured[-1]) == (room(4000 + 3 * 3300 // 2), room(700))
    captures = run.graphs.captures
    run.runs(late)
    assert run.graphs.captures == captures
    assert run.lane.interruptions == [EAGER, 16, 17 + AHEAD]


def test_a_larger_space_has_room_for_all_batches_read_and_is_captured_after_an_eager_iteration() -> None:
    ids = {5: (2000, 10, 10), 6: (10, 3000, 10), 5 + AHEAD: (2500, 10, 10), 6 + AHEAD: (9000, 10, 10)}
    run = Run([1000] * 30, ids)
    run.runs(5)
    assert run.lane.grown == 1  # while batch 4 runs, and batches up to 4 + AHEAD are known
    assert (run.lane.room.events, run.lane.room.items, run.lane.room.rows) == (3072, 5120, 2048)
    assert run.graphs.works == []
    eager = len(run.eager)
    run.runs(1)
    assert len(run.eager) == eager + 1
    run.runs(1)
    assert len(run.graphs.rooms) == 2
    run.runs(4)
    assert run.lane.grown == 1
    run.runs(2)
    assert run.lane.grown == 2
    assert run.lane.interruptions == [EAGER, 5, 6, 12]


def test_needs_that_increase_together_take_one_larger_space() -> None:
    ids = {number: (700 + 20 * number, 600 + 20 * number, 500 + 20 * number) for number in range(40)}
    run = Run([1000] * 40, ids)
    run.runs(40)  # the capacities of events, items and rows would be exceeded at batches 17, 22 and 27
    assert run.lane.grown == 1
    assert run.lane.room == IdRoom(2048, 2048, 2048)
    assert run.lane.interruptions == [EAGER, 17, 18]


def test_a_larger_space_takes_none_of_the_first_eager_iterations() -> None:
    run = Run([1000] * 10, {0: (5000, 1, 1)})
    run.runs(EAGER)
    assert run.lane.grown == 1
    assert run.graphs.works == []
    run.runs(1)
    assert len(run.graphs.rooms) == 2


@pytest.mark.parametrize("count", [0, 1, 2, AHEAD, AHEAD + 3])
def test_batches_are_read_so_far_ahead_and_run_to_the_last(count: int) -> None:
    run = Run([1000] * count)
    for number in range(count):
        run.runs(1)
        assert run.read == min(count, number + 1 + AHEAD)
    assert run.ends()
    assert run.ends()
    assert sum(run.lane.rooms.values()) == count
    run._batches = Run([1000] * 3)._batches
    with pytest.raises(ValueError, match="give one iterator over all of them"):
        run.lane.run(run._batches)


def test_the_host_reads_of_each_input_dist_what_ranks_agreed_on_in_it() -> None:
    """On a GPU, the number of the slot's previous batch is still there when the host reads too early: it has to be
    cleared before each input dist, whatever launches it, also where it distributes a batch again."""
    run = Run([1000] * 16, {5: (2000, 10, 10), 14: (10, 9000, 10)})
    run.graphs.run = lambda number: run.graphs.works[number]()
    for _ in range(2):
        while not run.ends():
            pass
        run.lane.reset()
        run._batches = Run([1000] * 3)._batches
    assert run.lane.space.slots[0].rows == 4, "two larger spaces"
    by_slot = [[what for what, of in run.agreements if of == slot] for slot in range(run._slots)]
    for found in by_slot:
        while found:
            assert found[:2] == ["expected", "distributed"]
            del found[: 3 if "read" in found[2:3] else 2]
    assert sum(what == "read" for what, _ in run.agreements) == 16 + 3


def test_the_host_names_no_batch_without_a_limit_on_its_run_ahead() -> None:
    """The ring of named batches has as many places as the limit allows iterations; the first batch, and one that needs
    a larger space, are launched alone."""
    run = Run([1000] * 12, {5: (2000, 10, 10)})
    while not run.ends():
        pass
    assert run.lane.grown == 1
    assert run.launches == ["limited", "named", "launched"] * (12 + 2)


def test_a_batch_is_padded_to_the_space_if_only_its_items_have_another_room() -> None:
    ids = {number: (10, 3000 if number == 5 else 10, 10) for number in range(12)}
    run = Run([1000] * 12, ids)
    run.runs(12)
    assert run.lane.room.batch == BatchRoom(IDS[0], 5120)


def test_a_larger_space_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that still run write to memory of the old space, on the host too."""
    run, order = Run([1000] * 12, {5: (2000, 10, 10)}), []
    new_space = run._new_space
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("is idle"))
    monkeypatch.setattr(run.lane, "_new_space", lambda room: order.append("has a new space") or new_space(room))
    run.runs(5)
    assert order == ["is idle", "has a new space"]


def test_warm_up_batches_leave_no_range_behind() -> None:
    run = Run([9000] * 8 + [1000] * 10)
    run.lane._ahead = 1
    run.runs(7)
    before = run.lane.space
    run.lane.renew()
    assert run.lane.space is not before
    assert run.graphs.works == []
    run.runs(4)
    assert {of for _, of in run.graphs.rooms} == {room(1000)}


def test_the_needs_of_batches_ahead_come_in_the_order_of_the_batches() -> None:
    run = Run([1000, 1100, 1200, 1300])
    run.lane._read(run._batches)
    assert isinstance(run.lane._coming, deque)
    assert [needs.tokens for needs in run.lane._of_coming()] == [1000, 1100, 1200, 1300]


def test_a_lane_that_goes_on_gives_each_batch_the_capacity_of_an_uninterrupted_one() -> None:
    """Shapes decide the order of sums, and so their bits."""
    ids = {3: (2000, 10, 10), 17: (10, 2900, 10), 18 + AHEAD: (7000, 10, 10), 32: (10, 10, 9000), 35: (10, 10, 20_000)}
    straight, rooms = Run([1000] * 40, ids), []
    for _ in range(40):
        straight.runs(1)
        rooms.append(straight.lane.room)
    assert len(set(rooms)) == 5
    for done in range(1, 40):
        later = Run([1000] * (40 - done), {number - done: of for number, of in ids.items()})
        later.lane.begin_with(rooms[done - 1])
        for expected in rooms[done:]:
            later.runs(1)
            assert later.lane.room == expected
