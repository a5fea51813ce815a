"""The element-wise parts of the low-rank cross layer x' = x0 * (y + b) + x, whose y = W (V x) two GEMMs compute.

On Hopper GPUs kernels.dense.fused_cross has all but the backward of the last layer's output in the products' epilogues.
"""

from __future__ import annotations

from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl

# Of one program's block, forward and backward: the fastest on an H200 at 512 and 3456 samples.
_ROWS, _COLUMNS = 8, 256
_BACKWARD_ROWS, _BACKWARD_COLUMNS = 32, 64


def cross_forward(x0: Tensor, x: Tensor, y: Tensor, bias: Tensor, out: Tensor) -> None:
    """out = x0 * (y + bias) + x.

    x0, x, y, out: bf16 or fp32 [batch, width], contiguous; out may be x or y. bias: bf16 or fp32 [width]. Computed in
    fp32, rounded once. Width a multiple of 8.
    """
    _check(x0, x, y, out, bias=bias)
    forward = triton_cross_forward if x0.is_cuda else plain_cross_forward
    forward(x0, x, y, bias, out)


def partial_rows(batch: int) -> int:
    """How many rows of partial sums `cross_backward` leaves for so many samples."""
    return cdiv(batch, _BACKWARD_ROWS)


def cross_backward(
    g: Tensor,
    x0: Tensor,
    y: Tensor,
    bias: Tensor,
    dy: Tensor,
    dx0: Tensor,
    partials: Tensor,
    accumulate: bool,
    first_layer: bool = False,
) -> None:
    """Writes, for g = dL/dx', dy = g * x0 and dx0 = g * (y + bias), added to dx0 if `accumulate`; `partials` are
    partial column sums of dy, before it is rounded: the bias' gradient, once `column_sums` has added them up.

    The gradient to x through the sum is g itself. Only in the first layer, whose x is x0, it is added to dx0 here. g,
    x0, y, dy, dx0: bf16 or fp32 [batch, width], contiguous; dy may be g or y. bias: bf16 or fp32 [width]. partials:
    fp32 [partial_rows(batch), width], overwritten. Computed in fp32. Width a multiple of 8.
    """
    _check(g, x0, y, dy, dx0, bias=bias)
    assert partials.shape == (partial_rows(len(g)), g.shape[1]) and partials.is_contiguous(), (
        "partials: [partial_rows(batch), width], contiguous"
    )
    backward = triton_cross_backward if g.is_cuda else plain_cross_backward
    backward(g, x0, y, bias, dy, dx0, partials, accumulate, first_layer)


def cross_output_backward(g: Tensor, x0: Tensor, dy: Tensor, partials: Tensor) -> None:
    """What `cross_backward` does of it: dy = g * x0, and `partials`. All as there."""
    _check(g, x0, dy, bias=g[0])
    assert partials.shape == (partial_rows(len(g)), g.shape[1]) and partials.is_contiguous(), "partials: as it says"
    backward = triton_cross_output_backward if g.is_cuda else plain_cross_output_backward
    backward(g, x0, dy, partials)


def _check(*matrices: Tensor, bias: Tensor) -> None:
    assert all(matrix.is_contiguous() and matrix.shape == matrices[0].shape for matrix in matrices), "[batch, width]"
    assert bias.shape == matrices[0].shape[1:] and bias.numel() % 8 == 0, "bias: [width], a multiple of 8"


def plain_cross_forward(x0: Tensor, x: Tensor, y: Tensor, bias: Tensor, out: Tensor) -> None:
    """What `cross_forward` does, in PyTorch."""
    out.copy_(x0.float() * (y.float() + bias.float()) + x.float())


def plain_cross_backward(
    g: Tensor,
    x0: Tensor,
    y: Tensor,
    bias: Tensor,
    dy: Tensor,
    dx0: Tensor,
    partials: Tensor,
    accumulate: bool,
    first_layer: bool = False,
) -> None:
    """What `cross_backward` does, in PyTorch."""
    product = g.float() * x0.float()
    through_y = g.float() * (y.float() + bias.float() + (1 if first_layer else 0))
    dx0.copy_(dx0.float() + through_y if accumulate else through_y)
    partials.zero_()[0] = product.sum(0)
    dy.copy_(product)


