"""A map from keys to places: which row of a fixed-size memory belongs to an id, or to an id of a table.

An open hash table of slots, at most half of which are in use. A key occupies any slot, empty at its insertion, of the
window that begins at its hash: so removing a key needs no tombstone, and a search reads the window. Kernels of fixed
number and shape find keys, or add distinct ones; nothing depends on the host. A key's slot may differ from run to run;
its place does not, because the caller supplies it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.embedding._split_mix import GOLDEN, MIX_1, MIX_2, mix, mix_kernel

WINDOW = 128
"""Number of slots in which a key may be. With 60 million keys in twice as many slots, linear probing's longest search
is about 93: ln n / (a - 1 - ln a) at a load a of 0.5 (Pittel, Linear probing: the probable largest search time,
1987)."""
EMPTY = -1
"""Place in an empty slot, whose id and table may be anything."""
NEVER = -2  # a place that no slot holds
NEAR, _STEP = 4, 16  # slots per key that a program reads at first, and then at a time for keys not among them
_FIND, INSERT = 64, 128  # keys per program


class Keys(NamedTuple):
    """The keys of N rows."""

    ids: Tensor
    """int32 or int64 [N]. Without tables, a negative id is no key; with tables, an id is any number."""
    tables: Tensor | None = None
    """int32 [N], 0 or more: equal ids of different tables are different keys. None: ids are those of a single table."""

    @property
    def valid(self) -> Tensor:
        """Whether each is a key, bool [N]."""
        return self.ids >= 0 if self.tables is None else torch.ones_like(self.ids, dtype=torch.bool)

    @property
    def numbers(self) -> Tensor:
        """A number for each key, int64 [N], which may coincide for different tables only: the id, shifted by its
        table."""
        return self.ids.long() if self.tables is None else self.ids.long() + self.tables.long() * GOLDEN

    def some(self, which: slice | Tensor) -> Keys:
        """Returns the keys with these indices."""
        return Keys(self.ids[which], None if self.tables is None else self.tables[which])

    def to(self, device: torch.device) -> Keys:
        """Returns the keys on a device."""
        return Keys(self.ids.to(device), None if self.tables is None else self.tables.to(device))


class IdSlots(NamedTuple):
    """The memory of a map with H slots, H a power of two and at least WINDOW."""

    ids: Tensor
    """int64 [H]: the id in each slot."""
    places: Tensor
    """int32 [H]: its place, or EMPTY."""
    tables: Tensor | None = None
    """int32 [H]: its table; None for keys without tables."""


def empty_slots(keys: int, device: torch.device, with_tables: bool = False) -> IdSlots:
    """Returns an empty map, with slots for twice the number `keys`."""
    size = max(next_power_of_2(2 * keys), WINDOW)
    places = torch.full((size,), EMPTY, dtype=torch.int32, device=device)
    tables = torch.zeros_like(places) if with_tables else None
    return IdSlots(torch.zeros(size, dtype=torch.int64, device=device), places, tables)


def _check(keys: Keys, of_keys: Tensor, slots: IdSlots) -> None:
    size, (ids, tables) = len(slots.ids), keys
    assert size >= WINDOW and size == next_power_of_2(size), f"slots: a power of two, at least {WINDOW}, not {size}"
    assert slots.ids.dtype == torch.int64 and slots.places.dtype == of_keys.dtype == torch.int32, "ids int64, places 32"
    assert ids.dtype in (torch.int32, torch.int64) and ids.shape == of_keys.shape, "ids, and a place of each: [N]"
    assert (tables is None) == (slots.tables is None), "tables of keys, and of slots"
    assert tables is None or (tables.dtype == torch.int32 and tables.shape == ids.shape), "tables: int32 [N]"
    assert all(t.is_contiguous() for t in (*keys, of_keys, *slots) if t is not None), "contiguous tensors only"


def find_ids(keys: Keys, slots: IdSlots, places: Tensor) -> None:
    """Sets places[n] to the place of keys[n]; -1 if the map lacks it, or if it is no key.

    keys: N, may repeat; places: int32 [N].
    """
    _check(keys, places, slots)
    find = triton_find_ids if keys.ids.is_cuda else plain_find_ids
    find(keys, slots, places)


def insert_ids(keys: Keys, places: Tensor, slots: IdSlots, slot_of: Tensor) -> None:
    """Adds keys[n] with places[n] if that is not negative; if the key's window is full, places[n] becomes -1.

    keys: N; the added ones must be distinct and not yet in the map. places: int32 [N], distinct. slot_of: int32 [P];
    the slot of each given place is written to it.
    """
    _check(keys, places, slots)
    assert slot_of.dtype == torch.int32, "slot_of: int32 [P]"
    insert = triton_insert_ids if keys.ids.is_cuda else plain_insert_ids
    insert(keys, places, slots, slot_of)


def _starts(keys: Keys, slots: IdSlots) -> Tensor:
    """Returns the first slot of each key's window, int64 [N]."""
    return mix(keys.numbers * GOLDEN) & (len(slots.ids) - 1)


def plain_find_ids(keys: Keys, slots: IdSlots, places: Tensor) -> None:
    """Computes `find_ids` in PyTorch."""
    start, step = _starts(keys, slots), torch.arange(_STEP, device=places.device)
    places.fill_(-1)
    missing = keys.valid.nonzero().flatten()
    for first in range(0, WINDOW, _STEP):
        slot = (start[missing, None] + first + step) & (len(slots.ids) - 1)
        hits = (slots.places[slot] != EMPTY) & (slots.ids[slot] == keys.ids[missing, None])
        if keys.tables is not None and slots.tables is not None:
            hits &= slots.tables[slot] == keys.tables[missing, None]
        found = hits.any(1)
        places[missing[found]] = slots.places[slot[hits]]
        missing = missing[~found]


