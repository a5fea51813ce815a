"""A map from ids to places: which row of a fixed-size memory belongs to an id.

An open hash table of slots, at most half of which are in use. An id occupies any slot, empty at its insertion, of the
window that begins at its hash: so removing an id needs no tombstone, and a search reads the window. Kernels of fixed
number and shape find ids, or add distinct ones; nothing depends on the host. An id's slot may differ from run to run;
its place does not, because the caller supplies it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.embedding.initial_rows import GOLDEN, MIX_1, MIX_2, mix, mix_kernel

WINDOW = 128
"""Number of slots in which an id may be. With 60 million ids in twice as many slots, linear probing's longest search is
about 93: ln n / (a - 1 - ln a) at a load a of 0.5 (Pittel, Linear probing: the probable largest search time, 1987)."""
EMPTY = -1
"""Id in an empty slot."""
_NEVER = -2  # an id that no slot holds
_STEP = 16  # slots per id that a program reads at a time
_FIND, _INSERT = 32, 128  # ids per program


class IdSlots(NamedTuple):
    """The memory of a map with H slots, H a power of two and at least WINDOW."""

    ids: Tensor
    """int64 [H]: 0 or more, or EMPTY."""
    places: Tensor
    """int32 [H]: the place of the id in each slot."""


def empty_slots(ids: int, device: torch.device) -> IdSlots:
    """Returns an empty map, with slots for twice the number `ids`."""
    size = max(next_power_of_2(2 * ids), WINDOW)
    slots = torch.full((size,), EMPTY, dtype=torch.int64, device=device)
    return IdSlots(slots, torch.full((size,), -1, dtype=torch.int32, device=device))


def _check(ids: Tensor, of_ids: Tensor, slots: IdSlots) -> None:
    size = len(slots.ids)
    assert size >= WINDOW and size == next_power_of_2(size), f"slots: a power of two, at least {WINDOW}, not {size}"
    assert slots.ids.dtype == torch.int64 and slots.places.dtype == of_ids.dtype == torch.int32, "ids int64, places 32"
    assert ids.dtype in (torch.int32, torch.int64) and ids.shape == of_ids.shape, "ids, and a place of each: [N]"
    assert all(tensor.is_contiguous() for tensor in (ids, of_ids, *slots)), "contiguous tensors only"


def find_ids(ids: Tensor, slots: IdSlots, places: Tensor) -> None:
    """Sets places[n] to the place of ids[n]; -1 if the map lacks it, or the id is negative.

    ids: int64 or int32 [N], may repeat; places: int32 [N].
    """
    _check(ids, places, slots)
    find = triton_find_ids if ids.is_cuda else plain_find_ids
    find(ids, slots, places)


def insert_ids(ids: Tensor, places: Tensor, slots: IdSlots, slot_of: Tensor) -> None:
    """Adds ids[n] with places[n] if that is not negative; if the id's window is full, places[n] becomes -1.

    ids: int64 or int32 [N]; the added ones must be distinct and not yet in the map. places: int32 [N], distinct.
    slot_of: int32 [P]; the slot of each given place is written to it.
    """
    _check(ids, places, slots)
    assert slot_of.dtype == torch.int32, "slot_of: int32 [P]"
    insert = triton_insert_ids if ids.is_cuda else plain_insert_ids
    insert(ids, places, slots, slot_of)


def _starts(ids: Tensor, slots: IdSlots) -> Tensor:
    """Returns the first slot of each id's window, int64 [N]."""
    return mix(ids.long() * GOLDEN) & (len(slots.ids) - 1)


def plain_find_ids(ids: Tensor, slots: IdSlots, places: Tensor) -> None:
    """Computes `find_ids` in PyTorch."""
    start, step = _starts(ids, slots), torch.arange(_STEP, device=ids.device)
    places.fill_(-1)
    missing = (ids >= 0).nonzero().flatten()
    for first in range(0, WINDOW, _STEP):
        slot = (start[missing, None] + first + step) & (len(slots.ids) - 1)
        hits = slots.ids[slot] == ids[missing, None]
        found = hits.any(1)
        places[missing[found]] = slots.places[slot[hits]]
        missing = missing[~found]


