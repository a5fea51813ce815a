"""Fetches the next batch that the host has named: a copy from pinned memory of any source, within a CUDA graph.

The host puts addresses into a ring in pinned memory. The device counts those that it has taken, reads the next address
and copies from there over PCIe by a kernel: no launch names the source, so the host launches no copy, and waits for
none.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import jit, tl

# 8 programs have 128 KiB in flight: enough for PCIe 5.0 at 2 us, and few multiprocessors.
_PROGRAMS, _BLOCK, _WARPS = 8, 4096, 8


def fetch_next(addresses: Tensor, taken: Tensor, out: Tensor, is_new: Tensor | None = None) -> None:
    """Copies out.numel() elements from address number `taken` of the ring to `out`, if it is not 0, and counts it.
    is_new: becomes 1, or 0 where the address is 0.

    addresses: int64 [size], a ring in pinned memory; of int32 in pinned memory on 16 bytes. taken: int64, one element,
    on out's device; is_new: int32, likewise. out: int32, contiguous, on 16 bytes. An address and its memory stay
    unchanged until this is done.
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
    # Past the caches (.cv), which may hold the former content of these host addresses.
    address = tl.load(addresses + tl.load(taken) % size, cache_modifier=".cv")
    source = tl.multiple_of(address.to(out.dtype), 16)
    start = tl.program_id(0) * block
    if is_new is not None:
        tl.store(is_new, (address != 0).to(tl.int32), start == 0)
    while (address != 0) & (start < count):
        at = start + tl.arange(0, block)
        tl.store(out + at, tl.load(source + at, at < count, cache_modifier=".cv"), at < count)
        start += stride
