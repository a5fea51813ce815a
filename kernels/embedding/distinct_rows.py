"""The distinct rows among a batch's ids, in one list per owner rank.

Every place of a batch with an id gets a key, owner * rows of an owner + the owner's row, by which `sort_ids` sorts the
places. Equal ids, and all ids of one owner, are then adjacent: the first of each run of equal keys becomes an entry of
its owner's list. Lists have a fixed capacity, whatever the ids are; nothing depends on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl

_PIECE = 1024  # places per program
_COARSE = 1024  # keys that a search reads first, equally spaced; then it reads those between two of them


class DistinctRows(NamedTuple):
    """The result of `distinct_rows`, all int32, for N places and W lists."""

    rows: Tensor
    """[W, capacity]: the owner's row of each entry, ascending; -1 after the last."""
    slots: Tensor
    """[N]: the entry of each sorted place, counted over all lists, owner * capacity + index in its list; -1 for a place
    without an id, and for one whose row exceeds its list."""
    longest: Tensor
    """[1]: number of entries that the longest list needs, even if it exceeds the capacity."""


def owner_keys(ids: Tensor, first_rows: Tensor, owners: int, rows_of_owner: int, keys: Tensor) -> None:
    """Computes keys[n] = owner * rows_of_owner + row, where id i of a table is row first_rows[n] + i // owners of rank
    i % owners; -1 where ids[n] is negative.

    ids: int32 [N], rows of their table. first_rows: int32 [N], the first row of each place's table, the same on all
    owners. keys: int32 [N], may be `ids`. owners * rows_of_owner: below 2^31.
    """
    assert ids.dtype == first_rows.dtype == keys.dtype == torch.int32, "ids, first rows, keys: int32"
    assert ids.shape == first_rows.shape == keys.shape, "ids, first rows, keys: [N]"
    assert 0 < owners * rows_of_owner < 1 << 31, "keys must fit in int32"
    assert ids.is_contiguous() and first_rows.is_contiguous() and keys.is_contiguous(), "contiguous tensors only"
    make = triton_owner_keys if ids.is_cuda else plain_owner_keys
    make(ids, first_rows, owners, rows_of_owner, keys)


def plain_owner_keys(ids: Tensor, first_rows: Tensor, owners: int, rows_of_owner: int, keys: Tensor) -> None:
    """Computes `owner_keys` in PyTorch."""
    key = ids % owners * rows_of_owner + first_rows + ids // owners
    keys.copy_(torch.where(ids < 0, -1, key))


def triton_owner_keys(ids: Tensor, first_rows: Tensor, owners: int, rows_of_owner: int, keys: Tensor) -> None:
    """Computes `owner_keys` in one kernel."""
    if len(ids):
        grid = (cdiv(len(ids), _PIECE),)
        _owner_keys_kernel[grid](ids, first_rows, keys, len(ids), owners, rows_of_owner, _PIECE, num_warps=4)


def distinct_rows(keys: Tensor, rows_of_owner: int, out: DistinctRows) -> None:
    """Writes the distinct rows of sorted keys to their owners' lists; a list that is too short holds the first ones.

    keys: int32 [N], from `owner_keys`, in ascending order; rows_of_owner: as for `owner_keys`.
    """
    assert keys.dtype == torch.int32 and keys.is_contiguous(), "keys: contiguous int32"
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in out), "contiguous int32 only"
    assert out.slots.shape == keys.shape, "slots: [N]"
    assert out.rows.numel() < 1 << 31, "slots must fit in int32"
    write = triton_distinct_rows if keys.is_cuda else plain_distinct_rows
    write(keys, rows_of_owner, out)


def plain_distinct_rows(keys: Tensor, rows_of_owner: int, out: DistinctRows) -> None:
    """Computes `distinct_rows` in PyTorch."""
    owners, capacity = out.rows.shape
    named = keys >= 0
    distinct, entry = keys[named].unique_consecutive(return_inverse=True)
    owner = distinct // rows_of_owner
    starts = torch.searchsorted(owner, torch.arange(owners + 1, dtype=owner.dtype, device=keys.device))
    nth = torch.arange(len(distinct), device=keys.device) - starts[owner.long()]
    slot = torch.where(nth < capacity, owner * capacity + nth, -1).int()
    out.rows.fill_(-1)
    out.rows.view(-1)[slot[slot >= 0].long()] = (distinct - owner * rows_of_owner)[slot >= 0]
    out.slots.fill_(-1)
    out.slots[named] = slot[entry]
    out.longest.copy_(starts.diff().max().view(1))


