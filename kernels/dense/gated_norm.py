"""Joins a layer's gate and attention: [s, a, s * norm(a)] with s = silu(u) and dropout, in one pass each way.

This is the input of the output product in DLRMv4's STU layer (hstu_compute_output of its reference). Neither masks nor
statistics are kept: the backward pass recomputes them, and the joined matrix too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._triton import jit, next_power_of_2, tl
from dlrm_bench.kernels.dense._dropout import Dropout, dropout_words, dropped, plain_words, scale_of, threshold_of
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
from dlrm_bench.kernels.dense.norm import (
    add_up,
    affine,
    affine_of,
    check_sums,
    end_of,
    normalize,
    normalized,
    of_normalized,
    programs,
    through_normalize,
    tokens_before,
    within,
)

_ROWS = 2  # tokens of a program's tile: they share a dropout mask's counters
_NUM_WARPS = 2


def _check(u: Tensor, a: Tensor, out: Tensor | Fp8) -> None:
    (rows, width), joined = u.shape, values_of(out)
    assert a.shape == u.shape and joined.shape == (rows, 3 * width), "u, a: [N, W], joined: [N, 3 * W]"
    assert u.dtype == a.dtype and (isinstance(out, Fp8) or joined.dtype == u.dtype), "one dtype"
    assert u.stride(1) == a.stride(1) == 1 and joined.is_contiguous(), "u, a: contiguous columns; joined: contiguous"
    assert width == next_power_of_2(width), f"width: a power of two, not {width}"


def gated_norm_factors(dropout: Dropout | None, u: Tensor) -> Tensor:
    """Returns the dropout factor of each element of [N, 3 * W], fp32: 0 or greater than 1; 1 without dropout. u: [N,
    W], used for its shape."""
    (rows, width), device = u.shape, u.device
    if dropout is None:
        return torch.ones(rows, 3 * width, device=device)
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(width, device=device)
    words = torch.cat(plain_words(dropout, column, row // 2, row * 0)[:3], dim=1)
    bits = words >> 16 * (row % 2) & 0xFFFF
    return (bits >= threshold_of(dropout)) * scale_of(dropout)


class GatedNormForward(NamedTuple):
    """Stores [s, a, s * norm(a)] of each row, s = silu(u), with `dropout`, in `out`; rows from `end` on become 0."""

    u: Tensor
    """bf16 or fp32 [N, W], any row stride, W a power of two; likewise `a`. All have one dtype."""
    a: Tensor
    weight: Tensor
    """[W], the norm's, of any dtype, and first rounded to u's; likewise `bias`."""
    bias: Tensor
    end: Tensor | None
    """int32 or int64 [1], on the device; None for all rows."""
    dropout: Dropout | None
    out: Tensor | Fp8
    """[N, 3 * W], contiguous, of u's dtype or in e4m3."""
    eps: float

    def launch(self) -> None:
        """Checks the arguments and computes `out`."""
        _check(self.u, self.a, self.out)
        (self.triton if self.u.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes `out` in PyTorch."""
        inside = within(self.u, self.end)
        x_hat, _ = normalized(torch.where(inside, self.a, 0), self.eps)
        weight, bias = affine(self.weight, self.bias, self.u.dtype)
        s = functional.silu(self.u.to(x_hat.dtype))
        joined = torch.cat([s, self.a.to(s.dtype), s * (x_hat * weight + bias)], dim=1)
        take(self.out, torch.where(inside, joined * gated_norm_factors(self.dropout, self.u), 0))

    def triton(self) -> None:
        """Computes `out` in one kernel."""
        u, a, weight, bias, end, dropout, out, eps = self
        rows, width = u.shape
        _gated_norm_forward_kernel[(programs(rows, _ROWS),)](
            u, a, weight, bias, *end_of(end, u), *output_of(out), u.stride(0), a.stride(0), rows, eps,
            *_dropout(dropout, weight), width, _ROWS, num_warps=_NUM_WARPS,
        )  # fmt: skip


class GatedNormBackward(NamedTuple):
    """Stores the gradients of `GatedNormForward`'s inputs in du, da, dweight and dbias, and overwrites grad with its
    output.

    Rows from `end` on do not contribute to sums and become 0 in du, da and grad. Equal inputs give equal bits.
    """

    grad: Tensor
    """[N, 3 * W], contiguous."""
    u: Tensor
    a: Tensor
    weight: Tensor
    bias: Tensor
    end: Tensor | None
    dropout: Dropout | None
    du: Tensor
    """Like u, any row stride; likewise `da`."""
    da: Tensor
    dnorm: Tensor
    """fp32 [2, W]: the gradients of weight and bias."""
    eps: float

    def launch(self) -> None:
        """Checks the arguments and computes the gradients."""
        _check(self.u, self.a, self.grad)
        _check(self.du, self.da, self.grad)
        check_sums(self.dnorm, self.u.shape[1])
        (self.triton if self.u.is_cuda else self.plain)()

    def plain(self) -> None:
        """Computes the gradients in PyTorch."""
        inside = within(self.u, self.end)
        x_hat, factor = normalized(torch.where(inside, self.a, 0), self.eps)
        wide = torch.where(inside, self.u, 0).to(x_hat.dtype)
        sigmoid = wide.sigmoid()
        weight, bias = affine(self.weight, self.bias, self.u.dtype)
        s, normed = wide * sigmoid, x_hat * weight + bias
        factors = gated_norm_factors(self.dropout, self.u)
        of_s, of_a, of_gated = (torch.where(inside, self.grad, 0) * factors).chunk(3, dim=1)
        joined = torch.cat([s, torch.where(inside, self.a, 0).to(s.dtype), s * normed], dim=1)
        of_normed = of_gated * s
        self.dnorm[0].copy_((of_normed * x_hat).sum(0))
        self.dnorm[1].copy_(of_normed.sum(0))
        self.du.copy_((of_s + of_gated * normed) * (sigmoid + s * (1 - sigmoid)))
        self.da.copy_(torch.where(inside, of_a + of_normalized(of_normed * weight, x_hat, factor), 0))
        self.grad.copy_(torch.where(inside, joined * factors, 0))

    def triton(self) -> None:
        """Computes the gradients in one kernel, and adds up its partial sums."""
        grad, u, a, weight, bias, end, dropout, du, da, dnorm, eps = self
        rows, width = u.shape
        partials = torch.empty(2, programs(rows, _ROWS), width, dtype=torch.float32, device=u.device)
        _gated_norm_backward_kernel[(partials.shape[1],)](
            grad, u, a, weight, bias, *end_of(end, u), du, da, *partials, *(of.stride(0) for of in (u, a, du, da)),
            rows, eps, *_dropout(dropout, weight), width, _ROWS, num_warps=_NUM_WARPS,
        )  # fmt: skip
        add_up(partials, dnorm)


def _dropout(dropout: Dropout | None, some: Tensor) -> tuple[object, ...]:
    """Returns a kernel's arguments; `some` memory, which is not empty, stands for the seed that nothing uses."""
    seed, stream = (some, 0) if dropout is None else (dropout.seed, dropout.stream)
    return seed, stream, threshold_of(dropout), scale_of(dropout)


gated_norm_forward = function(GatedNormForward, GatedNormForward.launch)
plain_gated_norm_forward = function(GatedNormForward, GatedNormForward.plain)
triton_gated_norm_forward = function(GatedNormForward, GatedNormForward.triton)
gated_norm_backward = function(GatedNormBackward, GatedNormBackward.launch)
plain_gated_norm_backward = function(GatedNormBackward, GatedNormBackward.plain)
triton_gated_norm_backward = function(GatedNormBackward, GatedNormBackward.triton)


@jit
def _drop_all(s, a, gated, seed, row, stream, threshold: tl.constexpr, scale: tl.constexpr):
    """Returns all three values with dropout. row: int32 [2], an even row and the next one."""
    if threshold > 0:
        column = tl.arange(0, s.shape[1])[None, :]
        of_s, of_a, of_gated, _ = dropout_words(seed, stream, column, tl.min(row, 0) // 2, column * 0)
        odd = (row % 2)[:, None]
        s = dropped(s, of_s, odd, threshold, scale)
        a = dropped(a, of_a, odd, threshold, scale)
        gated = dropped(gated, of_gated, odd, threshold, scale)
    return s, a, gated


@jit
def _store_joined(out, row, s, a, gated, stored, width: tl.constexpr, eight_bits: tl.constexpr):
    at = row.to(tl.int64)[:, None] * (3 * width) + tl.arange(0, width)[None, :]
    tl.store(out + at, rounded(s, eight_bits, out.dtype.element_ty), stored)
    tl.store(out + at + width, rounded(a, eight_bits, out.dtype.element_ty), stored)
    tl.store(out + at + 2 * width, rounded(gated, eight_bits, out.dtype.element_ty), stored)


@jit
def _gated_norm_forward_kernel(
    u, a, weight, bias, end, whole: tl.constexpr, out, tally, eight_bits: tl.constexpr, counts: tl.constexpr,
    u_row, a_row, rows, eps, seeds, stream, threshold: tl.constexpr, kept: tl.constexpr,
    width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, width)
    scale, shift = affine_of(weight, bias, column, u.dtype.element_ty)
    tokens, seed = tokens_before(end, rows, whole), tl.load(seeds)
    first = tl.program_id(0) * tile
    while first < rows:
        row = first + tl.arange(0, tile)
        inside = (row < tokens)[:, None]
        at = row.to(tl.int64)[:, None]
        gate = tl.load(u + at * u_row + column[None, :], inside, other=0.0).to(tl.float32)
        attended = tl.load(a + at * a_row + column[None, :], inside, other=0.0).to(tl.float32)
        s = gate * tl.sigmoid(gate)
        x_hat, _ = normalize(attended, eps, width)
        gated = s * (x_hat * scale + shift)
        s, attended, gated = _drop_all(s, attended, gated, seed, row, stream, threshold, kept)
        if counts:
            outside = too_large(s, eight_bits) + too_large(attended, eight_bits) + too_large(gated, eight_bits)
            beyond = total(outside)
            if beyond > 0:
                add_to_tally(tally, beyond, total(not_finite(s) + not_finite(attended) + not_finite(gated)))
        _store_joined(out, row, s, attended, gated, (row < rows)[:, None], width, eight_bits)
        first += tl.num_programs(0) * tile


@jit
def _gated_norm_backward_kernel(
    grad, u, a, weight, bias, end, whole: tl.constexpr, du, da, dweights, dbiases, u_row, a_row, du_row, da_row,
    rows, eps, seeds, stream, threshold: tl.constexpr, kept: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, width)
    scale, shift = affine_of(weight, bias, column, u.dtype.element_ty)
    dweight, dbias = tl.zeros([width], tl.float32), tl.zeros([width], tl.float32)
    tokens, seed = tokens_before(end, rows, whole), tl.load(seeds)
    first = tl.program_id(0) * tile
    while first < rows:
        row = first + tl.arange(0, tile)
        inside, stored = (row < tokens)[:, None], (row < rows)[:, None]
        at = row.to(tl.int64)[:, None]
        gate = tl.load(u + at * u_row + column[None, :], inside, other=0.0).to(tl.float32)
        attended = tl.load(a + at * a_row + column[None, :], inside, other=0.0).to(tl.float32)
        of = grad + at * (3 * width) + column[None, :]
        of_s = tl.load(of, inside, other=0.0).to(tl.float32)
        of_a = tl.load(of + width, inside, other=0.0).to(tl.float32)
        of_gated = tl.load(of + 2 * width, inside, other=0.0).to(tl.float32)
        of_s, of_a, of_gated = _drop_all(of_s, of_a, of_gated, seed, row, stream, threshold, kept)

        sigmoid = tl.sigmoid(gate)
        s = gate * sigmoid
        x_hat, factor = normalize(attended, eps, width)
        normed = x_hat * scale + shift
        of_normed = of_gated * s
        dweight += tl.sum(of_normed * x_hat, 0)
        dbias += tl.sum(of_normed, 0)
        of_gate = (of_s + of_gated * normed) * (sigmoid + s * (1 - sigmoid))
        of_a += through_normalize(of_normed * scale, x_hat, factor, width)
        tl.store(du + at * du_row + column[None, :], tl.where(inside, of_gate, 0.0).to(du.dtype.element_ty), stored)
        tl.store(da + at * da_row + column[None, :], tl.where(inside, of_a, 0.0).to(da.dtype.element_ty), stored)
        gated = tl.where(inside, s * normed, 0.0)
        s, attended, gated = _drop_all(s, attended, gated, seed, row, stream, threshold, kept)
        _store_joined(grad, row, s, attended, gated, stored, width, 0)
        first += tl.num_programs(0) * tile
    tl.store(dweights + tl.program_id(0) * width + column, dweight)
    tl.store(dbiases + tl.program_id(0) * width + column, dbias)
