"""Dropout masks from a counter: Philox4x32 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011).

A mask is a function of a seed on the device, a stream (which of the seed's masks) and an element's position. A
backward pass therefore recomputes the mask instead of reading it, and a replayed CUDA graph that draws the seed gets
a new mask each time. Uses seven rounds, the fewest that pass BigCrush in that paper. An element uses 16 of a counter's
128 bits: rates are multiples of 2^-16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import jit, tl

_ROUNDS = 7
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


class Dropout(NamedTuple):
    """rate: share of elements that are dropped. seed: int64 [1], on the device. stream: which of the seed's masks."""

    rate: float
    seed: Tensor
    stream: int


def draw_seed(device: torch.device) -> Tensor:
    """Returns a seed, int64 [1], from torch's generator of that device: the same after the same torch.manual_seed, and
    a new one in each replay of a CUDA graph that captured this call."""
    return torch.randint(2**62, (1,), device=device)


def threshold_of(dropout: Dropout | None) -> int:
    """Returns the number of dropped elements per 65,536."""
    return 0 if dropout is None else round(dropout.rate * 65536)


def scale_of(dropout: Dropout | None) -> float:
    """Returns the factor for kept elements that preserves their mean."""
    return 65536 / (65536 - threshold_of(dropout))


def plain_words(dropout: Dropout, *place: Tensor) -> list[Tensor]:
    """Returns the four 32-bit words of counters (stream, *place), int64 [*]. place: three int64 tensors that broadcast
    to [*]."""
    first, second, third = torch.broadcast_tensors(*place)
    counters = [torch.full_like(first, dropout.stream), first, second, third]
    keys = [dropout.seed & _LOW, dropout.seed >> 32 & _LOW]
    for _ in range(_ROUNDS):
        high = [_high(factor, counters[2 * i]) for i, factor in enumerate(_FACTORS)]
        low = [factor * counters[2 * i] & _LOW for i, factor in enumerate(_FACTORS)]
        counters = [high[1] ^ counters[1] ^ keys[0], low[1], high[0] ^ counters[3] ^ keys[1], low[0]]
        keys = [key + step & _LOW for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return counters


def _high(factor: int, word: Tensor) -> Tensor:
    """Returns the upper 32 bits of a 64-bit product, which int64 cannot hold."""
    return factor * (word >> 16) + (factor * (word & 0xFFFF) >> 16) >> 16


@jit
def dropout_words(seed, stream, first, second, third):
    """Returns the four words of counters (stream, first, second, third), uint32, in the shape of first. first: int32;
    second and third: int32, broadcastable to first. seed: int64, as loaded."""
    zero = first * 0
    return tl.philox(seed, zero + stream, first, zero + second, zero + third, n_rounds=7)


@jit
def dropped(values, word, odd, threshold: tl.constexpr, scale: tl.constexpr):
    """Returns kept values scaled and dropped ones as 0. word: shared by two elements; odd: 1 for its upper half."""
    bits = word << ((1 - odd) * 16).to(tl.uint32)  # the element's bits uppermost; the bits below never decide
    return tl.where(bits >= threshold * 65536, values * scale, 0.0)
