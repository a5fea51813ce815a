"""Embedding backward and exact element-wise Adagrad in one pass, over ids that were sorted ahead of time.

The ids of a batch are known long before its gradients, so `sort_ids` runs with the input dist, off the critical path.
`adagrad_update` then reads each gradient row once and each touched weight and state row once. It uses no float
atomics: equal inputs give equal bits.

Sorted ids form runs of equal ids. A tile of consecutive positions sums its runs with one matrix product: the matrix
that says which ids are equal, times the tile's gradient rows. Runs that lie inside one tile are finished there. What
a tile holds of a run that crosses its borders goes to `partials`, where a second kernel adds it up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import INTERPRETED, cdiv, jit, tl

# bf16 products with 0 and 1 are exact, and tensor cores add in fp32. The interpreter cannot multiply bf16 matrices.
_FACTOR = tl and (tl.float32 if INTERPRETED else tl.bfloat16)


def sort_ids(linear_ids: Tensor, bags: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Sort ids, stably, and bring the bag of each along.

    linear_ids: int32 [N], the row of the concatenated tables that each id means, in [0, num_rows), or negative for
    padding. bags: int32 [N], the bag of each id: sample * tables + table. Returns both in id order, int32 [N] each.
    """
    assert linear_ids.dtype == bags.dtype == torch.int32 and linear_ids.shape == bags.shape, "ids and bags: int32 [N]"
    keys = linear_ids.to(torch.int16) if num_rows <= 1 << 15 else linear_ids  # a radix sort's time goes with the bits
    sorted_keys, order = torch.sort(keys, stable=True)
    return sorted_keys.to(torch.int32), bags[order]


def adagrad_update(
    weights: Tensor,
    state: Tensor,
    grad: Tensor,
    sorted_ids: Tensor,
    sorted_bags: Tensor,
    learning_rate: Tensor,
    eps: float,
) -> None:
    """In place, per distinct id: g = sum of its bags' gradients; state += g*g; weights -= lr * g / (sqrt(state) + eps).

    weights, state: fp32 [R, C], contiguous, C a power of two from 16 to 128. grad: bf16 or fp32, contiguous, any shape
    of bags * C elements: bag b's gradient is row b of its view [-1, C]. sorted_ids, sorted_bags: from `sort_ids`; each
    id below R, which is not checked; negative ids are padding and change nothing. learning_rate: fp32, one element, on
    the weights' device.
    """
    columns = weights.shape[1]
    assert weights.shape == state.shape and weights.dtype == state.dtype == torch.float32, "weights and state: fp32"
    assert weights.is_contiguous() and state.is_contiguous() and grad.is_contiguous(), "contiguous tensors only"
    assert columns in (16, 32, 64, 128), f"16, 32, 64 or 128 columns, not {columns}"
    assert grad.dtype in (torch.bfloat16, torch.float32), f"gradient in bf16 or fp32, not {grad.dtype}"
    assert sorted_ids.dtype == sorted_bags.dtype == torch.int32, "sorted ids and bags: int32"
    assert learning_rate.numel() == 1 and learning_rate.device == weights.device, "learning rate: a device scalar"
    update = triton_adagrad_update if weights.is_cuda else plain_adagrad_update
    update(weights, state, grad, sorted_ids, sorted_bags, learning_rate, eps)


def plain_adagrad_update(
    weights: Tensor,
    state: Tensor,
    grad: Tensor,
    sorted_ids: Tensor,
    sorted_bags: Tensor,
    learning_rate: Tensor,
    eps: float,
) -> None:
    """What `adagrad_update` does, in PyTorch."""
    valid = sorted_ids >= 0
    ids, run = torch.unique_consecutive(sorted_ids[valid], return_inverse=True)
    rows = grad.view(-1, weights.shape[1])[sorted_bags[valid]].to(weights.dtype)
    g = weights.new_zeros(len(ids), weights.shape[1]).index_add_(0, run, rows)
    state[ids] += g * g
    weights[ids] -= learning_rate * g / (state[ids].sqrt() + eps)