def triton_distinct_rows(keys: Tensor, rows_of_owner: int, out: DistinctRows) -> None:
    """Computes `distinct_rows` with a kernel that counts in each piece, a sum, a search for each owner, and two kernels
    that write."""
    owners, capacity = out.rows.shape
    count, pieces = len(keys), cdiv(len(keys), _PIECE)
    counts = torch.empty(pieces, dtype=torch.int32, device=keys.device)
    starts = torch.empty(owners + 1, dtype=torch.int32, device=keys.device)
    _count_distinct_kernel[(pieces,)](keys, counts, count, _PIECE, num_warps=4)
    ends = counts.cumsum(0, dtype=torch.int32)
    stride = cdiv(count, _COARSE)
    search = (count, rows_of_owner, owners, stride, _COARSE, next_power_of_2(stride), _PIECE)
    _owner_starts_kernel[(owners + 1,)](keys, ends, starts, *search, num_warps=4)
    sizes = (count, rows_of_owner, capacity, _PIECE)
    _write_distinct_kernel[(pieces,)](keys, counts, ends, starts, out.slots, out.rows, *sizes, num_warps=4)
    rest = (capacity, owners, next_power_of_2(owners), _PIECE)
    _rest_of_lists_kernel[(cdiv(out.rows.numel(), _PIECE),)](starts, out.rows, out.longest, *rest, num_warps=4)


@jit
def _owner_keys_kernel(ids, first_rows, keys, count, owners, rows_of_owner, piece: tl.constexpr) -> None:
    at = tl.program_id(0) * piece + tl.arange(0, piece)
    row = tl.load(ids + at, at < count, other=-1)
    first = tl.load(first_rows + at, at < count, other=0)
    key = row % owners * rows_of_owner + first + row // owners
    tl.store(keys + at, tl.where(row < 0, -1, key), at < count)


@jit
def _opens(keys, at, count):
    """Returns the keys at these sorted places, and whether each is the first of its run."""
    key = tl.load(keys + at, at < count, other=-1)
    previous = tl.load(keys + at - 1, (at > 0) & (at < count), other=-1)
    return key, (key >= 0) & (key != previous)


@jit
def _count_distinct_kernel(keys, counts, count, piece: tl.constexpr) -> None:
    _, opens = _opens(keys, tl.program_id(0) * piece + tl.arange(0, piece), count)
    tl.store(counts + tl.program_id(0), tl.sum(opens.to(tl.int32), 0))


@jit
def _owner_starts_kernel(
    keys,
    ends,
    starts,
    count,
    rows_of_owner,
    owners,
    stride,
    coarse: tl.constexpr,
    fine: tl.constexpr,
    piece: tl.constexpr,
) -> None:
    """Writes the number of distinct rows before each owner's first, and the total last."""
    owner = tl.program_id(0)
    sample = tl.arange(0, coarse) * stride
    before = tl.load(keys + sample, sample < count, other=2147483647) // rows_of_owner < owner
    base = tl.maximum(tl.sum(before.to(tl.int32), 0) - 1, 0) * stride
    near = tl.arange(0, fine)
    key = tl.load(keys + base + near, (near < stride) & (base + near < count), other=2147483647)
    # A key of -1 has no owner; Triton rounds the quotient to 0, Python to -1, and its run opens nothing either way.
    position = base + tl.sum((key // rows_of_owner < owner).to(tl.int32), 0)
    number = position // piece
    at = number * piece + tl.arange(0, piece)
    _, opens = _opens(keys, at, count)
    inside = tl.sum((opens & (at < position)).to(tl.int32), 0)
    tl.store(starts + owner, tl.load(ends + number - 1, number > 0, other=0) + inside)


@jit
def _write_distinct_kernel(
    keys,
    counts,
    ends,
    starts,
    slots,
    rows,
    count,
    rows_of_owner,
    capacity,
    piece: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    at = number * piece + tl.arange(0, piece)
    key, opens = _opens(keys, at, count)
    distinct = tl.load(ends + number) - tl.load(counts + number) + tl.cumsum(opens.to(tl.int32), 0) - 1
    owner = tl.maximum(key, 0) // rows_of_owner
    nth = distinct - tl.load(starts + owner)
    fits = (key >= 0) & (nth < capacity)
    slot = tl.where(fits, owner * capacity + nth, -1)
    tl.store(slots + at, slot, at < count)
    tl.store(rows + slot, key - owner * rows_of_owner, opens & fits)


@jit
def _rest_of_lists_kernel(
    starts, rows, longest, capacity, owners: tl.constexpr, owner_block: tl.constexpr, piece: tl.constexpr
) -> None:
    """Fills each list after its last entry, and computes the length of the longest list."""
    at = tl.program_id(0) * piece + tl.arange(0, piece)
    inside = at < capacity * owners
    owner = at // capacity
    entries = tl.load(starts + owner + 1, inside, other=0) - tl.load(starts + owner, inside, other=0)
    tl.store(rows + at, tl.zeros_like(at) - 1, inside & (at % capacity >= entries))
    each = tl.arange(0, owner_block)
    of_each = tl.load(starts + each + 1, each < owners, other=0) - tl.load(starts + each, each < owners, other=0)
    tl.store(longest, tl.max(of_each, 0), tl.program_id(0) == 0)
