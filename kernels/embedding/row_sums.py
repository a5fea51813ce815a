"""The dense gradient of a small table: for each row, the sum of the gradients of the bags that named it."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import jit, tl
from dlrm_bench.kernels.dense.column_sums import column_sums

_TILE = 32  # bags that a program adds at a time
_PARTS = 8  # programs per row: skewed ids make some rows long


def row_starts(sorted_ids: Tensor, num_rows: int) -> Tensor:
    """Returns the offset of each row's ids among sorted ids: int32 [num_rows + 1], the last is their number. Negative
    ids, which are padding, precede the first row."""
    rows = torch.arange(num_rows + 1, dtype=sorted_ids.dtype, device=sorted_ids.device)
    return torch.searchsorted(sorted_ids, rows, out_int32=True)


def row_sums(grad: Tensor, sorted_bags: Tensor, starts: Tensor, out: Tensor) -> None:
    """Computes out[r] = sum of grad[b] over the bags b of row r, in one order, so that equal inputs give equal bits.

    grad: bf16 or fp32 [bags, C], contiguous, C a power of two. sorted_bags: int32 [N], the bags of ids in id order.
    starts: int32 [R + 1] from `row_starts`. out: fp32 [R, C], overwritten. Eight programs add a row's bags, tile by
    tile: for tables whose rows are each named by at most a few thousand ids.
    """
    columns = grad.shape[1]
    assert out.shape == (len(starts) - 1, columns), "out: [R, C]"
    assert out.dtype == torch.float32, "out: fp32"
    assert grad.is_contiguous() and out.is_contiguous(), "contiguous tensors only"
    assert sorted_bags.dtype == starts.dtype == torch.int32, "bags and starts: int32"
    assert columns & (columns - 1) == 0, "columns: a power of two"
    sums = triton_row_sums if grad.is_cuda else plain_row_sums
    sums(grad, sorted_bags, starts, out)


def plain_row_sums(grad: Tensor, sorted_bags: Tensor, starts: Tensor, out: Tensor) -> None:
    """Computes `row_sums` in PyTorch."""
    row = torch.arange(len(out), device=out.device).repeat_interleave(starts.diff().long())
    named = sorted_bags[len(sorted_bags) - len(row) :]  # after the padding
    out.zero_().index_add_(0, row, grad[named.long()].float())


def triton_row_sums(grad: Tensor, sorted_bags: Tensor, starts: Tensor, out: Tensor) -> None:
    """Computes `row_sums` in two kernels: sums of every eighth tile of a row, then their sum."""
    rows, columns = out.shape
    partials = torch.empty(_PARTS, rows * columns, dtype=torch.float32, device=out.device)
    _row_sums_kernel[(rows, _PARTS)](grad, sorted_bags, starts, partials, columns, _TILE, _PARTS)
    column_sums(partials, out.view(-1))


@jit
def _row_sums_kernel(grad, bags, starts, partials, columns: tl.constexpr, tile: tl.constexpr, parts: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + row) + part * tile
    end = tl.load(starts + row + 1)
    column = tl.arange(0, columns)
    total = tl.zeros([tile, columns], tl.float32)
    while first < end:  # not a range, because Triton's interpreter cannot convert a loaded value to int
        at = first + tl.arange(0, tile)
        bag = tl.load(bags + at, at < end, other=0).to(tl.int64)
        total += tl.load(grad + bag[:, None] * columns + column[None, :], (at < end)[:, None], other=0.0).to(tl.float32)
        first += tile * parts
    row_of_all = part * tl.num_programs(0) + row
    tl.store(partials + row_of_all.to(tl.int64) * columns + column, tl.sum(total, 0))
