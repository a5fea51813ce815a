"""SplitMix64's hash (Steele, Lea, Flood, OOPSLA 2014), in PyTorch and for Triton kernels."""

from __future__ import annotations

from torch import Tensor

from dlrm_bench.kernels._triton import jit, tl


# torch has no unsigned arithmetic on int64, but its products wrap modulo 2^64, so the constants are given as the signed
# integers with the same bits.
def signed(x: int) -> int:
    """Returns the signed integer of the same 64 bits."""
    return (x + 2**63) % 2**64 - 2**63


GOLDEN = signed(0x9E3779B97F4A7C15)
"""Step of SplitMix64's counter."""
MIX_1 = signed(0xBF58476D1CE4E5B9)
MIX_2 = signed(0x94D049BB133111EB)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Returns the logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Returns the hash of int64 numbers; that of 0 is 0."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


@jit
def mix_kernel(x, mix_1: tl.constexpr, mix_2: tl.constexpr):
    """Computes the hash of int64 numbers, for kernels; mix_1, mix_2: its factors."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * mix_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * mix_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