def plain_cross_output_backward(g: Tensor, x0: Tensor, dy: Tensor, partials: Tensor) -> None:
    """What `cross_output_backward` does, in PyTorch."""
    product = g.float() * x0.float()
    partials.zero_()[0] = product.sum(0)
    dy.copy_(product)


def triton_cross_forward(x0: Tensor, x: Tensor, y: Tensor, bias: Tensor, out: Tensor) -> None:
    """What `cross_forward` does, in one kernel."""
    batch, width = x0.shape
    grid = (cdiv(width, _COLUMNS), cdiv(batch, _ROWS))
    _cross_forward_kernel[grid](x0, x, y, bias, out, batch, width, _ROWS, _COLUMNS)


def triton_cross_backward(
    g: Tensor,
    x0: Tensor,
    y: Tensor,
    bias: Tensor,
    dy: Tensor,
    dx0: Tensor,
    partials: Tensor,
    accumulate: bool,
    first_layer: bool = False,
) -> None:
    """What `cross_backward` does, in one kernel."""
    batch, width = g.shape
    sizes = (batch, width, accumulate, first_layer, _BACKWARD_ROWS, _BACKWARD_COLUMNS)
    _cross_backward_kernel[(cdiv(width, _BACKWARD_COLUMNS), len(partials))](g, x0, y, bias, dy, dx0, partials, *sizes)


def triton_cross_output_backward(g: Tensor, x0: Tensor, dy: Tensor, partials: Tensor) -> None:
    """What `cross_output_backward` does, in one kernel."""
    batch, width = g.shape
    grid = (cdiv(width, _BACKWARD_COLUMNS), len(partials))
    sizes = (batch, width, _BACKWARD_ROWS, _BACKWARD_COLUMNS)
    # 16 bytes of four rows a thread: a seventh faster than of two.
    _cross_output_backward_kernel[grid](g, x0, dy, partials, *sizes, num_warps=2)


@jit
def _cross_forward_kernel(x0, x, y, bias, out, batch, width, rows: tl.constexpr, columns: tl.constexpr) -> None:
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    mask = (row < batch)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    b = tl.load(bias + column, column < width, other=0.0).to(tl.float32)[None, :]
    factor = tl.load(y + at, mask).to(tl.float32) + b
    tl.store(out + at, tl.load(x0 + at, mask).to(tl.float32) * factor + tl.load(x + at, mask).to(tl.float32), mask)


@jit
def _cross_backward_kernel(
    g,
    x0,
    y,
    bias,
    dy,
    dx0,
    partials,
    batch,
    width,
    accumulate: tl.constexpr,
    first_layer: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    mask = (row < batch)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    b = tl.load(bias + column, column < width, other=0.0).to(tl.float32)[None, :]
    grad = tl.load(g + at, mask, other=0.0).to(tl.float32)
    product = grad * tl.load(x0 + at, mask, other=0.0).to(tl.float32)
    through_y = grad * (tl.load(y + at, mask, other=0.0).to(tl.float32) + b)
    if first_layer:
        through_y += grad
    if accumulate:
        through_y += tl.load(dx0 + at, mask, other=0.0).to(tl.float32)
    tl.store(dy + at, product, mask)
    tl.store(dx0 + at, through_y, mask)
    tl.store(partials + tl.program_id(1).to(tl.int64) * width + column, tl.sum(product, 0), column < width)


@jit
def _cross_output_backward_kernel(g, x0, dy, partials, batch, width, rows: tl.constexpr, columns: tl.constexpr) -> None:
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    mask = (row < batch)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    product = tl.load(g + at, mask, other=0.0).to(tl.float32) * tl.load(x0 + at, mask, other=0.0).to(tl.float32)
    tl.store(dy + at, product, mask)
    tl.store(partials + tl.program_id(1).to(tl.int64) * width + column, tl.sum(product, 0), column < width)
