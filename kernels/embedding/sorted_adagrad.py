"""Embedding backward and exact element-wise Adagrad in one pass, over ids that were sorted ahead of time.

The ids of a batch are known long before its gradients, so `sort_ids` runs a batch ahead, off the critical path.
`sorted_adagrad` then reads each gradient row once and each touched weight and state row once. It uses no float atomics:
equal inputs give equal bits. On Hopper GPUs a row's bits depend on its own gradients and their order alone, not on
where they are among all nor on how many there are, so that rows may be sorted in any order and be on any rank.

Sorted ids form runs of equal ids. One warp walks over a chunk of consecutive positions, tile by tile, and adds up runs
by a segmented scan. Runs inside one chunk are finished there. A chunk's sums of runs that cross its borders go to
`partials`, where a second kernel adds them up. On Hopper GPUs borders move to multiples of the chunk's size from the
start of the run that crosses them, or to its end.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._cuda import Kernel, available
from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.embedding.tiered_rows import check_host, host_offset, put_rows, rows_at
from dlrm_bench.kernels.non_finite import Watch, changed, is_stopped, watch_of

_WARPS = 2048  # enough to fill a large GPU
# Rows that a warp processes at a time, by columns: the fastest on an H200. More would exceed its registers.
_TILES = {16: 64, 32: 32, 64: 8, 128: 4}

# Positions of a chunk on Hopper GPUs, whatever their number: the sum of a row depends on it.
_CHUNK = 32

_SOURCE = Path(__file__).with_suffix(".cu")
_THREADS = 128
# Positions in flight per group of lanes: half of them, with more groups, if there are many ids.
_UNROLL, _MANY = 8, 1 << 20


class SortedAdagrad(NamedTuple):
    """Updates each distinct id's row in place: g = sum of its bags' gradients; state += g * g; weights -= lr * g /
    (sqrt(state) + eps)."""

    weights: Tensor
    """fp32 [R, C], C a power of two from 16 to 128. Columns are adjacent, rows have the same stride as in `state`: each
    row's state may follow its weights."""
    state: Tensor
    """fp32 [R, C], at the strides of `weights`."""
    grad: Tensor
    """bf16 or fp32, contiguous, any shape of bags * C elements: bag b's gradient is row b of its view [-1, C]."""
    sorted_ids: Tensor
    """int32, from `sort_ids`; each id below R (not checked). Negative ids are padding and change nothing."""
    sorted_bags: Tensor
    """int32, from `sort_ids`."""
    learning_rate: Tensor
    """fp32, one element, on the weights' device."""
    eps: float
    watch: Watch | None = None
    """See non_finite.py."""
    host: Tensor | None = None
    """fp32 [H, 2, C], weights and state of the rows from number R on, see tiered_rows.py; runs of equal ids may then be
    in any order."""

    def launch(self) -> None:
        """Checks the arguments and updates."""
        weights, state, grad, rate = self.weights, self.state, self.grad, self.learning_rate
        assert weights.shape == state.shape and weights.dtype == state.dtype == torch.float32, "weights and state: fp32"
        assert weights.stride() == state.stride() and weights.stride(1) == 1, "weights and state: equal row strides"
        assert grad.is_contiguous(), "gradient: contiguous"
        assert weights.shape[1] in (16, 32, 64, 128), f"16, 32, 64 or 128 columns, not {weights.shape[1]}"
        assert grad.dtype in (torch.bfloat16, torch.float32), f"gradient in bf16 or fp32, not {grad.dtype}"
        ids, bags = self.sorted_ids, self.sorted_bags
        assert ids.dtype == bags.dtype == torch.int32, "sorted ids and bags: int32"
        assert ids.numel() == bags.numel() and ids.is_contiguous() and bags.is_contiguous(), "a bag for each sorted id"
        assert rate.numel() == 1 and rate.device == weights.device, "learning rate: a device scalar"
        assert rate.dtype == torch.float32, f"learning rate: fp32, not {rate.dtype}"
        if self.host is not None:
            check_host(weights, self.host)
            assert state.data_ptr() - weights.data_ptr() == 4 * weights.shape[1], "state: after the weights of its row"
        if not weights.is_cuda:
            self.plain()
        elif available():
            self.cuda()
        else:
            self.triton()

    def plain(self) -> None:
        """Updates in PyTorch."""
        weights, state = self.weights, self.state
        if self.watch is not None and self.watch.stopped.any():
            return
        valid = self.sorted_ids >= 0
        ids, run = torch.unique_consecutive(self.sorted_ids[valid], return_inverse=True)
        rows = self.grad.view(-1, weights.shape[1])[self.sorted_bags[valid]].to(weights.dtype)
        g = weights.new_zeros(len(ids), weights.shape[1]).index_add_(0, run, rows)
        host_weights, host_state = (None, None) if self.host is None else self.host.unbind(1)
        rows_state, rows_weights = rows_at(state, host_state, ids), rows_at(weights, host_weights, ids)
        new_state = rows_state + g * g
        new_weights = rows_weights - self.learning_rate * g / (new_state.sqrt() + self.eps)
        changed(self.watch, rows_state, rows_weights, new_state, new_weights)
        put_rows(state, host_state, ids, rows_state)
        put_rows(weights, host_weights, ids, rows_weights)

    def triton(self, tile: int = 0, chunk: int = 0) -> None:
        """Updates in two kernels."""
        count, columns = self.sorted_ids.numel(), self.weights.shape[1]
        if count == 0:
            return
        tile = tile or _TILES[columns]
        chunk = chunk or max(tile, _chunk(count))
        tensors, sizes = self._of_triton(chunk)
        grid = (cdiv(count, chunk),)
        _sorted_adagrad_kernel[grid](*tensors, self.grad, self.sorted_bags, *sizes, tile, num_warps=1)
        self._merge(tensors, sizes, moved=False)

    def cuda(self, chunk: int = 0, unroll: int = 0) -> None:
        """Updates in a kernel for Hopper GPUs with more rows in flight, and in the second kernel of `triton`."""
        weights, count, columns = self.weights, self.sorted_ids.numel(), self.weights.shape[1]
        if count == 0:
            return
        aligned = all(t.data_ptr() % 16 == 0 for t in (weights, self.state, self.grad))
        assert aligned and weights.stride(0) % 4 == 0, "16-byte aligned"
        chunk, unroll = chunk or _CHUNK, unroll or (_UNROLL if count < _MANY else _UNROLL // 2)
        tensors, sizes = self._of_triton(chunk)
        _, _, partials, _, _, *watched = tensors
        ordered = (weights, self.state, partials, self.sorted_ids, self.sorted_bags, self.grad, self.learning_rate)
        pointers = [None if t is None else t.data_ptr() for t in (*ordered, *watched)]
        in_host = host_offset(weights, self.host)
        sizes_and_rows = (watch_of(self.watch)[2], self.eps, count, weights.stride(0), len(weights), in_host)
        arguments = _Arguments(*pointers, *sizes_and_rows)
        kernel = _kernel(columns, self.grad.dtype == torch.bfloat16, chunk, unroll, in_host != 0, weights.device)
        kernel.launch(cdiv(len(partials), _THREADS // (columns // 4)), arguments)
        self._merge(tensors, sizes, moved=True)

    def _of_triton(self, chunk: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the tensors and sizes for both Triton kernels."""
        count, columns = self.sorted_ids.numel(), self.weights.shape[1]
        stopped, bad, flags = watch_of(self.watch)
        partials = _partials(cdiv(count, chunk), self.weights)
        tensors = (self.weights, self.state, partials, self.sorted_ids, self.learning_rate, stopped, bad)
        in_host = host_offset(self.weights, self.host)
        rows = (len(self.weights), in_host, in_host != 0)
        return tensors, (self.eps, count, *rows, flags, self.weights.stride(0), columns, chunk)

    def _merge(self, tensors: tuple[Any, ...], sizes: tuple[Any, ...], moved: bool) -> None:
        chunks = len(tensors[2])
        if chunks > 1:
            width = 4096 // self.weights.shape[1]
            _sorted_adagrad_merge_kernel[(chunks - 1,)](*tensors, *sizes, width, moved, num_warps=2)


sorted_adagrad = function(SortedAdagrad, SortedAdagrad.launch)
plain_sorted_adagrad = function(SortedAdagrad, SortedAdagrad.plain)
triton_sorted_adagrad = function(SortedAdagrad, SortedAdagrad.triton)
cuda_sorted_adagrad = function(SortedAdagrad, SortedAdagrad.cuda)


def _chunk(count: int) -> int:
    """Returns the number of positions per warp: long chunks need little merging, short ones keep every multiprocessor
    busy."""
    return min(128, next_power_of_2(cdiv(count, _WARPS)))


def _partials(chunks: int, weights: Tensor) -> Tensor:
    """Returns memory for partial sums. Row 0 of a chunk: of the run that enters from the left; row 1: of the first run
    that leaves."""
    return torch.empty(chunks, 2, weights.shape[1], dtype=torch.float32, device=weights.device)


class _Arguments(ctypes.Structure):
    """sorted_adagrad.cu's struct Arguments."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "state", "partials", "ids", "bags", "grad", "learning_rate")),
        ("stopped", ctypes.c_void_p),
        ("bad", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("count", ctypes.c_int),
        ("stride", ctypes.c_int),
        ("device_rows", ctypes.c_int),
        ("in_host", ctypes.c_int64),
    )


@functools.cache
def _kernel(columns: int, bf16: bool, chunk: int, unroll: int, tiered: bool, device: torch.device) -> Kernel:
    defines = {"COLUMNS": columns, "BF16": int(bf16), "CHUNK": chunk, "UNROLL": unroll, "TIERED": int(tiered)}
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "sorted_adagrad", defines, _THREADS, 0)


@jit
def add_run(sum_a, opened_a, sum_b, opened_b):
    """Segmented addition: b restarts where a run opened in it."""
    return tl.where(opened_b != 0, sum_b, sum_a + sum_b), opened_a | opened_b


@jit
def _sorted_adagrad_kernel(
    weights,
    state,
    partials,
    ids,
    learning_rate,
    stopped,
    bad,
    grad,
    bags,
    eps,
    count,
    device_rows,
    in_host,
    tiered: tl.constexpr,
    flags: tl.constexpr,
    stride: tl.constexpr,
    columns: tl.constexpr,
    chunk: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    start = tl.program_id(0) * chunk
    id_before = tl.load(ids + start - 1, start > 0, other=-1)
    rate = tl.load(learning_rate)
    column = tl.arange(0, columns)[None, :]
    carry = tl.zeros([columns], tl.float32)
    goes_on = tl.full([tile], 1, tl.int1)
    if flags:
        goes_on = goes_on & (is_stopped(stopped, flags) == 0)
    for first in range(0, chunk, tile):
        at = start + first + tl.arange(0, tile)
        row_id = tl.load(ids + at, at < count, other=-1)
        bag = tl.load(bags + at, at < count, other=0)
        previous = tl.load(ids + at - 1, (at > start) & (at <= count), other=-2)
        following = tl.load(ids + at + 1, at + 1 < count, other=-1)
        valid = (row_id >= 0) & goes_on
        ends = row_id != following
        comes_in = row_id == id_before
        finishes = valid & ends & (comes_in == 0)

        # Four columns a thread, as for fp32: the gradient's layout is then that of weights and state.
        at_grad = bag.to(tl.int64)[:, None] * columns + tl.max_contiguous(column, [1, 4])
        rows = tl.load(grad + at_grad, valid[:, None], other=0.0).to(tl.float32)
        offset = row_id.to(tl.int64)[:, None] * stride + column
        if tiered:
            offset += tl.where(row_id >= device_rows, in_host, 0)[:, None]
        w = tl.load(weights + offset, finishes[:, None], other=0.0)
        s = tl.load(state + offset, finishes[:, None], other=0.0)

        opened = row_id != previous
        rows += tl.where(((at == start + first) & (opened == 0))[:, None], carry[None, :], 0.0)
        openings = tl.broadcast_to(opened.to(tl.int32)[:, None], [tile, columns])
        g, _ = tl.associative_scan((rows, openings), 0, add_run)
        carry = tl.sum(tl.where((at == start + first + tile - 1)[:, None], g, 0.0), 0)

        s += g * g
        w -= rate * g / (tl.sqrt(s) + eps)
        writes = tl.broadcast_to(finishes[:, None], [tile, columns])
        if flags:
            whole = s < float("inf")  # false for NaN too; s is never negative
            tl.store(bad + offset * 0, offset * 0 + 1, writes & (whole == 0))
            writes = writes & whole
        tl.store(state + offset, s, writes)
        tl.store(weights + offset, w, writes)

        goes_out = (at == start + chunk - 1) & (ends == 0)
        slot = 2 * tl.program_id(0).to(tl.int64) + tl.where(comes_in, 0, 1)
        crosses = valid & (goes_out | (ends & comes_in))
        tl.store(partials + slot[:, None] * columns + column, g, crosses[:, None])


@jit
def _halved(sums, half: tl.constexpr, columns: tl.constexpr):
    left, right = tl.split(tl.permute(tl.reshape(sums, [2, half, columns]), [1, 2, 0]))
    return left + right


@jit
def _sorted_adagrad_merge_kernel(
    weights,
    state,
    partials,
    ids,
    learning_rate,
    stopped,
    bad,
    eps,
    count,
    device_rows,
    in_host,
    tiered: tl.constexpr,
    flags: tl.constexpr,
    stride: tl.constexpr,
    columns: tl.constexpr,
    chunk: tl.constexpr,
    width: tl.constexpr,
    moved: tl.constexpr,
) -> None:
    first = tl.program_id(0)  # the chunk in which the run opens
    start = first * chunk
    end = (first + 1) * chunk
    run_id = tl.load(ids + end - 1)
    id_before = tl.load(ids + start - 1, first > 0, other=-1)
    goes_on = (run_id >= 0) & (tl.load(ids + end) == run_id) & (run_id != id_before)
    if flags:
        goes_on = goes_on & (is_stopped(stopped, flags) == 0)
    if moved:  # chunks have the run's ids from multiples of their size on, counted from its start
        of_run = tl.load(ids + start + tl.arange(0, chunk), goes_on, other=-2) == run_id
        start = end - tl.sum(of_run.to(tl.int32))
        goes_on = goes_on & (tl.load(ids + start + chunk, goes_on & (start + chunk < count), other=-1) == run_id)
    if goes_on:
        column = tl.arange(0, columns)
        sums = tl.zeros([8, columns], tl.float32)
        next_chunk = first + 1
        while goes_on:
            begins = start + (next_chunk - first + tl.arange(0, width)) * chunk
            inside = tl.sum((tl.load(ids + begins, begins < count, other=-1) == run_id).to(tl.int32))
            for piece in tl.static_range(width // 8):
                of_width = 8 * piece + tl.arange(0, 8)
                at = 2 * (next_chunk + of_width).to(tl.int64)[:, None] * columns + column[None, :]
                sums += tl.load(partials + at, (of_width < inside)[:, None], other=0.0)
            next_chunk += width
            goes_on = inside == width
        # In this order for any number of columns; that of tl.sum depends on it.
        sums = _halved(_halved(_halved(sums, 4, columns), 2, columns), 1, columns)
        g = tl.load(partials + (2 * first.to(tl.int64) + 1) * columns + column) + tl.reshape(sums, [columns])
        offset = run_id.to(tl.int64) * stride + column
        if tiered:
            offset += tl.where(run_id >= device_rows, in_host, 0)
        s = tl.load(state + offset) + g * g
        w = tl.load(weights + offset) - tl.load(learning_rate) * g / (tl.sqrt(s) + eps)
        writes = column < columns
        if flags:
            whole = s < float("inf")
            tl.store(bad + offset * 0, offset * 0 + 1, whole == 0)
            writes = whole
        tl.store(state + offset, s, writes)
        tl.store(weights + offset, w, writes)
