"""The queue of batches for one kind of iteration: each is read, agreed on, copied to the device and run."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dlrm_bench.dlrm.dense.static_sequences import Needs, Prepared, StaticSequences
from dlrm_bench.dlrm.tables.sequence.sequence_tables import DistributedRows
from dlrm_bench.pipeline.static.fetch import BatchFetcher
from dlrm_bench.pipeline.static.graphs import Graphs
from dlrm_bench.pipeline.static.streams import IterationStreams
from dlrm_bench.pipeline.static_sequences.iteration import Iteration, Space
from dlrm_bench.pipeline.static_sequences.room import Agreement, Asked, IdRoom, room_for_tokens, rooms_down

EAGER = 3
"""Iterations before the first capture: NCCL and cuBLAS set themselves up in them."""
_EAGER_AGAIN = 1
"""Iterations before the first capture of a larger space: kernels of its numbers of ids are loaded in it."""
AHEAD = 64
"""Number of batches to read ahead of the running batch: their needs decide the capacities.

Growths after the first ten iterations, and graphs captured, in the 36 series of room._IDS_SLACK: with 64 batches of 16
samples, 32 of 128 and 16 of 1,024, 38 growths, at most two a series, and 3,214 graphs; with 64 each, 24, at most one,
and 2,740; with 256, 8 and 2,138, but a tenth more padding of events, and four times as long a wait for the first
batch."""
_BEYOND = 1.5, 0.5, 0.0
"""Distances of the largest captured room for tokens from the largest that known batches need, in units of the range of
their needs, in the order in which they are tried. With half of the range, three of five series of 100 to 900 batches
had a later batch with more tokens, and all rooms were captured again; with one and a half, none."""


class Lane:
    """Runs one batch after another, each beside the input dist of the next batch; the ranks agree on each batch's room
    (capacity) when the batch is read, many batches ahead. All ranks have the same number of batches and run each batch
    in the same room.

    If a batch's ids exceed the capacity, its input dist waits until the previous iteration has ended and a larger space
    is allocated (IdRoom.grown); graphs are captured again after an eager iteration. The larger space depends on the old
    one and on the batches that have been read and not run, which a resumed run knows too. Rooms for tokens are captured
    together: from the smallest room that a known batch needs to the largest, and beyond it by 1.5
    times the range between them, or half of it, if the GPU has the memory. Graphs share memory: the memory of a large
    graph can hold a smaller one but not vice versa, so a room larger than all captured ones discards all graphs, and a
    smaller room is captured alone. A batch with more rows of one owner rank than ranks exchange runs eagerly, on all
    ranks (SequenceTables.eager_rows).
    """

    def __init__(
        self,
        work: Callable[[Space, int, int], None],
        new_space: Callable[[IdRoom], Space],
        room: IdRoom,
        iteration: Iteration,
        dense: StaticSequences,
        fetcher: BatchFetcher,
        agreement: Agreement,
        streams: IterationStreams,
        graphs: Graphs | None,
        forget_all: Callable[[], None],
        ahead: int,
    ) -> None:
        """work: launches an iteration in a space, on the batch of a slot, with a room for tokens. room: the initial id
        capacity. forget_all: calls `forget` of all lanes whose graphs share memory. ahead: number of batches to read
        ahead of the running batch, the same on all ranks."""
        self._work, self._new_space, self._iteration, self._dense = work, new_space, iteration, dense
        self._fetcher, self._agreement, self._streams, self.graphs = fetcher, agreement, streams, graphs
        self._forget_all = forget_all
        self.room = room
        """Id capacity of `space`; threads that prepare batches read it at any time. `space` is absent while growing."""
        self.space = new_space(room)
        self._numbers: dict[tuple[int, int], int] = {}
        self._coming: deque[tuple[Prepared, Asked]] = deque()
        self._ahead, self._eager = ahead, EAGER
        self._largest = 0
        """The largest room for tokens of the graphs."""
        self.reset()

    def reset(self) -> None:
        """Restarts with the next batches, after all earlier batches have ended, and resets the counts of `describe`."""
        self._coming.clear()
        self._ended = False
        self._least, self._most = 1 << 62, 0
        """Fewest and most tokens of the batches that have run or run next."""
        self._now: tuple[Prepared, Needs] | None = None
        self.parity = 0
        """The slot of the batch that runs next."""
        self.grown = self.overflows = 0
        self.rooms: Counter[int] = Counter()
        """Batches run in each room for tokens."""
        self.tokens = 0
        """Tokens of this rank's batches, without padding."""
        self.interruptions: list[int] = []
        """Number of batches that had run, since the reset, each time that graphs were captured or a larger space was
        allocated."""

    def run(self, batches: Iterator[Prepared], check: Callable[[Space, int], None] | None = None) -> int | None:
        """Runs the next batch and reads other batches ahead; returns the batch's slot, or None after the last batch.
        Collective. ValueError for batches after the end. check: called before the run with the batch's space, slot."""
        if self._now is None:
            self._begin(batches)
        if self._now is None:
            if next(batches, None) is not None:
                raise ValueError("the batches of this static pipeline have ended: give one iterator over all of them")
            return None
        self._read(batches)
        prepared, needs = self._now
        coming, of_coming = self._next()
        fits = of_coming is None or self.room.takes(of_coming)
        self._streams.limit_run_ahead()
        self._name(coming if fits else None)
        done, room = self.parity, room_for_tokens(needs.tokens)
        if check is not None:
            check(self.space, done)
        eager = self.space.tables.eager_rows(self.space.slots[done].rows)
        self.space.tables.expect(self.space.slots[1 - done].rows)
        if eager is None:
            self._execute(done, room)
        else:
            self.overflows += 1
            self._eagerly(self._with_rows(done, eager), done, room)
        self._streams.end_iteration()
        self.rooms[room] += 1
        self.tokens += prepared.needs.tokens
        self.parity, self._now = 1 - done, None
        if coming is not None and of_coming is not None:
            self._now = coming, of_coming
            if not fits:
                self._bring(coming, of_coming)
        return done

    def describe(self) -> dict[str, Any]:
        """Returns the record's block on rooms: number of batches by token capacity, share of padding on this rank, id
        capacity, number of times it grew, and number of batches that exceeded the capacity for one rank's rows."""
        total = sum(room * count for room, count in self.rooms.items())
        return {
            "batches_by_room_for_tokens": {str(room): count for room, count in sorted(self.rooms.items())},
            "padding_of_tokens": round(1 - self.tokens / total, 4) if total else 0.0,
            "room_for_events": self.room.events,
            "room_for_items": self.room.items,
            "room_for_rows": self.room.rows,
            "larger_rooms": self.grown,
            "batches_over_capacity": self.overflows,
        }

    def _begin(self, batches: Iterator[Prepared]) -> None:
        self._read(batches)
        first, needs = self._next()
        if first is not None and needs is not None:
            self._now = first, needs
            self._bring(first, needs)

    def _read(self, batches: Iterator[Prepared]) -> None:
        while len(self._coming) < self._ahead and not self._ended:
            batch = next(batches, None)
            self._ended = batch is None
            if batch is not None:
                self._coming.append((batch, self._agreement.ask(batch.needs)))

    def _next(self) -> tuple[Prepared, Needs] | tuple[None, None]:
        if not self._coming:
            return None, None
        prepared, asked = self._coming.popleft()
        needs = asked.needs()
        self._least, self._most = min(self._least, needs.tokens), max(self._most, needs.tokens)
        return prepared, needs

    def _of_coming(self) -> list[Needs]:
        """Returns the needs of all batches that were read and are not next."""
        return [asked.needs() for _, asked in self._coming]

    def _name(self, batch: Prepared | None) -> None:
        """Names the batch of the next input dist; None keeps the last batch, which is distributed again."""
        if batch is not None and batch.room != self.room.batch:
            batch = self._dense.padded(batch, self.room.batch)
        self._fetcher.name(None if batch is None else batch.batch)

    def _bring(self, batch: Prepared, needs: Needs) -> None:
        """Distributes a batch into the slot of the next iteration, after allocating a larger space if needed."""
        if not self.room.takes(needs):
            self._grow(self.room.grown(Needs(*map(max, zip(needs, *self._of_coming(), strict=True)))))
        self._streams.limit_run_ahead()
        self._name(batch)
        slot = self.space.slots[self.parity]
        self.space.tables.expect(slot.rows)
        self._iteration.input_dist(self.space, slot)
        self._streams.end_iteration()

    def _with_rows(self, slot: int, rows: DistributedRows) -> Space:
        slots = list(self.space.slots)
        slots[slot] = replace(slots[slot], rows=rows)
        return replace(self.space, slots=(slots[0], slots[1]))

    def _grow(self, room: IdRoom) -> None:
        self._eager = max(self._eager, _EAGER_AGAIN)
        self._interrupt()
        self._allocate(room)
        self.grown += 1

    def begin_with(self, room: IdRoom) -> None:
        """Begins with this id capacity, before the first batch: a resumed run then has the shapes, and so the bits, of
        an uninterrupted one, and grows at the same batches, since as many are known."""
        assert self._now is None, "before the first batch"
        self._allocate(room)

    def renew(self) -> None:
        """Begins anew with empty memory, after batches that are none of the data's."""
        self.reset()
        self._allocate(self.room)

    def _allocate(self, room: IdRoom) -> None:
        self._forget_all()  # an eager iteration needs as much memory as the largest graph
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.room = room
        del self.space  # before the larger one
        self.space = self._new_space(room)

    def _interrupt(self) -> None:
        after = sum(self.rooms.values())
        if after not in self.interruptions[-1:]:
            self.interruptions.append(after)

    def forget(self) -> None:
        """Destroys the graphs: rooms of batches to come are captured together again."""
        if self.graphs is not None:
            self.graphs.clear()
        self._numbers.clear()
        self._largest = 0

    def _execute(self, slot: int, room: int) -> None:
        if self.graphs is None or self._eager > 0:
            self._eager -= 1
            self._eagerly(self.space, slot, room)
        else:
            self.graphs.run(self._number(self.graphs, slot, room))

    def _eagerly(self, space: Space, slot: int, room: int) -> None:
        with nullcontext() if self.graphs is None else self._streams.as_captured():
            self._work(space, slot, room)

    def _number(self, graphs: Graphs, slot: int, room: int) -> int:
        """Returns the number of the graph for a slot and a room; captures a missing graph, together with others."""
        if (slot, room) not in self._numbers:
            self._interrupt()
            if room <= self._largest:
                self._add(graphs, slot, [room])
            else:
                self._capture_known(graphs, slot)
        return self._numbers[slot, room]

    def _capture_known(self, graphs: Graphs, slot: int) -> None:
        """Captures the rooms of all known batches and of some larger ones, or of the known batches alone where the GPU
        lacks memory for more; the largest first."""
        if self._largest:
            self._forget_all()
        tokens = [needs.tokens for needs in self._of_coming()]
        least, most = min([self._least, *tokens]), max([self._most, *tokens])
        known = room_for_tokens(most)
        for largest in dict.fromkeys(room_for_tokens(most + int(beyond * (most - least))) for beyond in _BEYOND):
            self._add(graphs, slot, rooms_down(largest, room_for_tokens(least)))
            self._largest = largest
            if graphs.capture(attempt=largest > known) or largest == known:
                return
            self._forget_all()

    def _add(self, graphs: Graphs, slot: int, rooms: list[int]) -> None:
        for room in rooms:
            for each in (slot, 1 - slot):
                self._numbers[each, room] = graphs.add(partial(self._work, self.space, each, room))
