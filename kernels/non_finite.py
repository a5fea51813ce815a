"""A flag on every rank that says whether any rank's loss was ever not finite, and what updates do then: nothing.

A kernel cannot stop the iteration that the host has launched, let alone a captured one. It raises its rank's flag on
all ranks, and every update of weights reads the flags first: see the arguments `stopped` of the other kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.peer_tensors import PeerTensors

_LOSSES = 1024
_BLOCK = 4096


def raise_flag(losses: Tensor, flags: PeerTensors) -> None:
    """flags[r][this rank] = 1 for every rank r where the sum of `losses` is not finite; a raised flag stays.

    losses: fp32 [n], of any stride. flags: of each rank, int32 [2^k], at least as many as ranks; nobody else writes
    this rank's.
    """
    assert losses.dim() == 1 and losses.dtype == torch.float32, "losses: fp32 [n]"
    assert flag_words(flags.own) >= len(flags), "flags: one for each rank"
    raise_ = triton_raise_flag if losses.is_cuda else plain_raise_flag
    raise_(losses, flags)


def plain_raise_flag(losses: Tensor, flags: PeerTensors) -> None:
    """What `raise_flag` does, in PyTorch."""
    raised = flags.own[flags.rank] | ~losses.sum().isfinite()
    for of_rank in flags.tensors:
        of_rank[flags.rank] = raised


def triton_raise_flag(losses: Tensor, flags: PeerTensors) -> None:
    """What `raise_flag` does, in one kernel."""
    sizes = (losses.stride(0), flags.rank, len(losses), len(flags), _LOSSES)
    _raise_flag_kernel[(1,)](losses, flags.own, flags.addresses, *sizes)


def clear_if_stopped(stopped: Tensor, gradients: Tensor) -> None:
    """Set gradients to zero where any flag is raised, for an update that cannot read flags.

    stopped: int32 [n]. gradients: contiguous, of any shape and dtype.
    """
    assert gradients.is_contiguous() and stopped.dtype == torch.int32, "contiguous gradients, int32 flags"
    clear = triton_clear_if_stopped if gradients.is_cuda else plain_clear_if_stopped
    clear(stopped, gradients)


def plain_clear_if_stopped(stopped: Tensor, gradients: Tensor) -> None:
    """What `clear_if_stopped` does, in PyTorch."""
    gradients.masked_fill_(stopped.any(), 0)


def triton_clear_if_stopped(stopped: Tensor, gradients: Tensor) -> None:
    """What `clear_if_stopped` does, in one kernel, which ends at once where nothing is to be done."""
    if gradients.numel():
        grid = (min(cdiv(gradients.numel(), _BLOCK), 1024),)
        turns = cdiv(gradients.numel(), grid[0] * _BLOCK)
        _clear_if_stopped_kernel[grid](stopped, gradients, gradients.numel(), len(stopped), turns, _BLOCK)


@jit
def is_stopped(stopped, flags: tl.constexpr):
    """For other kernels: whether any of so many flags is raised."""
    at = tl.arange(0, flags)
    return tl.max(tl.load(stopped + at), 0) != 0


def flag_words(stopped: Tensor | None) -> int:
    """Returns how many flags `is_stopped` reads; they must be a power of two."""
    if stopped is None:
        return 0
    assert stopped.dtype == torch.int32 and len(stopped) == next_power_of_2(len(stopped)), "flags: int32 [2^k]"
    return len(stopped)


@jit
def _raise_flag_kernel(
    losses, own, addresses, stride, rank, count: tl.constexpr, ranks: tl.constexpr, block: tl.constexpr
) -> None:
    total = tl.zeros([block], tl.float32)
    for start in range(0, count, block):
        at = start + tl.arange(0, block)
        total += tl.load(losses + at.to(tl.int64) * stride, at < count, other=0.0)
    total = tl.sum(total, 0)
    finite = tl.abs(total) < float("inf")  # false for NaN too
    raised = tl.load(own + rank) | tl.where(finite, 0, 1)
    for peer in tl.static_range(ranks):
        flags = tl.load(addresses + peer).to(own.dtype)
        tl.store(flags + rank, raised)


@jit
def _clear_if_stopped_kernel(
    stopped, gradients, count, flags: tl.constexpr, turns: tl.constexpr, block: tl.constexpr
) -> None:
    if is_stopped(stopped, flags):
        for turn in range(turns):
            at = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * block + tl.arange(0, block)
            tl.store(gradients + at, tl.zeros([block], gradients.dtype.element_ty), at < count)
