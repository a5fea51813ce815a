"""Places for a batch's keys in a map (id_map.py): which keys are new, and a place from a stack for each new one.

Two kernels, with a cumulative sum of the first one's marks between them: `mark_new_ids`, then `give_places`. Equal keys
are adjacent, so the cumulative sum at a key without a place is the number of its key among the new keys, from 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl
from dlrm_bench.kernels.embedding._split_mix import GOLDEN, MIX_1, MIX_2
from dlrm_bench.kernels.embedding.id_map import (
    EMPTY,
    FIND,
    INSERT,
    NEVER,
    STEP,
    WINDOW,
    IdSlots,
    Keys,
    find_kernel,
    insert_kernel,
    plain_find_ids,
    plain_insert_ids,
)


class Naming(NamedTuple):
    """Which batch last named the key of each place, for P places."""

    last: Tensor
    """int32 [P + 1]; the last entry belongs to no place."""
    batch: Tensor
    """int32 [1]: number of the batch that is placed."""
    is_new: Tensor
    """int32 [1]: 0 for a batch that was placed before, whose keys keep the batch numbers at which they were named."""


class Stack(NamedTuple):
    """The free places of a map with H slots and P places."""

    free: Tensor
    """int32 [P] or more: the first free_count entries are free; the last of them is given out first."""
    free_count: Tensor
    """int64 [1]."""
    slot_of: Tensor
    """int32 [P] or more: the slot of the key of each place."""
    lost: Tensor
    """bool [H] or more: whether a key of this number modulo H has lost its place before; empty if none ever does."""


def mark_new_ids(keys: Keys, slots: IdSlots, places: Tensor, naming: Naming) -> Tensor:
    """Returns marks, int32 [N]: 1 for the first of equal keys without a place in the map, else 0. Sets places[n] to the
    place of keys[n], -1 if it has none or is no key, and notes in `naming.last` that the batch names the others.

    keys: N, equal keys adjacent; places: int32 [N].
    """
    assert places.shape == keys.ids.shape and places.dtype == torch.int32, "places: int32 [N]"
    mark = triton_mark_new_ids if places.is_cuda else plain_mark_new_ids
    return mark(keys, slots, places, naming)


def give_places(keys: Keys, nth: Tensor, places: Tensor, slots: IdSlots, stack: Stack, naming: Naming) -> Counts:
    """Gives places to keys without one, as long as there are free ones: sets places[n] for all of equal keys, adds the
    key to the map, and notes that the batch names it. The stack stays as it is: the caller takes Counts.given off it.

    keys, places: as `mark_new_ids` left them. nth: int32 [N], the inclusive cumulative sum of its marks. A key whose
    window of slots is full gets a place that nobody finds, and counts as `lacking`.
    """
    assert nth.dtype == torch.int32 and nth.shape == places.shape == keys.ids.shape, "nth, places: int32 [N]"
    give = triton_give_places if places.is_cuda else plain_give_places
    fresh, full, returned = give(keys, nth, places, slots, stack, naming)
    new = nth[-1:].long()
    given = torch.minimum(new, stack.free_count)
    return Counts(fresh, given, new - given + full, returned)


class Counts(NamedTuple):
    """What `give_places` has done for N keys."""

    fresh: Tensor
    """int32 [N]: the place just given to keys[n], each once, at the first of equal keys; -1 elsewhere."""
    given: Tensor
    """int64 [1]: number of places taken off the stack."""
    lacking: Tensor
    """int64 [1]: number of distinct keys without a place."""
    returned: Tensor
    """int64 [1]: number of keys with a new place that may have lost one before."""


def differ_from_previous(keys: Keys) -> Tensor:
    """Returns whether each key differs from the one before it, bool [N]; the first one does."""
    differ = torch.ones_like(keys.ids, dtype=torch.bool)
    differ[1:] = keys.ids[1:] != keys.ids[:-1]
    if keys.tables is not None:
        differ[1:] |= keys.tables[1:] != keys.tables[:-1]
    return differ


def _name(places: Tensor, naming: Naming) -> None:
    at = torch.where(places < 0, len(naming.last) - 1, places).long()
    naming.last.index_copy_(0, at, torch.where(naming.is_new > 0, naming.batch, naming.last[at]))


def plain_mark_new_ids(keys: Keys, slots: IdSlots, places: Tensor, naming: Naming) -> Tensor:
    """Computes `mark_new_ids` in PyTorch."""
    plain_find_ids(keys, slots, places)
    _name(places, naming)
    return (keys.valid & differ_from_previous(keys) & (places < 0)).int()


def plain_give_places(
    keys: Keys, nth: Tensor, places: Tensor, slots: IdSlots, stack: Stack, naming: Naming
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `give_places` in PyTorch; returns fresh places, and the numbers of full windows and of returned keys."""
    given = keys.valid & (places < 0) & (nth <= stack.free_count)
    place = torch.where(given, stack.free[(stack.free_count - nth).clamp_(min=0)], places)
    fresh = torch.where(given & differ_from_previous(keys), place, -1)
    plain_insert_ids(keys, wanted := fresh.clone(), slots, stack.slot_of)
    returned = torch.zeros(1, dtype=torch.int64, device=places.device)
    if len(stack.lost):
        returned += ((fresh >= 0) & stack.lost[keys.numbers % len(slots.ids)]).sum()
    places.copy_(place)
    _name(wanted, naming)
    return wanted, ((fresh >= 0) & (wanted < 0)).sum().view(1), returned


