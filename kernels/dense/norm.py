"""Layer norm of tokens: one pass forward and one backward, statistics in fp32, nothing stored between them.

Gradients of weight and bias add up partial sums in a fixed order, so that equal inputs give equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.dense._eight_bits import (
    add_to_tally,
    not_finite,
    output_of,
    rounded,
    take,
    too_large,
    total,
    values_of,
)
from dlrm_bench.kernels.dense.fp8 import Fp8

PROGRAMS = 3168
"""Maximum number of programs of a kernel over all tokens: 24 per multiprocessor of an H200."""
_ROWS = 2  # tokens of a program's tile


def programs(rows: int, tile: int) -> int:
    """Returns the number of programs for `rows`: one of few values, because kernels are compiled for each."""
    return min(PROGRAMS, next_power_of_2(max(1, cdiv(rows, tile))))


def add_up(partials: Tensor, dnorm: Tensor) -> None:
    """Stores the sums of partial sums, fp32 [2, rows, W], in dnorm. PyTorch's sum has a fixed order and runs more
    programs here than `column_sums`, which suits fewer rows."""
    torch.sum(partials, 1, out=dnorm)


def check_sums(dnorm: Tensor, width: int) -> None:
    """Asserts the form of gradients of weight and bias."""
    assert dnorm.shape == (2, width) and dnorm.dtype == torch.float32, "gradients of weight and bias: fp32 [2, W]"


def check_rows(x: Tensor, *others: Tensor) -> None:
    """Asserts that matrices match, are contiguous, and have a width that a tile supports."""
    assert all(of.shape == x.shape and of.dtype == x.dtype and of.is_contiguous() for of in (x, *others)), (
        "rows and gradients: [N, W], one dtype, contiguous"
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


def affine(weight: Tensor, bias: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Returns a norm's weight and bias, rounded to `dtype` if it is given."""
    return (weight, bias) if dtype is None else (weight.to(dtype), bias.to(dtype))


def of_normalized(grad: Tensor, x_hat: Tensor, factor: Tensor) -> Tensor:
    """Returns the gradient of x, given `grad`, the gradient of x_hat; x_hat and factor: from `normalized`."""
    return factor * (grad - grad.mean(1, keepdim=True) - x_hat * (grad * x_hat).mean(1, keepdim=True))


