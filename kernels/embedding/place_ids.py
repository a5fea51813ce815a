"""Places for a batch's keys in a map (id_map.py): which keys are new, and a place from a stack for each new one.

Kernels for keys in any order, which may repeat; a new key's place depends on the order of the new keys' first
occurrences alone. `claim_ids` finds keys; those that the map lacks claim an empty slot, in which all occurrences of a
key meet, and which keeps the index of the first: nothing waits. A cumulative sum over the first occurrences numbers the
new keys from 1. `give_places` then replaces the claims by places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl
from dlrm_bench.kernels.embedding._split_mix import GOLDEN, MIX_1, MIX_2
from dlrm_bench.kernels.embedding.id_map import (
    EMPTY,
    INSERT,
    NEVER,
    WINDOW,
    IdSlots,
    Keys,
    find_ids,
    keys_at,
    plain_find_ids,
    plain_insert_ids,
)

_CLAIM = -3
"""Value in a claimed slot until it has a place, less the index of the key that claims it."""


class Naming(NamedTuple):
    """The batch that last named the key of each place, for P places."""

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


class Claims(NamedTuple):
    """Those of N keys that have no place yet."""

    first: Tensor
    """int32 [N]: index of the first occurrence of each such key; -1 for others."""
    nth: Tensor
    """int32 [N]: number of distinct such keys among the keys up to this one, inclusive."""
    slots: Tensor
    """int32 [N]: the slot that each such key claims, -1 for others; of keys that find no empty slot, -2, and their
    first occurrence is -1. Any values if the plain functions run."""


class Counts(NamedTuple):
    """The results of `give_places` for N keys."""

    fresh: Tensor
    """int32 [N]: the place just given to keys[n], each once, at the key's first occurrence; -1 elsewhere."""
    given: Tensor
    """int64 [1]: number of places taken off the stack."""
    lacking: Tensor
    """int64 [1]: 0 if every key has a place; otherwise the number of distinct keys without one, more if they repeat and
    find their windows of slots full."""
    returned: Tensor
    """int64 [1]: number of keys with a new place that may have lost one before."""


def claim_ids(keys: Keys, slots: IdSlots, places: Tensor, naming: Naming) -> Claims:
    """Sets places[n] to the place of keys[n], -1 if it has none or is no key, and notes in `naming.last` that the batch
    names the others. Returns what `give_places` needs, which must follow.

    keys: N, at least one; places: int32 [N].
    """
    assert len(places) > 0 and places.shape == keys.ids.shape and places.dtype == torch.int32, "places: int32 [N]"
    claim = triton_claim_ids if places.is_cuda else plain_claim_ids
    first, marks, claimed = claim(keys, slots, places, naming)
    return Claims(first, marks.cumsum(0, dtype=torch.int32), claimed)


def give_places(keys: Keys, claims: Claims, places: Tensor, slots: IdSlots, stack: Stack, naming: Naming) -> Counts:
    """Gives places to keys without one, as long as there are free ones: sets places[n] for all occurrences, adds the
    key to the map, and notes that the batch names it. The stack stays as it is: the caller takes Counts.given off it.

    keys, places: as `claim_ids` left them; keys in the map may have been removed since.
    """
    give = triton_give_places if places.is_cuda else plain_give_places
    fresh, without, returned = give(keys, claims, places, slots, stack, naming)
    new = claims.nth[-1:].long()
    given = torch.minimum(new, stack.free_count)
    return Counts(fresh, given, new - given + without, returned)


def _name(places: Tensor, naming: Naming) -> None:
    at = torch.where(places < 0, len(naming.last) - 1, places).long()
    naming.last.index_copy_(0, at, torch.where(naming.is_new > 0, naming.batch, naming.last[at]))


def plain_claim_ids(keys: Keys, slots: IdSlots, places: Tensor, naming: Naming) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `claim_ids` in PyTorch; returns Claims.first, marks, int32 [N], 1 at first occurrences and else 0, and
    Claims.slots."""
    plain_find_ids(keys, slots, places)
    _name(places, naming)
    first_of, marks = torch.full_like(places, -1), torch.zeros_like(places)
    new = (keys.valid & (places < 0)).nonzero().flatten()
    tables = torch.zeros_like(keys.ids) if keys.tables is None else keys.tables
    distinct, which = torch.stack([tables.long(), keys.ids.long()])[:, new].unique(dim=1, return_inverse=True)
    first = torch.full_like(distinct[0], len(places)).scatter_reduce_(0, which, new, "amin")
    first_of[new], marks[first] = first[which].int(), 1
    return first_of, marks, first_of


def plain_give_places(
    keys: Keys, claims: Claims, places: Tensor, slots: IdSlots, stack: Stack, naming: Naming
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `give_places` in PyTorch; returns fresh places, and the numbers of keys without a slot and of returned
    ones."""
    left = stack.free_count - claims.nth[claims.first.long()]
    claimed = claims.first >= 0
    place = torch.where(claimed & (left >= 0), stack.free[left.clamp_(min=0)], -1)
    first = claimed & (claims.first == torch.arange(len(places), device=places.device))
    wanted = torch.where(first, place, -1)
    returned = torch.zeros(1, dtype=torch.int64, device=places.device)
    if len(stack.lost):
        returned += ((wanted >= 0) & stack.lost[keys.numbers % len(slots.ids)]).sum()
    plain_insert_ids(keys, fresh := wanted.clone(), slots, stack.slot_of)
    placed = fresh[claims.first.long()] == place
    places.copy_(torch.where(claimed & placed, place, places))
    _name(fresh, naming)
    return fresh, (claimed & ~placed).sum().view(1), returned


