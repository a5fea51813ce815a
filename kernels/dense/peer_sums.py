"""Sums all ranks' copies of one slice on a node: the reduce-scatter before an exchange between nodes."""

from __future__ import annotations

from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl
from dlrm_bench.kernels.peer_tensors import PeerTensors

_BLOCK = 2048


def peer_sums(peers: PeerTensors, out: Tensor) -> None:
    """Computes out = the sum of all ranks' tensors, in fp32 and rank order, rounded once.

    peers: bf16 or fp32 [n], contiguous, 16-byte aligned. out: bf16 or fp32 [n], contiguous, not one of the peers'. The
    caller puts a barrier of all ranks before this call, so that all tensors are written, and one after it, before any
    rank overwrites them.
    """
    assert peers.own.dim() == 1 and peers.own.is_contiguous(), "tensors: [n]"
    assert out.shape == peers.own.shape and out.is_contiguous(), "the sum: [n]"
    sums = triton_peer_sums if out.is_cuda else plain_peer_sums
    sums(peers, out)


def plain_peer_sums(peers: PeerTensors, out: Tensor) -> None:
    """Computes `peer_sums` in PyTorch."""
    first, *others = peers.tensors
    total = first.float()
    for other in others:
        total = total + other
    out.copy_(total)


def triton_peer_sums(peers: PeerTensors, out: Tensor) -> None:
    """Computes `peer_sums` in one kernel."""
    assert all(t.data_ptr() % 16 == 0 for t in peers.tensors), "tensors: 16-byte aligned"
    if out.numel():
        sizes = (out.numel(), len(peers), _BLOCK)
        _peer_sums_kernel[(cdiv(out.numel(), _BLOCK),)](peers.own, peers.addresses, out, *sizes, num_warps=8)


@jit
def _peer_sums_kernel(own, peers, out, count, ranks: tl.constexpr, block: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < count
    total = tl.zeros([block], tl.float32)
    for rank in tl.static_range(ranks):  # unrolled: the loads of all ranks are in flight together
        # This rank's tensor gives the address its pointer type; alignment is a hint on the pointer, because the cast
        # loses the integer's.
        peer = tl.multiple_of(tl.load(peers + rank).to(own.dtype), 16)
        total += tl.load(peer + at, mask).to(tl.float32)
    tl.store(out + at, total, mask)
