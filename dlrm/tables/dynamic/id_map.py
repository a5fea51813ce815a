"""Places of keys in a memory of fixed size, given out and taken away.

Places come from a stack and go to a batch's new keys in the order in which it first names them: the same batches give
the same places in every run. Eviction takes places from the least recently named keys in a window of places, which
advances with every batch; it frees as many places as the batch's new keys lack, and never those of keys that the two
batches in flight name. Placing a batch again changes nothing, so a run that resumes before that batch continues
bit-identically.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.dlrm.tables.dynamic.memory import MOST_PLACES
from dlrm_bench.kernels.embedding.id_map import EMPTY, IdSlots, Keys, empty_slots, find_ids, insert_ids
from dlrm_bench.kernels.embedding.place_ids import Naming, Stack, claim_ids, give_places

_WINDOW_SHARE, _LEAST_WINDOW = 64, 4096
"""Size of a window: a 64th of the places, but at least 4096 (or all places): the sort of each iteration stays small."""
_CHUNK = 1 << 20  # keys that are read or loaded at a time


class Entries(NamedTuple):
    """Keys of n consecutive places of a map."""

    keys: Keys
    last: Tensor
    """int32 [n]: the batch that last named the key."""


class IdMap:
    """A map of one rank's keys. Its methods launch work and never wait for it; those under Entries do."""

    def __init__(self, places: int, evicts: bool, device: torch.device, with_tables: bool = False) -> None:
        """evicts: whether new keys may take the places of old ones; if not, new keys get no place once all are taken.
        with_tables: whether keys have tables."""
        assert 0 < places <= MOST_PLACES, "checked with the options"
        self.places, self._evicts, self._device = places, evicts, device
        slots = empty_slots(places, device, with_tables)
        self._slots = len(slots.ids)
        # One extra entry each, the target of unused writes: shapes are fixed.
        self._all = _each(slots, lambda memory: torch.cat([memory, memory[:1]]))
        self._map = _each(self._all, lambda memory: memory[:-1])
        self._slot_of = torch.full((places + 1,), -1, dtype=torch.int32, device=device)
        self._last = torch.zeros(places + 1, dtype=torch.int32, device=device)
        self._free = torch.arange(places - 1, -2, -1, dtype=torch.int32, device=device)
        self._free_count = torch.full((1,), places, dtype=torch.int64, device=device)
        self._batch = torch.zeros(1, dtype=torch.int32, device=device)
        self._is_new = torch.ones(1, dtype=torch.int32, device=device)
        self._window = torch.arange(min(places, max(places // _WINDOW_SHARE, _LEAST_WINDOW)), device=device)
        self.made, self.evicted, self.returned = torch.zeros(3, 1, dtype=torch.int64, device=device)
        """Number of keys since the run began that got a place, that lost their place, and that got a place again after
        a loss, int64 [1] each. A key counts again each time."""
        self._lost = torch.zeros(self._slots + 1 if evicts else 0, dtype=torch.bool, device=device)
        """Whether a key has lost its place, by its number modulo the slots: `returned` may be too large, never too
        small."""

    @property
    def most_evicted(self) -> int:
        """Maximum number of keys that lose their places with one batch."""
        return len(self._window) if self._evicts else 0

    def next_batch(self, is_new: Tensor | None) -> None:
        """Counts a batch before its keys are placed. is_new: int32 [1] on the device, 0 for a batch that was counted
        already, whose keys keep the batch numbers at which they were named; None means 1."""
        if is_new is None:
            self._is_new.fill_(1)
        else:
            self._is_new.copy_(is_new)
        self._batch += self._is_new

    def find(self, keys: Keys, places: Tensor) -> None:
        """places[n] = the place of keys[n], -1 where it has none. keys: N; places: int32 [N]."""
        find_ids(keys, self._map, places)

    def place(self, keys: Keys, places: Tensor) -> tuple[Tensor, Tensor]:
        """Writes to places[n] the place of keys[n], assigning places to new keys; -1 for what is no key, and if no
        place is left.

        keys: N, at least one, in any order; places: int32 [N]. Returns the newly assigned places, int32 [N], each once
        and -1 elsewhere; and a number, int64 [1], that is 0 if every key has a place.
        """
        naming = Naming(self._last, self._batch, self._is_new)
        claims = claim_ids(keys, self._map, places, naming)
        if self._evicts:
            self._evict(claims.nth[-1:].long())
        stack = Stack(self._free, self._free_count, self._slot_of, self._lost)
        counts = give_places(keys, claims, places, self._map, stack, naming)
        self._free_count -= counts.given
        self.made += counts.given
        if self._evicts:
            self.returned += counts.returned
        return counts.fresh, counts.lacking

    def _evict(self, wanted: Tensor) -> None:
        """Evicts keys until `wanted` places, int64 [1], are free, or until the window has no more candidates."""
        window = (self._batch.long() * len(self._window) + self._window) % self.places
        last = self._last[window]
        may = (self._slot_of[window] >= 0) & (last < self._batch - 1)
        order = torch.where(may, last, torch.iinfo(torch.int32).max).sort(stable=True).indices
        count = (wanted - self._free_count).clamp_(min=0).minimum(may.sum())
        nth = torch.arange(len(window), device=self._device)
        taken = nth < count
        place = torch.where(taken, window[order], self.places)
        slot = torch.where(taken, self._slot_of[place].long(), self._slots)
        lost = self._keys_in(slot).numbers % self._slots
        self._lost.index_fill_(0, torch.where(taken, lost, self._slots), True)
        self._all.places.index_fill_(0, slot, EMPTY)
        self._slot_of.index_fill_(0, place, -1)
        self._free.index_copy_(0, torch.where(taken, self._free_count + nth, self.places), place.int())
        self._free_count += count
        self.evicted += count

    def _keys_in(self, slots: Tensor) -> Keys:
        """Returns the keys in these slots, int64 [N]."""
        return Keys(self._all.ids, self._all.tables).some(slots)

    def memory(self) -> list[Tensor]:
        """Returns everything that placing keys changes."""
        return [
            *(part for part in self._all if part is not None), self._slot_of, self._last, self._free, self._free_count,
            self._batch, self.made, self.evicted, self.returned, self._lost,
        ]  # fmt: skip

    # Entries: these wait for the device

    @property
    def used(self) -> int:
        """Number of places with a key. Places are assigned in order, and an evicted place is reused at once, so these
        are places 0 .. used - 1."""
        return self.places - int(self._free_count)

    def entries(self, places: slice | None = None) -> Entries:
        """Returns the content of these places, which have keys; None: of all that do."""
        some = slice(0, self.used) if places is None else places
        return Entries(self._keys_in(self._slot_of[some].long()), self._last[some].clone())

    def load(self, entries: Entries) -> None:
        """Replaces the content by `entries`, of places 0 .. n - 1 and on any device, of which there are at most as many
        as places."""
        count = len(entries.last)
        assert count <= self.places, "checked by the caller"
        self._all.places.fill_(EMPTY)
        self._slot_of.fill_(-1)
        self._free[:-1] = torch.arange(self.places - 1, -1, -1, dtype=torch.int32, device=self._device)
        self._free_count.fill_(self.places - count)
        self._last[:count] = entries.last
        for some in chunks(count):
            place = torch.arange(some.start, some.stop, dtype=torch.int32, device=self._device)
            insert_ids(entries.keys.some(some).to(self._device), place, self._map, self._slot_of)
            assert not bool((place < 0).any()), "a key found no slot"
        for counted in (self.made, self.evicted, self.returned, self._lost):
            counted.zero_()

    def go_on_after(self, batches: int) -> None:
        """Sets the number of batches counted so far; the next batch may have been placed already."""
        last = torch.where(self._slot_of >= 0, self._last, 0)
        later = int(last.max()) - (batches + 1)
        if later > 0:  # of batches of another size
            self._last -= later
        self._batch.fill_(batches)

    def describe(self) -> dict[str, int]:
        """Returns what a record says of it."""
        counts = {"made": self.made, "evicted": self.evicted, "returned": self.returned}
        return {"places": self.places, "used": self.used} | {name: int(count) for name, count in counts.items()}


def chunks(count: int) -> Iterator[slice]:
    """Yields ranges that together cover `count` keys, each so small that copies of its keys take little memory."""
    return (slice(first, min(first + _CHUNK, count)) for first in range(0, count, _CHUNK))


def _each(slots: IdSlots, of: Callable[[Tensor], Tensor]) -> IdSlots:
    """Returns the function's results for each memory of the slots."""
    return IdSlots(of(slots.ids), of(slots.places), None if slots.tables is None else of(slots.tables))