def triton_adagrad_update(
    weights: Tensor,
    state: Tensor,
    grad: Tensor,
    sorted_ids: Tensor,
    sorted_bags: Tensor,
    learning_rate: Tensor,
    eps: float,
    tile: int = 0,
    warps: int = 0,
) -> None:
    """What `adagrad_update` does, in two kernels."""
    count, columns = sorted_ids.numel(), weights.shape[1]
    tile = tile or (32 if columns == 128 else 64)
    warps = warps or 4
    tiles = cdiv(count, tile)
    if tiles == 0:
        return
    # Row 0 of a tile: its share of the run that comes in from the left. Row 1: of the run that first goes out.
    partials = torch.empty(tiles, 2, columns, dtype=torch.float32, device=weights.device)
    tensors = (weights, state, partials, sorted_ids, learning_rate)
    terms = 1 if grad.dtype == torch.bfloat16 else 3
    _update_tiles[(tiles,)](*tensors, grad, sorted_bags, eps, count, columns, tile, terms, _FACTOR, num_warps=warps)
    if tiles > 1:
        _merge_runs[(tiles - 1,)](*tensors, eps, count, columns, tile, 8192 // columns, num_warps=8)


@jit
def _step(weights, state, offset, g, mask, learning_rate, eps) -> None:
    """Adagrad on the elements at `offset`."""
    w = tl.load(weights + offset, mask)
    s = tl.load(state + offset, mask)
    s += g * g
    w -= tl.div_rn(tl.load(learning_rate) * g, tl.sqrt_rn(s) + eps)
    tl.store(state + offset, s, mask)
    tl.store(weights + offset, w, mask)


@jit
def _update_tiles(
    weights,
    state,
    partials,
    ids,
    learning_rate,
    grad,
    bags,
    eps,
    count,
    columns: tl.constexpr,
    tile: tl.constexpr,
    terms: tl.constexpr,
    factor: tl.constexpr,
) -> None:
    start = tl.program_id(0) * tile
    at = start + tl.arange(0, tile)
    row_id = tl.load(ids + at, at < count, other=-1)
    bag = tl.load(bags + at, at < count, other=0)
    next_id = tl.load(ids + at + 1, at + 1 < count, other=-1)
    id_before = tl.load(ids + start - 1, start > 0, other=-1)
    id_after = tl.load(ids + start + tile, start + tile < count, other=-1)

    valid = row_id >= 0
    crosses = (row_id == id_before) | (row_id == id_after)
    finishes = valid & (row_id != next_id) & (crosses == 0)
    column = tl.arange(0, columns)[None, :]
    rows = tl.load(grad + bag.to(tl.int64)[:, None] * columns + column, valid[:, None], other=0.0)
    offset = row_id.to(tl.int64)[:, None] * columns + column
    w = tl.load(weights + offset, finishes[:, None], other=0.0)
    s = tl.load(state + offset, finishes[:, None], other=0.0)

    # Each row gets the sum of its whole run in this tile. An fp32 row is the exact sum of three bf16 terms.
    same = (row_id[:, None] == row_id[None, :]).to(factor)
    rest = rows.to(tl.float32)
    g = tl.zeros([tile, columns], tl.float32)
    for _ in tl.static_range(terms):
        term = rest.to(tl.bfloat16)
        g = tl.dot(same, term.to(factor), g)
        rest -= term.to(tl.float32)

    s += g * g
    w -= tl.div_rn(tl.load(learning_rate) * g, tl.sqrt_rn(s) + eps)
    tl.store(state + offset, s, finishes[:, None])
    tl.store(weights + offset, w, finishes[:, None])

    comes_in = (at == start) & (row_id == id_before)
    goes_out = (at == start + tile - 1) & (row_id == id_after) & (row_id != id_before)
    slot = 2 * tl.program_id(0).to(tl.int64) + goes_out.to(tl.int64)
    tl.store(partials + slot[:, None] * columns + column, g, (valid & (comes_in | goes_out))[:, None])


@jit
def _merge_runs(
    weights,
    state,
    partials,
    ids,
    learning_rate,
    eps,
    count,
    columns: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
) -> None:
    first = tl.program_id(0)  # the tile in which the run opens
    end = (first + 1) * tile
    run_id = tl.load(ids + end - 1)
    id_before = tl.load(ids + first * tile - 1, first > 0, other=-1)
    goes_on = (run_id >= 0) & (tl.load(ids + end) == run_id) & (run_id != id_before)
    if goes_on:
        column = tl.arange(0, columns)
        g = tl.load(partials + (2 * first.to(tl.int64) + 1) * columns + column)
        next_tile = first + 1
        while goes_on:
            tiles = next_tile + tl.arange(0, width)
            inside = tl.load(ids + tiles * tile, tiles < tl.cdiv(count, tile), other=-1) == run_id
            at = 2 * tiles.to(tl.int64)[:, None] * columns + column[None, :]
            g += tl.sum(tl.load(partials + at, inside[:, None], other=0.0), 0)
            next_tile += width
            goes_on = tl.sum(inside.to(tl.int32)) == width
        _step(weights, state, run_id.to(tl.int64) * columns + column, g, column < columns, learning_rate, eps)