def plain_insert_ids(ids: Tensor, places: Tensor, slots: IdSlots, slot_of: Tensor) -> None:
    """Computes `insert_ids` in PyTorch."""
    start, waiting = _starts(ids, slots), (places >= 0).nonzero().flatten()
    for step in range(WINDOW):
        slot = (start[waiting] + step) & (len(slots.ids) - 1)
        empty = (slots.ids[slot] == EMPTY).nonzero().flatten()
        ordered, order = slot[empty].sort(stable=True)
        opens = torch.ones_like(ordered, dtype=torch.bool)
        opens[1:] = ordered[1:] != ordered[:-1]  # of ids that want the same slot, the first gets it
        taken, added = ordered[opens], empty[order[opens]]
        slots.ids[taken] = ids[waiting[added]].long()
        slots.places[taken] = places[waiting[added]]
        slot_of[places[waiting[added]].long()] = taken.int()
        kept = torch.ones_like(waiting, dtype=torch.bool)
        kept[added] = False
        waiting = waiting[kept]
        if len(waiting) == 0:
            return
    places[waiting] = -1


def triton_find_ids(ids: Tensor, slots: IdSlots, places: Tensor) -> None:
    """Computes `find_ids` in one kernel."""
    if len(ids):
        sizes = (len(ids), len(slots.ids) - 1, WINDOW, _STEP, _FIND, GOLDEN, MIX_1, MIX_2)
        _find_ids_kernel[(cdiv(len(ids), _FIND),)](ids, *slots, places, *sizes, num_warps=4)


def triton_insert_ids(ids: Tensor, places: Tensor, slots: IdSlots, slot_of: Tensor) -> None:
    """Computes `insert_ids` in one kernel."""
    if len(ids):
        sizes = (len(ids), len(slots.ids) - 1, WINDOW, EMPTY, _NEVER, _INSERT, GOLDEN, MIX_1, MIX_2)
        _insert_ids_kernel[(cdiv(len(ids), _INSERT),)](ids, *slots, places, slot_of, *sizes, num_warps=4)


@jit
def _find_ids_kernel(
    ids, slot_ids, slot_places, places, count, mask,
    window: tl.constexpr, step: tl.constexpr, block: tl.constexpr,
    golden: tl.constexpr, mix_1: tl.constexpr, mix_2: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    key = tl.load(ids + at, at < count, other=-1).to(tl.int64)
    start = mix_kernel(key * golden, mix_1, mix_2) & mask
    found = tl.full([block], -1, tl.int64)  # slot
    first = 0
    while (tl.max(((key >= 0) & (found < 0)).to(tl.int32), 0) > 0) & (first < window):
        slot = (start[:, None] + first + tl.arange(0, step)[None, :]) & mask
        wanted = ((key >= 0) & (found < 0))[:, None]
        hit = wanted & (tl.load(slot_ids + slot, wanted, other=-1) == key[:, None])
        found = tl.maximum(found, tl.max(tl.where(hit, slot, -1), 1))
        first += step
    tl.store(places + at, tl.load(slot_places + found, found >= 0, other=-1), at < count)


@jit
def _insert_ids_kernel(
    ids, slot_ids, slot_places, places, slot_of, count, mask,
    window: tl.constexpr, empty: tl.constexpr, never: tl.constexpr, block: tl.constexpr,
    golden: tl.constexpr, mix_1: tl.constexpr, mix_2: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    place = tl.load(places + at, at < count, other=-1)
    key = tl.load(ids + at, at < count, other=0).to(tl.int64)
    start = mix_kernel(key * golden, mix_1, mix_2) & mask
    waits = place >= 0
    step = 0
    while (tl.max(waits.to(tl.int32), 0) > 0) & (step < window):
        slot = (start + step) & mask
        # Atomics have no mask: an id that no longer waits compares with an id that no slot holds.
        expected = tl.where(waits, tl.full([block], empty, tl.int64), tl.full([block], never, tl.int64))
        before = tl.atomic_cas(slot_ids + slot, expected, key)
        won = waits & (before == empty)
        tl.store(slot_places + slot, place, won)
        tl.store(slot_of + place, slot.to(tl.int32), won)
        waits = waits & (before != empty)
        step += 1
    tl.store(places + at, tl.full([block], -1, tl.int32), waits)