class NormForward(NamedTuple):
    """Stores (x - mean) / sqrt(variance + eps) * weight + bias of each row of x in `out`; 0 in rows from `end` on."""

    x: Tensor
    """bf16 or fp32 [N, W], contiguous, W a power of two; likewise all other matrices."""
    weight: Tensor
    """[W], of any dtype; likewise `bias`."""
    bias: Tensor
    end: Tensor | None
    """int32 or int64 [1], on the device; None for all rows."""
    out: Tensor | Fp8
    """Like x, or in e4m3."""
    eps: float
    rounds: bool = False
    """Whether weight and bias are first rounded to x's dtype."""

    def launch(self) -> None:
        """Checks the arguments and computes `out`."""
        out = values_of(self.out)
        check_rows(self.x, *(() if isinstance(self.out, Fp8) else (out,)))
        assert out.shape == self.x.shape and out.is_contiguous(), "out: [N, W], contiguous"
        (self.triton if self.x.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes `out` in PyTorch."""
        x_hat, _ = normalized(self.x, self.eps)
        weight, bias = affine(self.weight, self.bias, self.x.dtype if self.rounds else None)
        take(self.out, torch.where(within(self.x, self.end), x_hat * weight + bias, 0))

    def triton(self) -> None:
        """Computes `out` in one kernel."""
        x, weight, bias, end, out, eps, rounds = self
        rows, width = x.shape
        _norm_forward_kernel[(programs(rows, _ROWS),)](
            x, weight, bias, *end_of(end, x), *output_of(out), rows, eps, rounds, width, _ROWS, num_warps=1
        )


class NormBackward(NamedTuple):
    """Stores the gradients of `NormForward`'s inputs in dx, dweight and dbias. Rows from `end` on do not contribute to
    sums and become 0 in dx and normed. Equal inputs give equal bits."""

    grad: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor
    end: Tensor | None
    residual: Tensor | None
    """Added to dx, if given."""
    dx: Tensor
    """May be grad or residual."""
    normed: Tensor | None
    """Receives NormForward's output, recomputed, if given; may be grad or residual."""
    dnorm: Tensor
    """fp32 [2, W]: the gradients of weight and bias, also where these are rounded."""
    eps: float
    rounds: bool = False

    def launch(self) -> None:
        """Checks the arguments and computes the gradients."""
        check_rows(self.x, *(of for of in (self.grad, self.residual, self.dx, self.normed) if of is not None))
        check_sums(self.dnorm, self.x.shape[1])
        (self.triton if self.x.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes the gradients in PyTorch."""
        inside = within(self.x, self.end)
        x_hat, factor = normalized(torch.where(inside, self.x, 0), self.eps)
        weight, bias = affine(self.weight, self.bias, self.x.dtype if self.rounds else None)
        wide = torch.where(inside, self.grad, 0).to(x_hat.dtype)
        self.dnorm[0].copy_((wide * x_hat).sum(0))
        self.dnorm[1].copy_(wide.sum(0))
        of_x = of_normalized(wide * weight, x_hat, factor)
        if self.residual is not None:
            of_x += self.residual
        self.dx.copy_(torch.where(inside, of_x, 0))
        if self.normed is not None:
            self.normed.copy_(torch.where(inside, x_hat * weight + bias, 0))

    def triton(self) -> None:
        """Computes the gradients in one kernel, and adds up its partial sums."""
        grad, x, weight, bias, end, residual, dx, normed, dnorm, eps, rounds = self
        rows, width = x.shape
        partials = torch.empty(2, programs(rows, _ROWS), width, dtype=torch.float32, device=x.device)
        _norm_backward_kernel[(partials.shape[1],)](
            grad, x, weight, bias, *end_of(end, x), x if residual is None else residual, dx,
            x if normed is None else normed, *partials, rows, eps, residual is not None, normed is not None,
            rounds, width, _ROWS, num_warps=1,
        )  # fmt: skip
        add_up(partials, dnorm)


def end_of(end: Tensor | None, x: Tensor) -> tuple[Tensor, bool]:
    """Returns a kernel's arguments `end` and `whole` (whether all rows count)."""
    return (x, True) if end is None else (end, False)


@jit
def tokens_before(end, rows, whole: tl.constexpr):
    """Returns the number of rows that count."""
    return rows if whole else tl.minimum(tl.load(end), rows)


@jit
def affine_of(weight, bias, column, kind: tl.constexpr):
    """Returns weight and bias, rounded to a format `kind`, fp32 [1, width]."""
    scale = tl.load(weight + column).to(kind).to(tl.float32)
    shift = tl.load(bias + column).to(kind).to(tl.float32)
    return scale[None, :], shift[None, :]


norm_forward = function(NormForward, NormForward.launch)
plain_norm_forward = function(NormForward, NormForward.plain)
triton_norm_forward = function(NormForward, NormForward.triton)
norm_backward = function(NormBackward, NormBackward.launch)
plain_norm_backward = function(NormBackward, NormBackward.plain)
triton_norm_backward = function(NormBackward, NormBackward.triton)


@jit
def normalize(values, eps, width: tl.constexpr):
    """Returns (values - mean) * factor, fp32 [rows, width], and factor = 1 / sqrt(variance + eps), [rows]."""
    centred = values - (tl.sum(values, 1) / width)[:, None]
    factor = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    return centred * factor[:, None], factor


@jit
def through_normalize(grad, x_hat, factor, width: tl.constexpr):
    """Returns the gradient of `values`, given `grad`, the gradient of x_hat; x_hat and factor: from `normalize`."""
    mean, slope = tl.sum(grad, 1) / width, tl.sum(grad * x_hat, 1) / width
    return factor[:, None] * (grad - mean[:, None] - x_hat * slope[:, None])


@jit
def _norm_forward_kernel(
    x, weight, bias, end, whole: tl.constexpr, out, tally, eight_bits: tl.constexpr, counts: tl.constexpr, rows, eps,
    rounds: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, width)
    scale, shift = affine_of(weight, bias, column, x.dtype.element_ty if rounds else tl.float32)
    tokens = tokens_before(end, rows, whole)
    first = tl.program_id(0) * tile
    while first < rows:
        row = first + tl.arange(0, tile)
        inside = (row < tokens)[:, None]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        x_hat, _ = normalize(tl.load(x + at, inside, other=0.0).to(tl.float32), eps, width)
        normed = tl.where(inside, x_hat * scale + shift, 0.0)
        if counts:
            beyond = total(too_large(normed, eight_bits))
            if beyond > 0:
                add_to_tally(tally, beyond, total(not_finite(normed)))
        tl.store(out + at, rounded(normed, eight_bits, out.dtype.element_ty), (row < rows)[:, None])
        first += tl.num_programs(0) * tile


@jit
def _norm_backward_kernel(
    grad, x, weight, bias, end, whole: tl.constexpr, residual, dx, normed, dweights, dbiases, rows, eps,
    add: tl.constexpr, again: tl.constexpr, rounds: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, width)
    scale, shift = affine_of(weight, bias, column, x.dtype.element_ty if rounds else tl.float32)
    dweight, dbias = tl.zeros([width], tl.float32), tl.zeros([width], tl.float32)
    tokens = tokens_before(end, rows, whole)
    first = tl.program_id(0) * tile
    while first < rows:
        row = first + tl.arange(0, tile)
        inside, stored = (row < tokens)[:, None], (row < rows)[:, None]
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
