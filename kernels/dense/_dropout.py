"""Dropout masks from a counter: Philox4x32 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011).

A mask is a function of a seed on the device, a stream (which mask of that seed) and an element's place, so that a
backward pass computes it again instead of reading it, and a replayed CUDA graph that draws the seed has a new one each
time. Seven rounds, the fewest that pass BigCrush in that paper. An element has 16 of the 128 bits of a counter: rates
are multiples of 2^-16.
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
    """rate: share of elements that are dropped. seed: int64 [1], on the device. stream: which mask of that seed."""

    rate: float
    seed: Tensor
    stream: int


def draw_seed(device: torch.device) -> Tensor:
    """Returns a seed, int64 [1], of torch's generator of that device: equal ones after equal torch.manual_seed, and a
    new one in each replay of a CUDA graph that this is captured in."""
    return torch.randint(2**62, (1,), device=device)


def threshold_of(dropout: Dropout | None) -> int:
    """Returns how many of 65,536 elements are dropped."""
    return 0 if dropout is None else round(dropout.rate * 65536)


def scale_of(dropout: Dropout | None) -> float:
    """Returns the factor of elements that are kept, so that their mean stays."""
    return 65536 / (65536 - threshold_of(dropout))


def plain_words(dropout: Dropout, *place: Tensor) -> list[Tensor]:
    """Returns the four words of counters (stream, *place), each of 32 bits, int64 [*]. place: three tensors, int64,
    that are broadcast to [*]."""
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
    """Returns the upper 32 bits of a product of 64, which int64 cannot hold."""
    return factor * (word >> 16) + (factor * (word & 0xFFFF) >> 16) >> 16


@jit
def dropout_words(seed, stream, first, second, third):
    """Returns the four words of counters (stream, first, second, third), uint32 of the shape of first, int32; second
    and third: int32 that can be broadcast to it. seed: int64, as loaded."""
    zero = first * 0
    return tl.philox(seed, zero + stream, first, zero + second, zero + third, n_rounds=7)


@jit
def dropped(values, word, odd, threshold: tl.constexpr, scale: tl.constexpr):
    """Returns values, scaled where they are kept, else 0. word: of two elements each; odd: 1 for its upper half."""
    bits = word << ((1 - odd) * 16).to(tl.uint32)  # those of the element upmost; what lies below decides nothing
    return tl.where(bits >= threshold * 65536, values * scale, 0.0)