def plain_insert_ids(keys: Keys, places: Tensor, slots: IdSlots, slot_of: Tensor) -> None:
    """Computes `insert_ids` in PyTorch."""
    start, waiting = _starts(keys, slots), (places >= 0).nonzero().flatten()
    for step in range(WINDOW):
        slot = (start[waiting] + step) & (len(slots.ids) - 1)
        empty = (slots.places[slot] == EMPTY).nonzero().flatten()
        ordered, order = slot[empty].sort(stable=True)
        opens = torch.ones_like(ordered, dtype=torch.bool)
        opens[1:] = ordered[1:] != ordered[:-1]  # of keys that want the same slot, the first gets it
        taken, added = ordered[opens], empty[order[opens]]
        slots.places[taken] = places[waiting[added]]
        slots.ids[taken] = keys.ids[waiting[added]].long()
        if keys.tables is not None and slots.tables is not None:
            slots.tables[taken] = keys.tables[waiting[added]]
        slot_of[places[waiting[added]].long()] = taken.int()
        kept = torch.ones_like(waiting, dtype=torch.bool)
        kept[added] = False
        waiting = waiting[kept]
        if len(waiting) == 0:
            return
    places[waiting] = -1


def triton_find_ids(keys: Keys, slots: IdSlots, places: Tensor) -> None:
    """Computes `find_ids` in one kernel."""
    if len(places):
        sizes = (len(places), len(slots.ids) - 1, WINDOW, NEAR, _STEP, _FIND, GOLDEN, MIX_1, MIX_2)
        _find_ids_kernel[(cdiv(len(places), _FIND),)](*keys, *slots, places, *sizes, num_warps=4)


def triton_insert_ids(keys: Keys, places: Tensor, slots: IdSlots, slot_of: Tensor) -> None:
    """Computes `insert_ids` in one kernel."""
    if len(places):
        sizes = (len(places), len(slots.ids) - 1, WINDOW, EMPTY, NEVER, INSERT, GOLDEN, MIX_1, MIX_2)
        _insert_ids_kernel[(cdiv(len(places), INSERT),)](*keys, *slots, places, slot_of, *sizes, num_warps=4)


@jit
def _find_ids_kernel(
    ids, tables, slot_ids, slot_places, slot_tables, places, count, mask,
    window: tl.constexpr, near: tl.constexpr, step: tl.constexpr, block: tl.constexpr,
    golden: tl.constexpr, mix_1: tl.constexpr, mix_2: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    key, table, exists, start = keys_at(ids, tables, at, count, mask, block, golden, mix_1, mix_2)
    # At a load of 0.5, 96% of keys are in the first slots. Those of the others are read again, out of a cache.
    found = _place_among(exists, key, table, start, near, slot_ids, slot_places, slot_tables, mask)
    missing = exists & (found < 0)
    first = 0
    while (tl.max(missing.to(tl.int32), 0) > 0) & (first < window):
        place = _place_among(missing, key, table, start + first, step, slot_ids, slot_places, slot_tables, mask)
        found = tl.maximum(found, place)
        missing = missing & (place < 0)
        first += step
    tl.store(places + at, found, at < count)


@jit
def keys_at(
    ids, tables, at, count, mask,
    block: tl.constexpr, golden: tl.constexpr, mix_1: tl.constexpr, mix_2: tl.constexpr,
):  # fmt: skip
    """Returns keys, their tables, which of them exist, and the slots where their search starts."""
    key = tl.load(ids + at, at < count, other=-1).to(tl.int64)
    number, exists, table = key, key >= 0, tl.full([block], 0, tl.int32)
    if tables is not None:
        exists = at < count
        table = tl.load(tables + at, exists, other=0)
        number = key + table.to(tl.int64) * golden
    return key, table, exists, mix_kernel(number * golden, mix_1, mix_2) & mask


@jit
def _place_among(wanted, key, table, start, slots: tl.constexpr, slot_ids, slot_places, slot_tables, mask):
    """Finds the places of wanted keys that are in one of the next slots from their start; -1 for others."""
    slot = (start[:, None] + tl.arange(0, slots)[None, :]) & mask
    hit = wanted[:, None] & (tl.load(slot_ids + slot, wanted[:, None], other=-1) == key[:, None])
    if slot_tables is not None:
        hit = hit & (tl.load(slot_tables + slot, hit, other=-1) == table[:, None])
    return tl.max(tl.load(slot_places + slot, hit, other=-1), 1)


@jit
def _insert_ids_kernel(
    ids, tables, slot_ids, slot_places, slot_tables, places, slot_of, count, mask,
    window: tl.constexpr, empty: tl.constexpr, never: tl.constexpr, block: tl.constexpr,
    golden: tl.constexpr, mix_1: tl.constexpr, mix_2: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    place = tl.load(places + at, at < count, other=-1)
    key, table, _, start = keys_at(ids, tables, at, count, mask, block, golden, mix_1, mix_2)
    waits = place >= 0
    step = 0
    while (tl.max(waits.to(tl.int32), 0) > 0) & (step < window):
        slot = (start + step) & mask
        # Atomics have no mask: a key that no longer waits compares with a place that no slot holds.
        expected = tl.where(waits, tl.full([block], empty, tl.int32), tl.full([block], never, tl.int32))
        before = tl.atomic_cas(slot_places + slot, expected, place)
        won = waits & (before == empty)
        tl.store(slot_ids + slot, key, won)
        if tables is not None:
            tl.store(slot_tables + slot, table, won)
        tl.store(slot_of + place, slot.to(tl.int32), won)
        waits = waits & (before != empty)
        step += 1
    tl.store(places + at, tl.full([block], -1, tl.int32), waits)