def triton_claim_ids(keys: Keys, slots: IdSlots, places: Tensor, naming: Naming) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `claim_ids` in three kernels; returns what `plain_claim_ids` does."""
    (first, marks, claimed), count = (torch.empty_like(places) for _ in range(3)), len(places)
    find_ids(keys, slots, places)
    grid, sizes = (cdiv(count, INSERT),), (count, len(slots.ids) - 1, WINDOW, EMPTY, NEVER, _CLAIM)
    mixed = (INSERT, GOLDEN, MIX_1, MIX_2)
    _claim_ids_kernel[grid](*keys, slots.places, places, claimed, *naming, *sizes, *mixed, num_warps=4)
    _mark_claims_kernel[grid](claimed, slots.places, first, marks, count, _CLAIM, INSERT, num_warps=4)
    return first, marks, claimed


def triton_give_places(
    keys: Keys, claims: Claims, places: Tensor, slots: IdSlots, stack: Stack, naming: Naming
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `give_places` in one kernel; returns fresh places, and the numbers of keys without a slot and of
    returned ones."""
    fresh, counts = torch.empty_like(places), torch.zeros(2, dtype=torch.int64, device=places.device)
    lost = stack.lost if len(stack.lost) else None
    tensors = (*claims, places, fresh, stack.free, stack.free_count, stack.slot_of, lost, counts, *naming)
    sizes = (len(places), len(slots.ids) - 1, EMPTY, INSERT, GOLDEN)
    _give_places_kernel[(cdiv(len(places), INSERT),)](*keys, *slots, *tensors, *sizes, num_warps=4)
    return fresh, counts[:1], counts[1:]


@jit
def _claim_ids_kernel(
    ids, tables, slot_places, places, claimed, last, batch, is_new, count, mask,
    window: tl.constexpr, empty: tl.constexpr, never: tl.constexpr, claim: tl.constexpr,
    block: tl.constexpr, golden: tl.constexpr, mix_1: tl.constexpr, mix_2: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    key, table, exists, start = keys_at(ids, tables, at, count, mask, block, golden, mix_1, mix_2)
    place = tl.load(places + at, at < count, other=0)
    tl.store(last + place, tl.load(batch), exists & (place >= 0) & (tl.load(is_new) > 0))
    slot_of_key = tl.full([block], -1, tl.int32)
    waits = exists & (place < 0)
    step = 0
    # No slot becomes empty meanwhile, so all occurrences of a key stop at the same slot.
    while (tl.max(waits.to(tl.int32), 0) > 0) & (step < window):
        slot = (start + step) & mask
        # Atomics have no mask: a key that no longer waits compares with a place that no slot holds.
        expected = tl.where(waits, tl.full([block], empty, tl.int32), tl.full([block], never, tl.int32))
        before = tl.atomic_cas(slot_places + slot, expected, claim - at)
        rival = waits & (before <= claim)
        same = rival & (tl.load(ids + (claim - before), rival, other=0).to(tl.int64) == key)
        if tables is not None:
            same = same & (tl.load(tables + (claim - before), rival, other=-1) == table)
        tl.atomic_max(slot_places + slot, claim - at, same)  # the first occurrence's claim is the largest
        stops = (waits & (before == empty)) | same
        slot_of_key = tl.where(stops, slot.to(tl.int32), slot_of_key)
        waits = waits & (stops == 0)
        step += 1
    tl.store(claimed + at, tl.where(waits, tl.full([block], never, tl.int32), slot_of_key), at < count)


@jit
def _mark_claims_kernel(claimed, slot_places, first, marks, count, claim: tl.constexpr, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    slot = tl.load(claimed + at, at < count, other=-1)
    of = tl.where(slot >= 0, claim - tl.load(slot_places + slot, slot >= 0, other=0), -1)
    tl.store(first + at, of, at < count)
    tl.store(marks + at, (of == at).to(tl.int32), at < count)


@jit
def _give_places_kernel(
    ids, tables, slot_ids, slot_places, slot_tables, first, nth, claimed, places, fresh, free, free_count, slot_of,
    lost, counts, last, batch, is_new, count, mask,
    empty: tl.constexpr, block: tl.constexpr, golden: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    of = tl.load(first + at, at < count, other=-1)
    slot = tl.load(claimed + at, at < count, other=-1)
    new = tl.full([block], -1, tl.int32)
    # Of most blocks' keys all have places.
    if (tl.max(of, 0) >= 0) | (tl.min(slot, 0) < -1):
        left = tl.load(free_count) - tl.load(nth + of, of >= 0, other=0)
        place = tl.load(free + left, (of >= 0) & (left >= 0), other=empty)
        tl.store(places + at, place, of >= 0)
        tl.store(slot_places + slot, place, of == at)
        given = (of == at) & (place >= 0)
        key = tl.load(ids + at, given, other=0).to(tl.int64)
        number = key
        tl.store(slot_ids + slot, key, given)
        if tables is not None:
            table = tl.load(tables + at, given, other=0)
            number = key + table.to(tl.int64) * golden
            tl.store(slot_tables + slot, table, given)
        tl.store(slot_of + place, slot, given)
        tl.store(last + place, tl.load(batch), given & (tl.load(is_new) > 0))
        new = tl.where(given, place, -1)
        without = tl.sum((slot < -1).to(tl.int64), 0)
        if without > 0:
            tl.atomic_add(counts, without)
        if lost is not None:
            again = tl.sum((tl.load(lost + (number & mask), given, other=0) != 0).to(tl.int64), 0)
            if again > 0:
                tl.atomic_add(counts + 1, again)
    tl.store(fresh + at, new, at < count)
