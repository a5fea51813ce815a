"""Sums of rows by sorted keys: the gradient of a gather, added in one order, so that equal inputs give equal bits.

Sorted places are cut into runs of 128, each summed by one program regardless of its keys, because one key may have most
of the places. A second kernel adds up, in order, the sums of a key that spans several runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit_of_any, next_power_of_2, tl

_RUN = 128  # sorted places per program
_TILE = 8  # rows that a program adds at once


class SortedKeys(NamedTuple):
    """keys: int32 [N], sorted; keys from K on are not summed. order: int64 [N], the row of each sorted key, equal keys
    in row order. starts: int32 [K + 1], key k has places starts[k] to starts[k + 1] - 1."""

    keys: Tensor
    order: Tensor
    starts: Tensor


def sort_keys(keys: Tensor, count: int) -> SortedKeys:
    """Returns keys, int32 [N], none negative, in sorted order; `count`: the number of keys to sum."""
    ordered, order = keys.sort(stable=True)
    numbers = torch.arange(count + 1, dtype=keys.dtype, device=keys.device)
    return SortedKeys(ordered, order, torch.searchsorted(ordered, numbers, out_int32=True))


def sorted_sums(rows: Tensor, keys: SortedKeys, factor: float, out: Tensor) -> None:
    """Stores factor * (sum of the rows of each key) in `out`; 0 for a key without rows. Sums in fp32.

    rows: bf16 or fp32 [N, W], contiguous, W a power of two. out: bf16 or fp32 [K, W], contiguous.
    """
    assert rows.is_contiguous() and out.is_contiguous(), "contiguous tensors only"
    assert out.shape == (len(keys.starts) - 1, rows.shape[1]), "out: [K, W]"
    assert rows.shape[1] == next_power_of_2(rows.shape[1]), f"width: a power of two, not {rows.shape[1]}"
    (triton_sorted_sums if rows.is_cuda else plain_sorted_sums)(rows, keys, factor, out)


def plain_sorted_sums(rows: Tensor, keys: SortedKeys, factor: float, out: Tensor) -> None:
    """Computes `sorted_sums` in PyTorch."""
    counts = keys.starts.diff().long()
    key = torch.arange(len(out), device=out.device).repeat_interleave(counts)
    wide = rows[keys.order[: len(key)]].to(torch.promote_types(rows.dtype, torch.float32))
    out.copy_(wide.new_zeros(out.shape).index_add_(0, key, wide) * factor)


def triton_sorted_sums(rows: Tensor, keys: SortedKeys, factor: float, out: Tensor) -> None:
    """Computes `sorted_sums` in two kernels: sums within runs, then the sums of keys that span several runs."""
    places, width = rows.shape
    runs = cdiv(places, _RUN)
    partials = torch.empty(2, runs, width, dtype=torch.float32, device=rows.device)
    count = len(out)
    if runs:
        _sorted_sums_kernel[(runs,)](rows, *keys, out, partials, factor, runs, count, width, _RUN, _TILE, num_warps=2)
    if count:
        _sorted_sums_merge_kernel[(count,)](keys.starts, out, partials, factor, runs, width, _RUN, num_warps=1)


@jit_of_any("runs")
def _sorted_sums_kernel(
    rows, keys, order, starts, out, partials, factor, runs, count,
    width: tl.constexpr, run: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Stores the sums of keys that lie within the run in `out`; others in `partials`: [0] for the key that began before
    the run, [1] for the key that begins in the run and ends later."""
    begin = tl.program_id(0) * run
    end = tl.minimum(begin + run, tl.load(starts + count))
    column = tl.arange(0, width)
    start = begin
    while start < end:
        key = tl.load(keys + start)
        of_key, past = tl.load(starts + key), tl.load(starts + key + 1)
        stop = tl.minimum(past, end)
        total = tl.zeros([tile, width], tl.float32)
        while start < stop:
            place = start + tl.arange(0, tile)
            row = tl.load(order + place, place < stop, other=0)
            at = row[:, None] * width + column[None, :]
            total += tl.load(rows + at, (place < stop)[:, None], other=0.0).to(tl.float32)
            start += tile
        start = stop
        sums = tl.sum(total, 0)
        if (of_key >= begin) & (past <= end):
            tl.store(out + key.to(tl.int64) * width + column, (sums * factor).to(out.dtype.element_ty))
        else:
            part = tl.where(of_key < begin, 0, runs) + tl.program_id(0)
            tl.store(partials + part.to(tl.int64) * width + column, sums)


@jit_of_any("runs")
def _sorted_sums_merge_kernel(starts, out, partials, factor, runs, width: tl.constexpr, run: tl.constexpr):
    """Stores the sums of keys that span several runs, and zeros for keys without places."""
    key, column = tl.program_id(0), tl.arange(0, width)
    of_key, past = tl.load(starts + key), tl.load(starts + key + 1)
    at, last = of_key // run, (past - 1) // run
    if (past == of_key) | (at < last):
        total = tl.zeros([width], tl.float32)
        if past > of_key:
            total += tl.load(partials + (runs + at).to(tl.int64) * width + column)
            part = at + 1
            while part <= last:
                total += tl.load(partials + part.to(tl.int64) * width + column)
                part += 1
        tl.store(out + key.to(tl.int64) * width + column, (total * factor).to(out.dtype.element_ty))
