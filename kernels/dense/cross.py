"""Element-wise parts of the low-rank cross layer x' = x0 * (y + b) + x; two GEMMs compute its y = W (V x).

On Hopper GPUs, kernels.dense.fused_cross fuses them into the products' epilogues, except the last layer's backward.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._triton import cdiv, jit, tl

# Block of one program, forward and backward: the fastest on an H200 at 512 and 3456 samples.
_ROWS, _COLUMNS = 8, 256
_BACKWARD_ROWS, _BACKWARD_COLUMNS = 32, 64


def partial_rows(batch: int) -> int:
    """Returns the number of rows of partial sums that `cross_backward` writes for `batch` samples."""
    return cdiv(batch, _BACKWARD_ROWS)


class CrossForward(NamedTuple):
    """out = x0 * (y + bias) + x.

    Computed in fp32, rounded once. Width a multiple of 8. Matrices are bf16 or fp32 [batch, width], contiguous.
    """

    x0: Tensor
    x: Tensor
    y: Tensor
    bias: Tensor
    """bf16 or fp32 [width]."""
    out: Tensor
    """May be x or y."""

    def launch(self) -> None:
        """Checks the arguments and computes `out`."""
        _check(self.x0, self.x, self.y, self.out, bias=self.bias)
        (self.triton if self.x0.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes `out` in PyTorch."""
        self.out.copy_(self.x0.float() * (self.y.float() + self.bias.float()) + self.x.float())

    def triton(self) -> None:
        """Computes `out` in one kernel."""
        batch, width = self.x0.shape
        grid = (cdiv(width, _COLUMNS), cdiv(batch, _ROWS))
        _cross_forward_kernel[grid](*self, batch, width, _ROWS, _COLUMNS)


class CrossBackward(NamedTuple):
    """Computes, for g = dL/dx', dy = g * x0 and dx0 = g * (y + bias), and the bias gradient as partial sums.

    The gradient of x through the residual is g itself. Only the first layer, whose x is x0, adds it to dx0 here.
    Computed in fp32. Width a multiple of 8. Matrices are bf16 or fp32 [batch, width], contiguous.
    """

    g: Tensor
    x0: Tensor
    y: Tensor
    bias: Tensor
    """bf16 or fp32 [width]."""
    dy: Tensor
    """May be g or y."""
    dx0: Tensor
    partials: Tensor
    """fp32 [partial_rows(batch), width], overwritten: partial column sums of dy before rounding. Their `column_sums`
    is the bias gradient."""
    accumulate: bool
    """Whether to add to dx0 instead of overwriting it."""
    first_layer: bool = False

    def launch(self) -> None:
        """Checks the arguments and computes the gradients."""
        _check(self.g, self.x0, self.y, self.dy, self.dx0, bias=self.bias)
        _check_partials(self.partials, self.g)
        (self.triton if self.g.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes the gradients in PyTorch."""
        product = self.g.float() * self.x0.float()
        through_y = self.g.float() * (self.y.float() + self.bias.float() + (1 if self.first_layer else 0))
        self.dx0.copy_(self.dx0.float() + through_y if self.accumulate else through_y)
        self.partials.zero_()[0] = product.sum(0)
        self.dy.copy_(product)

    def triton(self) -> None:
        """Computes the gradients in one kernel."""
        batch, width = self.g.shape
        *tensors, accumulate, first_layer = self
        sizes = (batch, width, accumulate, first_layer, _BACKWARD_ROWS, _BACKWARD_COLUMNS)
        _cross_backward_kernel[(cdiv(width, _BACKWARD_COLUMNS), len(self.partials))](*tensors, *sizes)


class CrossOutputBackward(NamedTuple):
    """Computes only dy = g * x0 and `partials` of `CrossBackward`, from the same arguments."""

    g: Tensor
    x0: Tensor
    dy: Tensor
    partials: Tensor

    def launch(self) -> None:
        """Checks the arguments and computes dy."""
        _check(self.g, self.x0, self.dy, bias=self.g[0])
        _check_partials(self.partials, self.g)
        (self.triton if self.g.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes dy in PyTorch."""
        product = self.g.float() * self.x0.float()
        self.partials.zero_()[0] = product.sum(0)
        self.dy.copy_(product)

    def triton(self) -> None:
        """Computes dy in one kernel."""
        batch, width = self.g.shape
        grid = (cdiv(width, _BACKWARD_COLUMNS), len(self.partials))
        # Accesses of 16 bytes over four rows per thread: a seventh faster than over two.
        _cross_output_backward_kernel[grid](*self, batch, width, _BACKWARD_ROWS, _BACKWARD_COLUMNS, num_warps=2)


def _check(*matrices: Tensor, bias: Tensor) -> None:
    assert all(matrix.is_contiguous() and matrix.shape == matrices[0].shape for matrix in matrices), "[batch, width]"
    assert bias.shape == matrices[0].shape[1:] and bias.numel() % 8 == 0, "bias: [width], a multiple of 8"


def _check_partials(partials: Tensor, g: Tensor) -> None:
    rows = partial_rows(len(g)), g.shape[1]
    assert partials.shape == rows and partials.is_contiguous(), "partials: [partial_rows(batch), width], contiguous"


cross_forward = function(CrossForward, CrossForward.launch)
plain_cross_forward = function(CrossForward, CrossForward.plain)
triton_cross_forward = function(CrossForward, CrossForward.triton)
cross_backward = function(CrossBackward, CrossBackward.launch)
plain_cross_backward = function(CrossBackward, CrossBackward.plain)
triton_cross_backward = function(CrossBackward, CrossBackward.triton)
cross_output_backward = function(CrossOutputBackward, CrossOutputBackward.launch)
plain_cross_output_backward = function(CrossOutputBackward, CrossOutputBackward.plain)
triton_cross_output_backward = function(CrossOutputBackward, CrossOutputBackward.triton)


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
