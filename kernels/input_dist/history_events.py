"""Events of a packed batch's histories, with fixed shapes and true sizes known only on the device.

A sample's history holds the events of its segment before `end`, and of each pool those from that pool's `first` on
(Packed in dlrm/dlrmv4/data/packed.py). The number of history events before an event is a sum of three counts, which
never decreases along the segment, so a binary search finds the event of each place of a history.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl

_BLOCK = 256
POOLS = 3


def history_events(first: Tensor, end: Tensor, offsets: Tensor, pools: Tensor, events: Tensor) -> None:
    """Writes the event of each place of the joined histories.

    first: int32 [POOLS, B], end: int32 [B], event indices. offsets: int64 [B + 1], start of each sample's history among
    the places. pools: integers [E], 0 to POOLS - 1. events: int32 [T], T at least offsets[B]: later places cycle
    through all E events, so that sums by event meet each of them about equally often.
    """
    count = torch.zeros(POOLS, len(pools) + 1, dtype=torch.int32, device=pools.device)
    of_pool = pools == torch.arange(POOLS, device=pools.device, dtype=pools.dtype)[:, None]
    torch.cumsum(of_pool, 1, dtype=torch.int32, out=count[:, 1:])
    find = triton_history_events if pools.is_cuda else plain_history_events
    find(first.contiguous(), end.contiguous(), offsets, count, events)


def plain_history_events(first: Tensor, end: Tensor, offsets: Tensor, count: Tensor, events: Tensor) -> None:
    """Computes `history_events` in PyTorch. count: int32 [POOLS, E + 1], number of a pool's events before each one."""
    place, size = torch.arange(len(events), device=events.device), count.shape[1] - 1
    sample = torch.searchsorted(offsets[1:], place, right=True).clamp_(max=len(end) - 1)
    wanted = place - offsets[sample] + 1
    of_first = count.gather(1, first.long())[:, sample]  # [POOLS, T]
    low, high = first.amin(0)[sample].long(), end[sample].long() - 1
    for _ in range(size.bit_length()):
        middle = (low + high) // 2
        held = (count[:, middle.clamp(0, size - 1) + 1] - of_first).clamp_(min=0).sum(0)
        enough = held >= wanted
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle + 1)
        low = torch.minimum(low, high)
    events.copy_(torch.where(place < offsets[-1], low, place % size))


def triton_history_events(first: Tensor, end: Tensor, offsets: Tensor, count: Tensor, events: Tensor) -> None:
    """Computes `history_events` in one kernel: one program per 256 places."""
    size = count.shape[1] - 1
    sample_steps = next_power_of_2(len(end) + 1).bit_length()
    _history_events_kernel[(cdiv(len(events), _BLOCK),)](
        first, end, offsets, count, events, len(end), size, len(events), sample_steps, _BLOCK
    )


@jit
def _held(count, at, of_first_0, of_first_1, of_first_2, stride, mask):
    """Returns the number of events of a history before event `at`."""
    zero = at * 0
    held = tl.maximum(tl.load(count + at, mask, other=0) - of_first_0, zero)
    held += tl.maximum(tl.load(count + stride + at, mask, other=0) - of_first_1, zero)
    return held + tl.maximum(tl.load(count + 2 * stride + at, mask, other=0) - of_first_2, zero)


@jit
def _history_events_kernel(
    first, end, offsets, count, events, size, num_events, places,
    sample_steps: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside, stride = place < places, num_events + 1
    low, high = place * 0, place * 0 + size - 1  # search the sample whose history ends after the place
    for _ in range(sample_steps):
        middle = (low + high) // 2
        after = tl.load(offsets + 1 + middle) > place
        high, low = tl.where(after, middle, high), tl.where(after, low, middle + 1)
        low = tl.minimum(low, high)
    sample = low
    real = inside & (place < tl.load(offsets + size))
    wanted = (place - tl.load(offsets + sample)).to(tl.int32) + 1
    first_0 = tl.load(first + sample)
    first_1 = tl.load(first + size + sample)
    first_2 = tl.load(first + 2 * size + sample)
    of_first_0 = tl.load(count + first_0)
    of_first_1 = tl.load(count + stride + first_1)
    of_first_2 = tl.load(count + 2 * stride + first_2)
    low = tl.minimum(tl.minimum(first_0, first_1), first_2)
    high = tl.load(end + sample) - 1
    low, high = tl.where(real, low, 0), tl.where(real, high, 0)
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        enough = _held(count, middle + 1, of_first_0, of_first_1, of_first_2, stride, real) >= wanted
        high, low = tl.where(enough, middle, high), tl.where(enough, low, middle + 1)
        low = tl.minimum(low, high)
    tl.store(events + place, tl.where(real, low, place % num_events), inside)
