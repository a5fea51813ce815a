"""x * sigmoid(norm(x)) of rows: the activation of DLRMv4's MLPs, in one pass forward and one backward."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import jit, next_power_of_2, tl
from dlrm_bench.kernels.dense.norm import add_up, normalize, normalized, of_normalized, programs, through_normalize

_ROWS = 2  # of a program's tile


def swish_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, eps: float) -> None:
    """Store x * sigmoid((x - mean) / sqrt(variance + eps) * weight + bias) of each row of x in `out`.

    x, out: bf16 or fp32 [N, W], contiguous, W a power of two. weight, bias: [W]. Computed in fp32.
    """
    _check(x, out)
    (triton_swish_norm_forward if x.is_cuda else plain_swish_norm_forward)(x, weight, bias, out, eps)


def swish_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor, eps: float
) -> None:
    """Store the gradients of `swish_norm_forward`'s inputs in dx, dweight and dbias.

    grad, dx: as x. dweight, dbias: fp32 [W]. Equal inputs give equal bits.
    """
    _check(x, grad, dx)
    assert dweight.dtype == dbias.dtype == torch.float32, "gradients of weight and bias: fp32"
    backward = triton_swish_norm_backward if x.is_cuda else plain_swish_norm_backward
    backward(grad, x, weight, bias, dx, dweight, dbias, eps)


def _check(x: Tensor, *others: Tensor) -> None:
    assert all(of.shape == x.shape and of.dtype == x.dtype and of.is_contiguous() for of in (x, *others)), (
        "rows and gradients: [N, W], one dtype, contiguous"
    )
    assert x.shape[1] == next_power_of_2(x.shape[1]), f"width: a power of two, not {x.shape[1]}"


def plain_swish_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, eps: float) -> None:
    """What `swish_norm_forward` does, in PyTorch."""
    x_hat, _ = normalized(x, eps)
    out.copy_(x * (x_hat * weight + bias).sigmoid())


def plain_swish_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor, eps: float
) -> None:
    """What `swish_norm_backward` does, in PyTorch."""
    x_hat, factor = normalized(x, eps)
    sigmoid = (x_hat * weight + bias).sigmoid()
    wide = grad.to(x_hat.dtype)
    of_normed = wide * x * sigmoid * (1 - sigmoid)
    dweight.copy_((of_normed * x_hat).sum(0))
    dbias.copy_(of_normed.sum(0))
    dx.copy_(wide * sigmoid + of_normalized(of_normed * weight, x_hat, factor))


def triton_swish_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, eps: float) -> None:
    """What `swish_norm_forward` does, in one kernel."""
    rows, width = x.shape
    _swish_norm_forward_kernel[(programs(rows, _ROWS),)](x, weight, bias, out, rows, eps, width, _ROWS, num_warps=1)


def triton_swish_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor, eps: float
) -> None:
    """What `swish_norm_backward` does, in one kernel and the sum of its partial sums."""
    rows, width = x.shape
    partials = torch.empty(2, programs(rows, _ROWS), width, dtype=torch.float32, device=x.device)
    _swish_norm_backward_kernel[(partials.shape[1],)](
        grad, x, weight, bias, dx, *partials, rows, eps, width, _ROWS, num_warps=1
    )
    add_up(partials, dweight, dbias)


@jit
def _swish_norm_forward_kernel(x, weight, bias, out, rows, eps, width: tl.constexpr, tile: tl.constexpr):
    column = tl.arange(0, width)
    scale = tl.load(weight + column).to(tl.float32)[None, :]
    shift = tl.load(bias + column).to(tl.float32)[None, :]
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
    scale = tl.load(weight + column).to(tl.float32)[None, :]
    shift = tl.load(bias + column).to(tl.float32)[None, :]
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
