"""The gradient of each distinct row: the sum over the places that name it, which are adjacent in sorted order.

A few rows are named by most places, so a run of equal rows cannot be left to one program. A program walks over a chunk
of consecutive sorted places, tile by tile, and adds up runs by a segmented scan. Runs inside one chunk are finished
there. A chunk's sums of runs that cross its borders go to `partials`, where a second kernel adds them up. No atomics:
equal inputs give equal bits. row_wise_adagrad.py adds up runs in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.embedding.sorted_adagrad import add_run

TILE_ELEMENTS = 4096
"""Elements of a tile of gradients, which a program of four warps holds in registers."""
_MOST_TILE = 32
_CHUNK = 128  # long chunks leave little to merge, short ones keep every multiprocessor busy
_PROGRAMS = 2048


def distinct_sums(gradients: Tensor, slots: Tensor, places: Tensor, sums: Tensor) -> None:
    """Computes sums[s] = sum of gradients[places[n]] over the n with slots[n] = s; unnamed sums stay unchanged.

    gradients: fp32, bf16 or fp16 [P, C], C a power of two. slots, places: int32 [N], equal slots adjacent, negative
    ones padding. sums: [S, C] in any of the three formats; added up in fp32. All contiguous.
    """
    columns = gradients.shape[1]
    assert sums.shape[1] == columns == next_power_of_2(columns), f"columns: a power of two, not {columns}"
    assert slots.dtype == places.dtype == torch.int32 and slots.shape == places.shape, "slots and places: int32 [N]"
    assert all(t.is_contiguous() for t in (gradients, slots, places, sums)), "contiguous tensors only"
    add = triton_distinct_sums if gradients.is_cuda else plain_distinct_sums
    add(gradients, slots, places, sums)


def plain_distinct_sums(gradients: Tensor, slots: Tensor, places: Tensor, sums: Tensor) -> None:
    """Computes `distinct_sums` in PyTorch."""
    named = slots >= 0
    distinct, run = slots[named].unique_consecutive(return_inverse=True)
    total = torch.zeros(len(distinct), gradients.shape[1], dtype=torch.float32, device=sums.device)
    total.index_add_(0, run, gradients[places[named].long()].float())
    sums[distinct.long()] = total.to(sums.dtype)


def triton_distinct_sums(gradients: Tensor, slots: Tensor, places: Tensor, sums: Tensor, chunk: int = 0) -> None:
    """Computes `distinct_sums` in two kernels."""
    count, columns = len(slots), gradients.shape[1]
    if count == 0:
        return
    tile, chunk = chunks_of(count, columns, chunk)
    chunks = cdiv(count, chunk)
    partials = empty_partials(chunks, gradients)
    sizes = (count, columns, chunk, tile)
    _distinct_sums_kernel[(chunks,)](gradients, slots, places, sums, partials, *sizes, num_warps=4)
    if chunks > 1:
        _distinct_sums_merge_kernel[(chunks - 1,)](slots, sums, partials, *sizes, num_warps=4)


def chunks_of(count: int, columns: int, chunk: int = 0) -> tuple[int, int]:
    """Returns the number of sorted places in a tile and in a chunk."""
    tile = min(_MOST_TILE, max(1, TILE_ELEMENTS // columns))
    return tile, chunk or max(tile, min(_CHUNK, next_power_of_2(cdiv(count, _PROGRAMS))))


def empty_partials(chunks: int, gradients: Tensor) -> Tensor:
    """Returns memory for sums of runs that cross borders: row 0 of a chunk for its share of the run that enters from
    the left, row 1 for its share of the first run that leaves."""
    return torch.empty(chunks, 2, gradients.shape[1], dtype=torch.float32, device=gradients.device)


@jit
def sum_tile(
    gradients,
    ids,
    places,
    partials,
    start,
    at,
    count,
    carry,
    is_on,
    columns: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
):
    """Returns, within a kernel, running sums of a tile of the chunk that begins at `start`, fp32 [tile, columns];
    whether each ends a run that lies entirely in the chunk; and the carry into the next tile. Sums of runs that cross a
    border go to `partials`."""
    run = tl.load(ids + at, at < count, other=-1)
    place = tl.load(places + at, at < count, other=0)
    previous = tl.load(ids + at - 1, (at > start) & (at <= count), other=-2)
    following = tl.load(ids + at + 1, at + 1 < count, other=-1)
    id_before = tl.load(ids + start - 1, start > 0, other=-1)
    valid = (run >= 0) & is_on
    ends, comes_in, opened = run != following, run == id_before, run != previous
    column = tl.arange(0, columns)[None, :]
    value = tl.load(gradients + place.to(tl.int64)[:, None] * columns + column, valid[:, None], other=0.0)
    value = value.to(tl.float32)
    first, last = tl.min(at, 0), tl.max(at, 0)
    value += tl.where(((at == first) & (opened == 0))[:, None], carry[None, :], 0.0)
    openings = tl.broadcast_to(opened.to(tl.int32)[:, None], [tile, columns])
    total, _ = tl.associative_scan((value, openings), 0, add_run)
    carry = tl.sum(tl.where((at == last)[:, None], total, 0.0), 0)
    goes_out = (at == start + chunk - 1) & (ends == 0)
    slot = 2 * tl.program_id(0).to(tl.int64) + tl.where(comes_in, 0, 1)
    crosses = valid & (goes_out | (ends & comes_in))
    tl.store(partials + slot[:, None] * columns + column, total, crosses[:, None])
    return run, total, valid & ends & (comes_in == 0), carry


@jit
def crossing_run(ids, partials, first, count, columns: tl.constexpr, chunk: tl.constexpr, width: tl.constexpr):
    """Returns, within a kernel, the run that opens in chunk `first` and continues in the next, -1 if there is none, and
    its sum, fp32 [columns]."""
    end = (first + 1) * chunk
    run = tl.load(ids + end - 1)
    id_before = tl.load(ids + first * chunk - 1, first > 0, other=-1)
    goes_on = (run >= 0) & (tl.load(ids + end) == run) & (run != id_before)
    found = tl.where(goes_on, run, -1)
    column = tl.arange(0, columns)
    total = tl.load(
        partials + (2 * first.to(tl.int64) + 1) * columns + column, column < columns * goes_on.to(tl.int32), other=0.0
    )
    next_chunk = first + 1
    while goes_on:
        chunks = next_chunk + tl.arange(0, width)
        inside = tl.load(ids + chunks * chunk, chunks < tl.cdiv(count, chunk), other=-1) == run
        at = 2 * chunks.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.sum(tl.load(partials + at, inside[:, None], other=0.0), 0)
        next_chunk += width
        goes_on = tl.sum(inside.to(tl.int32)) == width
    return found, total


@jit
def _distinct_sums_kernel(
    gradients,
    slots,
    places,
    sums,
    partials,
    count,
    columns: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    start = tl.program_id(0) * chunk
    column = tl.arange(0, columns)[None, :]
    carry = tl.zeros([columns], tl.float32)
    is_on = tl.full([tile], 1, tl.int1)
    for first in range(0, chunk, tile):
        at = start + first + tl.arange(0, tile)
        slot, total, finishes, carry = sum_tile(
            gradients, slots, places, partials, start, at, count, carry, is_on, columns, chunk, tile
        )
        target = sums + slot.to(tl.int64)[:, None] * columns + column
        tl.store(target, total.to(sums.dtype.element_ty), finishes[:, None])


@jit
def _distinct_sums_merge_kernel(
    slots, sums, partials, count, columns: tl.constexpr, chunk: tl.constexpr, tile: tl.constexpr
) -> None:
    slot, total = crossing_run(slots, partials, tl.program_id(0), count, columns, chunk, tile)
    column = tl.arange(0, columns)
    target = sums + slot.to(tl.int64) * columns + column
    tl.store(target, total.to(sums.dtype.element_ty), column < columns * (slot >= 0).to(tl.int32))
