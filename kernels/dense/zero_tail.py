"""Zeroes the rows past the last token, where the host knows the capacity and only the device the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, jit_of_any, next_power_of_2, tl

_ROWS, _COLUMNS = 16, 512
_PROGRAMS = 264
_MOST = 3  # matrices of one launch


def zero_tail(outs: Sequence[Tensor], end: Tensor) -> None:
    """Stores zeros in the rows of `outs`, one to three matrices, from `end` on.

    outs: bf16, fp16 or fp32 [N, C], of one dtype and N, any C and any row stride. end: int32 or int64 [1], on the
    device.
    """
    assert 1 <= len(outs) <= _MOST and len({(len(out), out.dtype) for out in outs}) == 1, "matrices of one N and dtype"
    assert all(out.dim() == 2 and out.stride(1) == 1 for out in outs), "outs: [N, C], contiguous columns"
    (triton_zero_tail if outs[0].is_cuda else plain_zero_tail)(outs, end)


def plain_zero_tail(outs: Sequence[Tensor], end: Tensor) -> None:
    """Computes `zero_tail` in PyTorch."""
    for out in outs:
        out.masked_fill_((torch.arange(len(out), device=out.device) >= end)[:, None], 0)


def triton_zero_tail(outs: Sequence[Tensor], end: Tensor) -> None:
    """Computes `zero_tail` in one kernel."""
    rows, columns = len(outs[0]), max(out.shape[1] for out in outs)
    block = min(next_power_of_2(columns), _COLUMNS)
    grid = max(1, min(_PROGRAMS, cdiv(rows, _ROWS))), cdiv(columns, block), len(outs)
    given = [*outs, *(outs[0] for _ in range(_MOST - len(outs)))]
    sizes = (size for out in given for size in (out.stride(0), out.shape[1]))
    _zero_tail_kernel[grid](*given, end, *sizes, rows, _ROWS, block)


@jit
def _zero(out, end, row, columns, rows, tile: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(1) * block + tl.arange(0, block)
    first = tl.load(end) + tl.program_id(0) * tile
    while first < rows:
        at = first + tl.arange(0, tile).to(tl.int64)
        mask = (at < rows)[:, None] & (column < columns)[None, :]
        tl.store(out + at[:, None] * row + column[None, :], tl.zeros([tile, block], out.dtype.element_ty), mask)
        first += tl.num_programs(0) * tile


@jit_of_any("rows")
def _zero_tail_kernel(
    first, second, third, end, first_row, first_columns, second_row, second_columns, third_row, third_columns, rows,
    tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        _zero(first, end, first_row, first_columns, rows, tile, block)
    elif tl.program_id(2) == 1:
        _zero(second, end, second_row, second_columns, rows, tile, block)
    else:
        _zero(third, end, third_row, third_columns, rows, tile, block)
