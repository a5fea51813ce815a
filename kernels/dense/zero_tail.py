"""Zeroes the rows past the last token, where the host knows the capacity and only the device the number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit_of_any, next_power_of_2, tl

_ROWS, _COLUMNS = 16, 512
_PROGRAMS = 264


def zero_tail(out: Tensor, end: Tensor) -> None:
    """Stores zeros in the rows of `out` from `end` on.

    out: bf16, fp16 or fp32 [N, C], any row stride. end: int32 or int64 [1], on the device.
    """
    assert out.dim() == 2 and out.stride(1) == 1, "out: [N, C], contiguous columns"
    (triton_zero_tail if out.is_cuda else plain_zero_tail)(out, end)


def plain_zero_tail(out: Tensor, end: Tensor) -> None:
    """Computes `zero_tail` in PyTorch."""
    out.masked_fill_((torch.arange(len(out), device=out.device) >= end)[:, None], 0)


def triton_zero_tail(out: Tensor, end: Tensor) -> None:
    """Computes `zero_tail` in one kernel."""
    rows, columns = out.shape
    block = min(next_power_of_2(columns), _COLUMNS)
    grid = max(1, min(_PROGRAMS, cdiv(rows, _ROWS))), cdiv(columns, block)
    _zero_tail_kernel[grid](out, end, out.stride(0), rows, columns, _ROWS, block)


@jit_of_any("rows")
def _zero_tail_kernel(out, end, row, rows, columns, tile: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(1) * block + tl.arange(0, block)
    first = tl.load(end) + tl.program_id(0) * tile
    while first < rows:
        at = first + tl.arange(0, tile).to(tl.int64)
        mask = (at < rows)[:, None] & (column < columns)[None, :]
        tl.store(out + at[:, None] * row + column[None, :], tl.zeros([tile, block], out.dtype.element_ty), mask)
        first += tl.num_programs(0) * tile
