"""Outputs of Triton kernels in e4m3 (kernels.dense.fp8.Fp8) in place of bf16 or fp32."""

from __future__ import annotations

from torch import Tensor

from dlrm_bench.kernels._triton import jit, tl
from dlrm_bench.kernels.dense.fp8 import E4M3, Fp8


def values_of(out: Tensor | Fp8) -> Tensor:
    """Returns the memory of an output in any format."""
    return out.values if isinstance(out, Fp8) else out


def take(out: Tensor | Fp8, values: Tensor) -> None:
    """Stores `values` in an output in any format, in PyTorch."""
    if isinstance(out, Fp8):
        out.take(values)
    else:
        out.copy_(values)


def output_of(out: Tensor | Fp8) -> tuple[Tensor, Tensor, float, bool]:
    """Returns a kernel's arguments `out`, `tally`, `scale` (0: not in e4m3) and `counts` (whether there is a tally)."""
    if not isinstance(out, Fp8):
        return out, out, 0.0, False
    assert out.values.dtype == E4M3, "eight bits: e4m3"
    return out.values, out.values if out.tally is None else out.tally, out.scale, out.tally is not None


@jit
def rounded(values, scale: tl.constexpr, kind: tl.constexpr):
    """Returns values * scale in e4m3, saturated, NaN as NaN, or the values in another format `kind` if scale is 0."""
    if scale > 0:
        values = tl.clamp(values * scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return values.to(kind)


@jit
def too_large(values, scale: tl.constexpr):
    """Returns 1 for each number that e4m3 cannot represent, NaN included; else 0."""
    return tl.where(tl.abs(values * scale) <= 448.0, 0, 1)


@jit
def not_finite(values):
    """Returns 1 for each number that is not finite, else 0."""
    return tl.where(tl.abs(values) < float("inf"), 0, 1)


@jit
def total(counts):
    """Returns the sum of a block of two dimensions."""
    return tl.sum(tl.sum(counts, 1), 0)


@jit
def add_to_tally(tally, beyond, lost):
    """Adds to both counts. beyond: all numbers that e4m3 cannot represent; lost: those that are not finite."""
    tl.atomic_add(tally, (beyond - lost).to(tl.int64))
    tl.atomic_add(tally + 1, lost.to(tl.int64))
