"""x * sigmoid(norm(x)) of rows: the activation of DLRMv4's MLPs, in one pass forward and one backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._triton import jit, tl
from dlrm_bench.kernels.dense.norm import (
    add_up,
    affine_of,
    check_rows,
    check_sums,
    normalize,
    normalized,
    of_normalized,
    programs,
    through_normalize,
)

_ROWS = 2  # rows of a program's tile


class SwishNormForward(NamedTuple):
    """Stores x * sigmoid((x - mean) / sqrt(variance + eps) * weight + bias) of each row of x in `out`."""

    x: Tensor
    """bf16 or fp32 [N, W], contiguous, W a power of two; likewise all other matrices."""
    weight: Tensor
    """[W], of any dtype; likewise `bias`."""
    bias: Tensor
    out: Tensor
    eps: float

    def launch(self) -> None:
        """Checks the arguments and computes `out`."""
        check_rows(self.x, self.out)
        (self.triton if self.x.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes `out` in PyTorch."""
        x_hat, _ = normalized(self.x, self.eps)
        self.out.copy_(self.x * (x_hat * self.weight + self.bias).sigmoid())

    def triton(self) -> None:
        """Computes `out` in one kernel."""
        x, weight, bias, out, eps = self
        rows, width = x.shape
        _swish_norm_forward_kernel[(programs(rows, _ROWS),)](x, weight, bias, out, rows, eps, width, _ROWS, num_warps=1)


class SwishNormBackward(NamedTuple):
    """Stores the gradients of `SwishNormForward`'s inputs in dx, dweight and dbias. Equal inputs give equal bits."""

    grad: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor
    dx: Tensor
    dnorm: Tensor
    """fp32 [2, W]: the gradients of weight and bias."""
    eps: float

    def launch(self) -> None:
        """Checks the arguments and computes the gradients."""
        check_rows(self.x, self.grad, self.dx)
        check_sums(self.dnorm, self.x.shape[1])
        (self.triton if self.x.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes the gradients in PyTorch."""
        x_hat, factor = normalized(self.x, self.eps)
        sigmoid = (x_hat * self.weight + self.bias).sigmoid()
        wide = self.grad.to(x_hat.dtype)
        of_normed = wide * self.x * sigmoid * (1 - sigmoid)
        self.dnorm[0].copy_((of_normed * x_hat).sum(0))
        self.dnorm[1].copy_(of_normed.sum(0))
        self.dx.copy_(wide * sigmoid + of_normalized(of_normed * self.weight, x_hat, factor))

    def triton(self) -> None:
        """Computes the gradients in one kernel, and adds up its partial sums."""
        grad, x, weight, bias, dx, dnorm, eps = self
        rows, width = x.shape
        partials = torch.empty(2, programs(rows, _ROWS), width, dtype=torch.float32, device=x.device)
        _swish_norm_backward_kernel[(partials.shape[1],)](
            grad, x, weight, bias, dx, *partials, rows, eps, width, _ROWS, num_warps=1
        )
        add_up(partials, dnorm)


swish_norm_forward = function(SwishNormForward, SwishNormForward.launch)
plain_swish_norm_forward = function(SwishNormForward, SwishNormForward.plain)
triton_swish_norm_forward = function(SwishNormForward, SwishNormForward.triton)
swish_norm_backward = function(SwishNormBackward, SwishNormBackward.launch)
plain_swish_norm_backward = function(SwishNormBackward, SwishNormBackward.plain)
triton_swish_norm_backward = function(SwishNormBackward, SwishNormBackward.triton)


@jit
def _swish_norm_forward_kernel(x, weight, bias, out, rows, eps, width: tl.constexpr, tile: tl.constexpr):
    column = tl.arange(0, width)
    scale, shift = affine_of(weight, bias, column, tl.float32)
    first = tl.program_id(0) * tile
    while first < rows:
        row = first + tl.arange(0, tile)
        inside = (row < rows)[:, None]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        values = tl.load(x + at, inside, other=0.0).to(tl.float32)
        x_hat, _ = normalize(values, eps, width)
        tl.store(out + at, (values * tl.sigmoid(x_hat * scale + shift)).to(out.dtype.element_ty), inside)
        first += tl.num_programs(0) * tile


@jit
def _swish_norm_backward_kernel(
    grad, x, weight, bias, dx, dweights, dbiases, rows, eps, width: tl.constexpr, tile: tl.constexpr
):
    column = tl.arange(0, width)
    scale, shift = affine_of(weight, bias, column, tl.float32)
    dweight, dbias = tl.zeros([width], tl.float32), tl.zeros([width], tl.float32)
    first = tl.program_id(0) * tile
    while first < rows:
        row = first + tl.arange(0, tile)
        inside = (row < rows)[:, None]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        values = tl.load(x + at, inside, other=0.0).to(tl.float32)
        of_out = tl.load(grad + at, inside, other=0.0).to(tl.float32)
        x_hat, factor = normalize(values, eps, width)
        sigmoid = tl.sigmoid(x_hat * scale + shift)
        of_normed = of_out * values * sigmoid * (1 - sigmoid)
        dweight += tl.sum(of_normed * x_hat, 0)
        dbias += tl.sum(of_normed, 0)
        of_x = of_out * sigmoid + through_normalize(of_normed * scale, x_hat, factor, width)
        tl.store(dx + at, of_x.to(dx.dtype.element_ty), inside)
        first += tl.num_programs(0) * tile
    tl.store(dweights + tl.program_id(0) * width + column, dweight)
    tl.store(dbiases + tl.program_id(0) * width + column, dbias)
