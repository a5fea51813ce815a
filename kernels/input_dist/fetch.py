"""Fetches the next batch that the host has named: a copy from any pinned memory, within a CUDA graph.

The host puts addresses into a ring in pinned memory. The device counts the addresses taken, reads the next one and
copies from there over PCIe with a kernel: no launch contains the source, so the host neither launches a copy nor waits
for one.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import jit, tl

# 8 programs have 128 KiB in flight: enough for PCIe 5.0 at 2 us latency, on few multiprocessors.
_PROGRAMS, _BLOCK, _WARPS = 8, 4096, 8


def fetch_next(addresses: Tensor, taken: Tensor, out: Tensor, is_new: Tensor | None = None) -> None:
    """Copies out.numel() elements from address number `taken` of the ring to `out`, if it is not 0, and counts it.
    is_new: set to 1, or to 0 if the address is 0.

    addresses: int64 [size], a ring in pinned memory; they point to int32 in pinned memory, 16-byte aligned. taken:
    int64, one element, on out's device; is_new: int32, likewise. out: int32, contiguous, 16-byte aligned. An address
    and its memory must not change until the copy is done.
    """
    assert addresses.dtype == taken.dtype == torch.int64 and taken.numel() == 1, "addresses and their count: int64"
    assert is_new is None or (is_new.dtype == torch.int32 and is_new.numel() == 1), "is_new: int32, one element"
    assert out.dtype == torch.int32 and out.is_contiguous() and out.data_ptr() % 16 == 0, "out: int32, on 16 bytes"
    assert not out.is_cuda or addresses.is_pinned(), "addresses: in pinned memory"
    fetch = triton_fetch_next if out.is_cuda else plain_fetch_next
    fetch(addresses, taken, out, is_new)


def plain_fetch_next(addresses: Tensor, taken: Tensor, out: Tensor, is_new: Tensor | None = None) -> None:
    """Computes `fetch_next` on the CPU."""
    address = addresses[int(taken) % len(addresses)].item()
    if address:
        ctypes.memmove(out.data_ptr(), int(address), out.nbytes)
    if is_new is not None:
        is_new.fill_(address != 0)
    taken += 1


def triton_fetch_next(addresses: Tensor, taken: Tensor, out: Tensor, is_new: Tensor | None = None) -> None:
    """Computes `fetch_next` in a kernel that copies and one that counts."""
    _fetch_next_kernel[(_PROGRAMS,)](
        addresses, taken, out, is_new, len(addresses), out.numel(), _PROGRAMS * _BLOCK, _BLOCK, num_warps=_WARPS
    )
    taken += 1


@jit
def _fetch_next_kernel(addresses, taken, out, is_new, size, count, stride: tl.constexpr, block: tl.constexpr) -> None:
    # Bypass the caches (.cv), which may hold old contents of these host addresses.
    address = tl.load(addresses + tl.load(taken) % size, cache_modifier=".cv")
    source = tl.multiple_of(address.to(out.dtype), 16)
    start = tl.program_id(0) * block
    if is_new is not None:
        tl.store(is_new, (address != 0).to(tl.int32), start == 0)
    while (address != 0) & (start < count):
        at = start + tl.arange(0, block)
        tl.store(out + at, tl.load(source + at, at < count, cache_modifier=".cv"), at < count)
        start += stride