def triton_mark_new_ids(keys: Keys, slots: IdSlots, places: Tensor, naming: Naming) -> Tensor:
    """Computes `mark_new_ids` in one kernel."""
    marks = torch.empty_like(places)
    if len(places):
        sizes = (len(places), len(slots.ids) - 1, WINDOW, STEP, FIND, GOLDEN, MIX_1, MIX_2)
        _mark_new_ids_kernel[(cdiv(len(places), FIND),)](*keys, *slots, places, marks, *naming, *sizes, num_warps=4)
    return marks


def triton_give_places(
    keys: Keys, nth: Tensor, places: Tensor, slots: IdSlots, stack: Stack, naming: Naming
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `give_places` in one kernel; returns fresh places, and the numbers of full windows and of returned
    keys."""
    fresh, counts = torch.empty_like(places), torch.zeros(2, dtype=torch.int64, device=places.device)
    if len(places):
        lost = stack.lost if len(stack.lost) else None
        tensors = (nth, places, fresh, stack.free, stack.free_count, stack.slot_of, lost, counts, *naming)
        sizes = (len(places), len(slots.ids) - 1, WINDOW, EMPTY, NEVER, INSERT, GOLDEN, MIX_1, MIX_2)
        _give_places_kernel[(cdiv(len(places), INSERT),)](*keys, *slots, *tensors, *sizes, num_warps=4)
    return fresh, counts[:1], counts[1:]


@jit
def _mark_new_ids_kernel(
    ids, tables, slot_ids, slot_places, slot_tables, places, marks, last, batch, is_new, count, mask,
    window: tl.constexpr, step: tl.constexpr, block: tl.constexpr,
    golden: tl.constexpr, mix_1: tl.constexpr, mix_2: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    follows = (at > 0) & (at < count)
    key = tl.load(ids + at, at < count, other=-1).to(tl.int64)
    opens = (at == 0) | (key != tl.load(ids + at - 1, follows, other=-1).to(tl.int64))
    number, exists, table = key, key >= 0, tl.full([block], 0, tl.int32)
    if tables is not None:
        exists = at < count
        table = tl.load(tables + at, exists, other=0)
        opens = opens | (table != tl.load(tables + at - 1, follows, other=-1))
        number = key + table.to(tl.int64) * golden
    found = find_kernel(
        slot_ids, slot_places, slot_tables, key, table, number, exists, mask, window, step, block, golden, mix_1, mix_2
    )
    tl.store(places + at, found, at < count)
    tl.store(marks + at, (exists & opens & (found < 0)).to(tl.int32), at < count)
    tl.store(last + found, tl.load(batch), opens & (found >= 0) & (tl.load(is_new) > 0))


@jit
def _give_places_kernel(
    ids, tables, slot_ids, slot_places, slot_tables, nth, places, fresh, free, free_count, slot_of, lost, counts,
    last, batch, is_new, count, mask,
    window: tl.constexpr, empty: tl.constexpr, never: tl.constexpr, block: tl.constexpr,
    golden: tl.constexpr, mix_1: tl.constexpr, mix_2: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    key = tl.load(ids + at, at < count, other=-1).to(tl.int64)
    number, exists, table = key, key >= 0, tl.full([block], 0, tl.int32)
    if tables is not None:
        exists = at < count
        table = tl.load(tables + at, exists, other=0)
        number = key + table.to(tl.int64) * golden
    n = tl.load(nth + at, at < count, other=0)
    before = tl.load(nth + at - 1, (at > 0) & (at < count), other=0)
    position = tl.load(free_count) - n
    given = exists & (tl.load(places + at, at < count, other=0) < 0) & (position >= 0)
    place = tl.load(free + position, given, other=-1)
    tl.store(places + at, place, given)
    opens = given & (n > before)
    full = insert_kernel(
        slot_ids, slot_places, slot_tables, slot_of, key, table, number, place, opens, mask,
        window, empty, never, block, golden, mix_1, mix_2,
    )  # fmt: skip
    stays = opens & (full == 0)
    tl.store(fresh + at, tl.where(stays, place, -1), at < count)
    tl.store(last + place, tl.load(batch), stays & (tl.load(is_new) > 0))
    without = tl.sum(full.to(tl.int64), 0)
    if without > 0:
        tl.atomic_add(counts, without)
    if lost is not None:
        again = tl.sum((tl.load(lost + (number & mask), opens, other=0) != 0).to(tl.int64), 0)
        if again > 0:
            tl.atomic_add(counts + 1, again)
