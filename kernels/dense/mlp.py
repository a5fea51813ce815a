"""Backward of bias and ReLU after a linear layer's GEMM; the forward is in the GEMM's cuBLAS epilogue.

kernels.dense.fp8_copies is the 8-bit version.
"""

from __future__ import annotations

from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl

_ROWS, _COLUMNS = 16, 128  # block of one program


def partial_rows(batch: int) -> int:
    """Returns the number of rows of partial sums that `bias_relu_backward` writes for `batch` samples."""
    return cdiv(batch, _ROWS * _steps(batch))


def bias_relu_backward(g: Tensor, out: Tensor, dz: Tensor, partials: Tensor) -> None:
    """Computes dz = g, zeroed where out <= 0; as in PyTorch, the gradient of NaN passes. `partials` are partial column
    sums of dz before rounding: their `column_sums` is the bias gradient.

    g, out, dz: bf16 or fp32 [batch, width], contiguous, except that g's rows may be strided; dz may be g. partials:
    fp32 [partial_rows(batch), width], overwritten.
    """
    assert g.shape == out.shape == dz.shape, "g, out, dz: [batch, width]"
    assert g.stride(1) == 1 and out.is_contiguous() and dz.is_contiguous(), "contiguous tensors only, except g's rows"
    assert partials.shape == (partial_rows(len(g)), g.shape[1]) and partials.is_contiguous(), (
        "partials: [partial_rows(batch), width], contiguous"
    )
    backward = triton_bias_relu_backward if g.is_cuda else plain_bias_relu_backward
    backward(g, out, dz, partials)


def plain_bias_relu_backward(g: Tensor, out: Tensor, dz: Tensor, partials: Tensor) -> None:
    """Computes `bias_relu_backward` in PyTorch."""
    masked = g.float().masked_fill(out <= 0, 0)
    partials.zero_()[0] = masked.sum(0)
    dz.copy_(masked)


def triton_bias_relu_backward(g: Tensor, out: Tensor, dz: Tensor, partials: Tensor) -> None:
    """Computes `bias_relu_backward` in one kernel."""
    batch, width = g.shape
    grid = (cdiv(width, _COLUMNS), len(partials))
    _bias_relu_backward_kernel[grid](g, out, dz, partials, batch, width, g.stride(0), _steps(batch), _ROWS, _COLUMNS)


def _steps(batch: int) -> int:
    """Returns the number of row blocks per program: few enough to occupy every multiprocessor, and enough to keep
    partial sums few."""
    return 1 if batch <= 2048 else 4


@jit
def _bias_relu_backward_kernel(
    g,
    out,
    dz,
    partials,
    batch,
    width,
    g_stride,
    steps: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    total = tl.zeros([rows, columns], tl.float32)
    for step in tl.static_range(steps):
        row = (tl.program_id(1) * steps + step) * rows + tl.arange(0, rows)
        mask = (row < batch)[:, None] & (column < width)[None, :]
        row = row.to(tl.int64)[:, None]
        at = row * width + column[None, :]
        closed = tl.load(out + at, mask, other=0.0).to(tl.float32) <= 0
        gradient = tl.load(g + row * g_stride + column[None, :], mask, other=0.0).to(tl.float32)
        masked = tl.where(closed, 0.0, gradient)
        total += masked
        tl.store(dz + at, masked, mask)
    tl.store(partials + tl.program_id(1).to(tl.int64) * width + column, tl.sum(total, 0), column < width)
