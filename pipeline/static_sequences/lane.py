"""Batches on their way through iterations of one kind: read, agreed on, brought to the device, run."""

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
_SETTLED = 8
"""Batches without a larger space after which rooms are captured before a batch needs them: from a tenth more tokens
than any batch had down to half of these."""
_MARGIN = 1.1


class Lane:
    """Runs one batch after another, each beside the input dist of the next one, while the ranks agree on the one after
    that. All ranks have the same number of batches, and all run them in the same room.

    A batch whose ids have no room makes its input dist wait until the iteration before it has ended and a larger space
    is allocated, which is captured again after an eager iteration. A room for tokens is captured when a batch first
    needs it, later with others around it. Graphs share memory: the memory that a large one frees holds a smaller one,
    not the other way round, so a room larger than all before makes the graphs begin anew. A batch with more rows of one
    rank than ranks exchange runs eagerly, on all ranks (SequenceTables.eager_rows).
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
    ) -> None:
        """work: launches an iteration in a space, on the batch of a slot, with a room for tokens. room: to begin
        with."""
        self._work, self._new_space, self._iteration, self._dense = work, new_space, iteration, dense
        self._fetcher, self._agreement, self._streams, self.graphs = fetcher, agreement, streams, graphs
        self.room = room
        """Room of `space`, which threads that prepare batches read at any time; there is no space while it grows."""
        self.space = new_space(room)
        self._numbers: dict[tuple[int, int], int] = {}
        self._coming: deque[tuple[Prepared, Asked]] = deque()
        self._eager, self._settled = EAGER, 0
        self._largest = self._most = 0
        """The largest room of the graphs, and of all batches."""
        self._captured_down = False
        """Whether the graphs have rooms that no batch has needed yet."""
        self.reset()

    def reset(self) -> None:
        """Begins anew with the next batches, once those before have ended, and with the counts of `describe`."""
        self._coming.clear()
        self._begun = self._ended = False
        self._now: tuple[Prepared, Needs] | None = None
        self.parity = 0
        """The slot of the batch that runs next."""
        self.grown = self.overflows = 0
        self.rooms: Counter[int] = Counter()
        """Batches run in each room for tokens."""
        self.tokens = 0
        """Tokens of this rank's batches, without padding."""

    def run(self, batches: Iterator[Prepared], check: Callable[[Space, int], None] | None = None) -> int | None:
        """Runs the next batch, and reads two ahead of it; returns the slot that it was in, None where all have run.
        Collective. ValueError for batches after the end. check: called before it runs, with its space and slot."""
        if not self._begun:
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
        """Returns a record's part on rooms: batches by room for tokens, its share of padding on this rank, the room for
        ids, the number of times that it grew, and the number of batches with more rows of one rank than it takes."""
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
        self._begun = True
        self._read(batches)
        self._read(batches)
        first, needs = self._next()
        if first is not None and needs is not None:
            self._now = first, needs
            self._bring(first, needs)

    def _read(self, batches: Iterator[Prepared]) -> None:
        batch = None if self._ended else next(batches, None)
        self._ended = batch is None
        if batch is not None:
            self._coming.append((batch, self._agreement.ask(batch.needs)))

    def _next(self) -> tuple[Prepared, Needs] | tuple[None, None]:
        if not self._coming:
            return None, None
        prepared, asked = self._coming.popleft()
        return prepared, asked.needs()

    def _name(self, batch: Prepared | None) -> None:
        """Names the batch of the next input dist; None leaves the last one, which is distributed again."""
        if batch is not None and batch.room != self.room.batch:
            batch = self._dense.padded(batch, self.room.batch)
        self._fetcher.name(None if batch is None else batch.batch)

    def _bring(self, batch: Prepared, needs: Needs) -> None:
        """Brings a batch to the slot of the next iteration, in a larger space where it needs one."""
        if not self.room.takes(needs):
            self._grow(self.room.grown(needs))
        self._name(batch)
        slot = self.space.slots[self.parity]
        self.space.tables.expect(slot.rows)
        self._iteration.input_dist(self.space, slot)

    def _with_rows(self, slot: int, rows: DistributedRows) -> Space:
        slots = list(self.space.slots)
        slots[slot] = replace(slots[slot], rows=rows)
        return replace(self.space, slots=(slots[0], slots[1]))

    def _grow(self, room: IdRoom) -> None:
        self._forget()
        self._eager = max(self._eager, _EAGER_AGAIN)
        self._settled = self._largest = 0
        self._captured_down = False
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.room = room
        del self.space  # before the larger one
        self.space = self._new_space(room)
        self.grown += 1

    def _forget(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()
        self._numbers.clear()

    def _execute(self, slot: int, room: int) -> None:
        self._settled += 1
        if self.graphs is None or self._eager > 0:
            self._eager -= 1
            self._eagerly(self.space, slot, room)
        else:
            self.graphs.run(self._number(self.graphs, slot, room))

    def _eagerly(self, space: Space, slot: int, room: int) -> None:
        with nullcontext() if self.graphs is None else self._streams.as_captured():
            self._work(space, slot, room)

    def _number(self, graphs: Graphs, slot: int, room: int) -> int:
        """Returns the number of the graph of a slot and a room, which is captured with others where it is missing."""
        if (slot, room) not in self._numbers:
            self._most = max(self._most, room)
            for of in self._to_capture(room):
                for each in (slot, 1 - slot):
                    if (each, of) not in self._numbers:
                        self._numbers[each, of] = graphs.add(partial(self._work, self.space, each, of))
        return self._numbers[slot, room]

    def _to_capture(self, room: int) -> list[int]:
        """Returns the rooms to capture where a batch needs `room`, the largest first; forgets all graphs before a room
        larger than theirs."""
        settled = self._settled > _SETTLED
        if room <= self._largest and (self._captured_down or not settled):
            return [room]
        self._forget()
        if not settled:
            self._largest = room
            return [room]
        self._captured_down, self._largest = True, room_for_tokens(int(_MARGIN * self._most))
        rooms = rooms_down(self._largest, self._most // 2)
        return rooms if room in rooms else [*rooms, room]
