"""Embedding backward and exact row-wise Adagrad in one pass, over rows that were sorted ahead of time.

Adds up runs of equal rows like distinct_sums.py, and updates each row when its sum is known. It reads each gradient and
each touched row once, and uses no atomics: equal inputs give equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.embedding.distinct_sums import chunks_of, crossing_run, empty_partials, sum_tile
from dlrm_bench.kernels.non_finite import Watch, is_stopped, watch_of


class RowWiseAdagrad(NamedTuple):
    """Updates each distinct row in place: g = scale * sum of its places' gradients; state += mean of g * g over the
    columns; weights -= learning_rate * g / (sqrt(state) + eps). FBGEMM's EXACT_ROWWISE_ADAGRAD without weight decay."""

    weights: Tensor
    """fp32 [R, C], C a power of two; contiguous, like all of these tensors."""
    state: Tensor
    """fp32 [R, 1]."""
    gradients: Tensor
    """fp32, bf16 or fp16 [P, C]."""
    rows: Tensor
    """int32 [N], ascending, each below R (not checked). Negative rows are padding and change nothing."""
    places: Tensor
    """int32 [N]: index of each row's gradient."""
    learning_rate: Tensor
    """fp32, one element, on the weights' device."""
    eps: float
    scale: float = 1.0
    watch: Watch | None = None
    """See non_finite.py. If a row's new state would not be finite, neither its weights nor its state change."""

    def launch(self) -> None:
        """Checks the arguments and updates."""
        weights, state, rate, columns = self.weights, self.state, self.learning_rate, self.weights.shape[1]
        assert weights.dtype == state.dtype == rate.dtype == torch.float32, "weights, state and rate: fp32"
        assert state.shape == (len(weights), 1), "state: [R, 1]"
        assert self.gradients.shape[1] == columns == next_power_of_2(columns), f"columns: a power of two, not {columns}"
        assert self.rows.dtype == self.places.dtype == torch.int32 and self.rows.shape == self.places.shape, "int32 [N]"
        matrices = (weights, state, self.gradients, self.rows, self.places)
        assert all(tensor.is_contiguous() for tensor in matrices), "contiguous tensors only"
        assert rate.numel() == 1 and rate.device == weights.device, "learning rate: a device scalar"
        if weights.is_cuda:
            self.triton()
        else:
            self.plain()

    def plain(self) -> None:
        """Updates in PyTorch."""
        weights, state = self.weights, self.state
        if self.watch is not None and self.watch.stopped.any():
            return
        named = self.rows >= 0
        distinct, run = self.rows[named].unique_consecutive(return_inverse=True)
        distinct = distinct.long()
        of_places = self.gradients[self.places[named].long()].to(weights.dtype)
        g = self.scale * weights.new_zeros(len(distinct), weights.shape[1]).index_add_(0, run, of_places)
        new_state = state[distinct] + (g * g).mean(1, keepdim=True)
        new_weights = weights[distinct] - self.learning_rate * g / (new_state.sqrt() + self.eps)
        if self.watch is not None:
            whole = new_state.isfinite()
            self.watch.bad.masked_fill_(~whole.all(), 1)
            new_state = torch.where(whole, new_state, state[distinct])
            new_weights = torch.where(whole, new_weights, weights[distinct])
        state[distinct], weights[distinct] = new_state, new_weights

    def triton(self, chunk: int = 0) -> None:
        """Updates in two kernels."""
        count, columns = len(self.rows), self.weights.shape[1]
        if count == 0:
            return
        tile, chunk = chunks_of(count, columns, chunk)
        chunks = cdiv(count, chunk)
        partials = empty_partials(chunks, self.gradients)
        stopped, bad, flags = watch_of(self.watch)
        tensors = (self.weights, self.state, partials, self.rows, self.learning_rate, stopped, bad)
        sizes = (self.eps, self.scale, count, flags, columns, chunk, tile)
        _row_wise_adagrad_kernel[(chunks,)](*tensors, self.gradients, self.places, *sizes, num_warps=4)
        if chunks > 1:
            _row_wise_adagrad_merge_kernel[(chunks - 1,)](*tensors, *sizes, num_warps=4)


row_wise_adagrad = function(RowWiseAdagrad, RowWiseAdagrad.launch)
plain_row_wise_adagrad = function(RowWiseAdagrad, RowWiseAdagrad.plain)
triton_row_wise_adagrad = function(RowWiseAdagrad, RowWiseAdagrad.triton)


@jit
def _update_rows(
    weights, state, bad, row, total, mask, rate, eps, scale, flags: tl.constexpr, columns: tl.constexpr
) -> None:
    """Updates rows [tile] by sums [tile, columns] of their gradients, where mask."""
    at = row.to(tl.int64)
    g = total * scale
    s = tl.load(state + at, mask, other=0.0) + tl.sum(g * g, 1) / columns
    offset = at[:, None] * columns + tl.arange(0, columns)[None, :]
    w = tl.load(weights + offset, mask[:, None], other=0.0)
    w -= rate * g / (tl.sqrt(s) + eps)[:, None]
    if flags:
        whole = s < float("inf")  # false for NaN too; s is never negative
        tl.store(bad + at * 0, at * 0 + 1, mask & (whole == 0))
        mask = mask & whole
    tl.store(state + at, s, mask)
    tl.store(weights + offset, w, mask[:, None])


@jit
def _row_wise_adagrad_kernel(
    weights,
    state,
    partials,
    rows,
    learning_rate,
    stopped,
    bad,
    gradients,
    places,
    eps,
    scale,
    count,
    flags: tl.constexpr,
    columns: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    start = tl.program_id(0) * chunk
    rate = tl.load(learning_rate)
    carry = tl.zeros([columns], tl.float32)
    is_on = tl.full([tile], 1, tl.int1)
    if flags:
        is_on = is_on & (is_stopped(stopped, flags) == 0)
    for first in range(0, chunk, tile):
        at = start + first + tl.arange(0, tile)
        row, total, finishes, carry = sum_tile(
            gradients, rows, places, partials, start, at, count, carry, is_on, columns, chunk, tile
        )
        _update_rows(weights, state, bad, row, total, finishes, rate, eps, scale, flags, columns)


@jit
def _row_wise_adagrad_merge_kernel(
    weights,
    state,
    partials,
    rows,
    learning_rate,
    stopped,
    bad,
    eps,
    scale,
    count,
    flags: tl.constexpr,
    columns: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row, total = crossing_run(rows, partials, tl.program_id(0), count, columns, chunk, tile)
    one = tl.zeros([1], tl.int32)
    is_on = row + one >= 0
    if flags:
        is_on = is_on & (is_stopped(stopped, flags) == 0)
    _update_rows(
        weights, state, bad, row + one, total[None, :], is_on, tl.load(learning_rate), eps, scale, flags, columns
    )
