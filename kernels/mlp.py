"""The backward of bias and ReLU behind a linear layer's GEMM; the forward is in the epilogue of cuBLAS's."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import cdiv, jit, tl
from kernels.column_sums import column_sums

_ROWS, _COLUMNS = 16, 128  # of one program's block


def bias_relu_backward(g: Tensor, out: Tensor, dz: Tensor, dbias: Tensor) -> None:
    """dz = g * (out > 0); dbias = column sums of dz, before it is rounded.

    g, out, dz: bf16 or fp32 [batch, width], contiguous; dz may be g. dbias: bf16 or fp32 [width],
    overwritten.
    """
    assert g.shape == out.shape == dz.shape and dbias.shape == g.shape[1:], "g, out, dz: [batch, width]"
    assert g.is_contiguous() and out.is_contiguous() and dz.is_contiguous(), "contiguous tensors only"
    backward = triton_bias_relu_backward if g.is_cuda else plain_bias_relu_backward
    backward(g, out, dz, dbias)


def plain_bias_relu_backward(g: Tensor, out: Tensor, dz: Tensor, dbias: Tensor) -> None:
    """What `bias_relu_backward` does, in PyTorch."""
    masked = g.float() * (out > 0)
    dbias.copy_(masked.sum(0))
    dz.copy_(masked)


def triton_bias_relu_backward(g: Tensor, out: Tensor, dz: Tensor, dbias: Tensor) -> None:
    """What `bias_relu_backward` does, in two kernels: partial column sums of blocks of rows, then their sum."""
    batch, width = g.shape
    steps = 1 if batch <= 2048 else 4  # enough programs for every multiprocessor, few partial sums
    partials = torch.empty(cdiv(batch, _ROWS * steps), width, dtype=torch.float32, device=g.device)
    _backward[(cdiv(width, _COLUMNS), len(partials))](g, out, dz, partials, batch, width, steps, _ROWS, _COLUMNS)
    column_sums(partials, dbias)


@jit
def _backward(
    g,
    out,
    dz,
    partials,
    batch,
    width,
    steps: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    total = tl.zeros([rows, columns], tl.float32)
    for step in tl.static_range(steps):
        row = (tl.program_id(1) * steps + step) * rows + tl.arange(0, rows)
        mask = (row < batch)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        active = tl.load(out + at, mask, other=0.0).to(tl.float32) > 0
        masked = tl.where(active, tl.load(g + at, mask, other=0.0).to(tl.float32), 0.0)
        total += masked
        tl.store(dz + at, masked, mask)
    tl.store(partials + tl.program_id(1).to(tl.int64) * width + column, tl.sum(total, 0), column < width)
