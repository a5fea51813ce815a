"""Layer norm of tokens: one pass forward and one backward, statistics in fp32, nothing kept between the two.

Gradients of weight and bias are sums of partial sums in a fixed order, so that equal inputs give equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl

PROGRAMS = 3168
"""At most, of a kernel that goes over all tokens: 24 for each multiprocessor of an H200."""
_ROWS = 2  # tokens of a program's tile


def programs(rows: int, tile: int) -> int:
    """Returns how many programs share `rows`: few different numbers, for kernels are compiled for them."""
    return min(PROGRAMS, next_power_of_2(max(1, cdiv(rows, tile))))


def add_up(partials: Tensor, dweight: Tensor, dbias: Tensor) -> None:
    """Store the sums of partial sums, fp32 [2, rows, W], in dweight and dbias. PyTorch's sum has one order, and here
    more programs than `column_sums`, whose rows are fewer."""
    sums = partials.sum(1)
    dweight.copy_(sums[0])
    dbias.copy_(sums[1])


def norm_forward(x: Tensor, weight: Tensor, bias: Tensor, end: Tensor | None, out: Tensor, eps: float) -> None:
    """Store (x - mean) / sqrt(variance + eps) * weight + bias of each row of x in `out`; 0 from row `end` on.

    x, out: bf16 or fp32 [N, W], contiguous, W a power of two. weight, bias: [W]. end: int32 or int64 [1], on the
    device; None for all rows.
    """
    _check(x, out)
    forward = triton_norm_forward if x.is_cuda else plain_norm_forward
    forward(x, weight, bias, end, out, eps)


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    end: Tensor | None,
    residual: Tensor | None,
    dx: Tensor,
    normed: Tensor | None,
    dweight: Tensor,
    dbias: Tensor,
    eps: float,
) -> None:
    """Store the gradients of `norm_forward`'s inputs in dx, dweight and dbias; residual, if any, is added to dx.

    grad, residual, dx, normed: as x. dweight, dbias: fp32 [W]. normed: takes norm_forward's output once more. dx and
    normed may be grad or residual. Rows from `end` on have no part in sums, and are 0 in dx and normed.
    """
    given = [of for of in (grad, residual, dx, normed) if of is not None]
    _check(x, *given)
    assert dweight.dtype == dbias.dtype == torch.float32, "gradients of weight and bias: fp32"
    backward = triton_norm_backward if x.is_cuda else plain_norm_backward
    backward(grad, x, weight, bias, end, residual, dx, normed, dweight, dbias, eps)


def _check(x: Tensor, *others: Tensor) -> None:
    assert all(of.shape == x.shape and of.dtype == x.dtype and of.is_contiguous() for of in (x, *others)), (
        "tokens and gradients: [N, W], one dtype, contiguous"
    )
    assert x.shape[1] == next_power_of_2(x.shape[1]), f"width: a power of two, not {x.shape[1]}"


def within(x: Tensor, end: Tensor | None) -> Tensor:
    """Returns whether each row of x lies before `end`: bool [rows, 1]."""
    rows = len(x)
    if end is None:
        return torch.ones(rows, 1, dtype=torch.bool, device=x.device)
    return (torch.arange(rows, device=end.device) < end)[:, None]


def normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (x - mean) * factor and factor = 1 / sqrt(variance + eps), at least fp32, [N, W] and [N, 1]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(1, keepdim=True)
    factor = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
    return centred * factor, factor


def of_normalized(grad: Tensor, x_hat: Tensor, factor: Tensor) -> Tensor:
    """Returns the gradient by x of x_hat, of `normalized`, whose gradient is grad."""
    return factor * (grad - grad.mean(1, keepdim=True) - x_hat * (grad * x_hat).mean(1, keepdim=True))


def plain_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, end: Tensor | None, out: Tensor, eps: float) -> None:
    """What `norm_forward` does, in PyTorch."""
    x_hat, _ = normalized(x, eps)
    out.copy_(torch.where(within(x, end), x_hat * weight + bias, 0))


def plain_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    end: Tensor | None,
    residual: Tensor | None,
    dx: Tensor,
    normed: Tensor | None,
    dweight: Tensor,
    dbias: Tensor,
    eps: float,
) -> None:
    """What `norm_backward` does, in PyTorch."""
    inside = within(x, end)
    x_hat, factor = normalized(torch.where(inside, x, 0), eps)
    wide = torch.where(inside, grad, 0).to(x_hat.dtype)
    dweight.copy_((wide * x_hat).sum(0))
    dbias.copy_(wide.sum(0))
    of_x = of_normalized(wide * weight, x_hat, factor)
    if residual is not None:
        of_x += residual
    dx.copy_(torch.where(inside, of_x, 0))
    if normed is not None:
        normed.copy_(torch.where(inside, x_hat * weight + bias, 0))


def triton_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, end: Tensor | None, out: Tensor, eps: float) -> None:
    """What `norm_forward` does, in one kernel."""
    rows, width = x.shape
    _norm_forward_kernel[(programs(rows, _ROWS),)](
        x, weight, bias, *_end(end, x), out, rows, eps, width, _ROWS, num_warps=1
    )


def triton_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    end: Tensor | None,
    residual: Tensor | None,
    dx: Tensor,
    normed: Tensor | None,
    dweight: Tensor,
    dbias: Tensor,
    eps: float,
) -> None:
    """What `norm_backward` does, in one kernel and the sum of its partial sums."""
    rows, width = x.shape
    partials = torch.empty(2, programs(rows, _ROWS), width, dtype=torch.float32, device=x.device)
    _norm_backward_kernel[(partials.shape[1],)](
        grad, x, weight, bias, *_end(end, x), x if residual is None else residual, dx, x if normed is None else normed,
        *partials, rows, eps, residual is not None, normed is not None, width, _ROWS, num_warps=1,
    )  # fmt: skip
    add_up(partials, dweight, dbias)


def _end(end: Tensor | None, x: Tensor) -> tuple[Tensor, bool]:
    return (x, True) if end is None else (end, False)


@jit
def _total(end, rows, whole: tl.constexpr):
    return rows if whole else tl.minimum(tl.load(end), rows)


@jit
def normalize(values, eps, width: tl.constexpr):
    """Returns (values - mean) * factor, fp32 [rows, width], and factor = 1 / sqrt(variance + eps), [rows]."""
    centred = values - (tl.sum(values, 1) / width)[:, None]
    factor = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    return centred * factor[:, None], factor


@jit
def through_normalize(grad, x_hat, factor, width: tl.constexpr):
    """Returns the gradient by values of x_hat, of `normalize`, whose gradient is grad."""
    mean, slope = tl.sum(grad, 1) / width, tl.sum(grad * x_hat, 1) / width
    return factor[:, None] * (grad - mean[:, None] - x_hat * slope[:, None])


@jit
def _norm_forward_kernel(
    x, weight, bias, end, whole: tl.constexpr, out, rows, eps, width: tl.constexpr, tile: tl.constexpr
):
    column = tl.arange(0, width)
    scale = tl.load(weight + column).to(tl.float32)[None, :]
    shift = tl.load(bias + column).to(tl.float32)[None, :]
    total = _total(end, rows, whole)
    first = tl.program_id(0) * tile
    while first < rows:
        row = first + tl.arange(0, tile)
        inside = (row < total)[:, None]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        x_hat, _ = normalize(tl.load(x + at, inside, other=0.0).to(tl.float32), eps, width)
        normed = tl.where(inside, x_hat * scale + shift, 0.0)
        tl.store(out + at, normed.to(out.dtype.element_ty), (row < rows)[:, None])
        first += tl.num_programs(0) * tile


@jit
def _norm_backward_kernel(
    grad, x, weight, bias, end, whole: tl.constexpr, residual, dx, normed, dweights, dbiases, rows, eps,
    add: tl.constexpr, again: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, width)
    scale = tl.load(weight + column).to(tl.float32)[None, :]
    shift = tl.load(bias + column).to(tl.float32)[None, :]
    dweight, dbias = tl.zeros([width], tl.float32), tl.zeros([width], tl.float32)
    total = _total(end, rows, whole)
    first = tl.program_id(0) * tile
    while first < rows:
        row = first + tl.arange(0, tile)
        inside, stored = (row < total)[:, None], (row < rows)[:, None]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        x_hat, factor = normalize(tl.load(x + at, inside, other=0.0).to(tl.float32), eps, width)
        of_normed = tl.load(grad + at, inside, other=0.0).to(tl.float32)
        dweight += tl.sum(of_normed * x_hat, 0)
        dbias += tl.sum(of_normed, 0)
        of_x = through_normalize(of_normed * scale, x_hat, factor, width)
        if add:
            of_x += tl.load(residual + at, inside, other=0.0).to(tl.float32)
        tl.store(dx + at, tl.where(inside, of_x, 0.0).to(dx.dtype.element_ty), stored)
        if again:
            tl.store(normed + at, tl.where(inside, x_hat * scale + shift, 0.0).to(normed.dtype.element_ty), stored)
        first += tl.num_programs(0) * tile
    tl.store(dweights + tl.program_id(0) * width + column, dweight)
    tl.store(dbiases + tl.program_id(0) * width + column, dbias)
