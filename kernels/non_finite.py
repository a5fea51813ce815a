"""A flag on every rank that is raised when any rank's numbers are not finite; updates then change nothing.

A kernel cannot stop an iteration that the host has launched, let alone a captured one. It raises its rank's flag on
all ranks, and every update of weights reads the flags first: see the arguments `watch` of the other kernels. Losses are
known before any update, gradients only with the updates: an update skips an element whose gradient is not finite, and
reports it to the next `raise_flag`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.peer_tensors import PeerTensors

_LOSSES = 1024
_BLOCK = 4096


class Watch(NamedTuple):
    """The flags that an update of weights reads before it changes any, and its report."""

    stopped: Tensor
    """int32 [2^k]: if any element is not zero, nothing changes."""
    bad: Tensor
    """int64 [1], set to 1 by an update that meets a non-finite gradient or square of a gradient; the element then keeps
    its weight and state."""


def raise_flag(losses: Tensor, bad: Tensor, flags: PeerTensors) -> None:
    """Sets flags[r][this rank] = 1 for every rank r if the sum of `losses` is not finite or any of `bad` is not zero; a
    raised flag stays.

    losses: fp32 [n], bad: int64 [m], any strides. flags: of each rank, int32 [2^k], at least one per rank; nobody else
    writes this rank's.
    """
    assert losses.dim() == 1 and losses.dtype == torch.float32, "losses: fp32 [n]"
    assert bad.dim() == 1 and bad.dtype == torch.int64, "bad: int64 [m]"
    assert flag_words(flags.own) >= len(flags), "flags: one for each rank"
    raise_ = triton_raise_flag if losses.is_cuda else plain_raise_flag
    raise_(losses, bad, flags)


def plain_raise_flag(losses: Tensor, bad: Tensor, flags: PeerTensors) -> None:
    """Computes `raise_flag` in PyTorch."""
    raised = flags.own[flags.rank] | ~losses.sum().isfinite() | bad.any()
    for of_rank in flags.tensors:
        of_rank[flags.rank] = raised


def triton_raise_flag(losses: Tensor, bad: Tensor, flags: PeerTensors) -> None:
    """Computes `raise_flag` in one kernel."""
    sizes = (losses.stride(0), bad.stride(0), flags.rank, len(losses), len(bad), len(flags))
    blocks = (_LOSSES, next_power_of_2(len(bad)))
    _raise_flag_kernel[(1,)](losses, bad, flags.own, flags.addresses, *sizes, *blocks)


def clear_gradients(watch: Watch, gradients: Tensor) -> None:
    """Sets gradients to zero for an update that cannot read flags: all gradients if a flag is raised, else the
    non-finite ones, which are reported in `bad`.

    gradients: contiguous, of any shape and dtype.
    """
    assert gradients.is_contiguous() and watch.stopped.dtype == torch.int32, "contiguous gradients, int32 flags"
    clear = triton_clear_gradients if gradients.is_cuda else plain_clear_gradients
    clear(watch, gradients)


def plain_clear_gradients(watch: Watch, gradients: Tensor) -> None:
    """Computes `clear_gradients` in PyTorch."""
    unusable = ~gradients.isfinite()
    watch.bad.masked_fill_(unusable.any() & ~watch.stopped.any(), 1)
    gradients.masked_fill_(unusable | watch.stopped.any(), 0)


def triton_clear_gradients(watch: Watch, gradients: Tensor) -> None:
    """Computes `clear_gradients` in one kernel, which writes only gradients that change."""
    _launch_clear(watch, gradients, gradients)


def cleared_gradients(watch: Watch, gradients: Tensor) -> Tensor:
    """Returns gradients, of any shape, strides and dtype, as `clear_gradients` would leave them, in new memory,
    contiguous."""
    assert watch.stopped.dtype == torch.int32, "int32 flags"
    cleared = triton_cleared_gradients if gradients.is_cuda else plain_cleared_gradients
    return cleared(watch, gradients)


def plain_cleared_gradients(watch: Watch, gradients: Tensor) -> Tensor:
    """Computes `cleared_gradients` in PyTorch."""
    copy = gradients.clone(memory_format=torch.contiguous_format)
    plain_clear_gradients(watch, copy)
    return copy


def triton_cleared_gradients(watch: Watch, gradients: Tensor) -> Tensor:
    """Computes `cleared_gradients` in one kernel, after a copy of gradients that are not contiguous."""
    source = gradients.contiguous()
    out = torch.empty_like(source) if source is gradients else source
    _launch_clear(watch, source, out)
    return out


def _launch_clear(watch: Watch, gradients: Tensor, out: Tensor) -> None:
    if gradients.numel():
        grid = (min(cdiv(gradients.numel(), _BLOCK), 1024),)
        turns = cdiv(gradients.numel(), grid[0] * _BLOCK)
        sizes = (gradients.numel(), len(watch.stopped), turns, out is not gradients, _BLOCK)
        _clear_gradients_kernel[grid](*watch, gradients, out, *sizes)


class GradientTables:
    """The addresses of gradients, for one kernel over all of them; cached as long as the gradients do not move."""

    _KEPT = 4

    def __init__(self) -> None:
        self._of: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor]] = {}

    def of(self, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns address, int64, and number of elements, int32, of each block of at most _BLOCK; the host waits for
        the device if it has not seen these addresses and sizes recently."""
        # Gradients that exist in turn find one another's memory again: an address alone does not tell the size.
        key = tuple((gradient.data_ptr(), gradient.numel()) for gradient in gradients)
        if key not in self._of:
            if len(self._of) == self._KEPT:
                self._of.clear()
            blocks = [
                (gradient.data_ptr() + 4 * start, min(_BLOCK, gradient.numel() - start))
                for gradient in gradients
                for start in range(0, gradient.numel(), _BLOCK)
            ]
            addresses, counts = zip(*blocks, strict=True)
            device = gradients[0].device
            self._of[key] = (
                torch.tensor(addresses, device=device),
                torch.tensor(counts, dtype=torch.int32, device=device),
            )
        return self._of[key]


def report_together(watch: Watch, gradients: Sequence[Tensor], tables: GradientTables) -> None:
    """Reports in `bad`, unless a flag is raised, if any gradient or its square is not finite; changes no gradient. With
    `clear_reported` after all reports, either all gradients are used, or none.

    gradients: fp32, contiguous, on one device. tables: pass the same object for the same gradients, for speed.
    """
    _together(watch, gradients, tables, triton_report_together, plain_report_together)


def clear_reported(watch: Watch, gradients: Sequence[Tensor], tables: GradientTables) -> None:
    """Sets all gradients to zero if a flag is raised or anything is reported in `bad`. Arguments: see
    `report_together`."""
    _together(watch, gradients, tables, triton_clear_reported, plain_clear_reported)


_Together = Callable[[Watch, Sequence[Tensor], GradientTables], None]


def _together(
    watch: Watch, gradients: Sequence[Tensor], tables: GradientTables, triton: _Together, plain: _Together
) -> None:
    assert all(gradient.is_contiguous() for gradient in gradients), "contiguous gradients"
    assert all(gradient.dtype == torch.float32 for gradient in gradients), "fp32 gradients"
    if gradients:
        (triton if gradients[0].is_cuda else plain)(watch, gradients, tables)


def plain_report_together(watch: Watch, gradients: Sequence[Tensor], tables: GradientTables) -> None:
    """Computes `report_together` in PyTorch."""
    whole = torch.stack([(gradient * gradient).isfinite().all() for gradient in gradients]).all()
    watch.bad.masked_fill_(~whole & ~watch.stopped.any(), 1)


def plain_clear_reported(watch: Watch, gradients: Sequence[Tensor], tables: GradientTables) -> None:
    """Computes `clear_reported` in PyTorch."""
    for gradient in gradients:
        gradient.masked_fill_(watch.stopped.any() | watch.bad.any(), 0)


def triton_report_together(watch: Watch, gradients: Sequence[Tensor], tables: GradientTables) -> None:
    """Computes `report_together` in one kernel."""
    _launch_together(watch, gradients, tables, clears=False)


def triton_clear_reported(watch: Watch, gradients: Sequence[Tensor], tables: GradientTables) -> None:
    """Computes `clear_reported` in one kernel, which ends at once if there is nothing to clear."""
    _launch_together(watch, gradients, tables, clears=True)


def _launch_together(watch: Watch, gradients: Sequence[Tensor], tables: GradientTables, clears: bool) -> None:
    addresses, counts = tables.of(gradients)
    sizes = (len(watch.stopped), clears, _BLOCK)
    _together_kernel[(len(counts),)](*watch, gradients[0], addresses, counts, *sizes)


@jit
def is_stopped(stopped, flags: tl.constexpr):
    """Returns, within other kernels, whether any of `flags` flags is raised."""
    at = tl.arange(0, flags)
    return tl.max(tl.load(stopped + at), 0) != 0


def watch_of(watch: Watch | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Returns flags, `bad` and the number of flags, for kernels; 0 flags without a watch."""
    return (None, None, 0) if watch is None else (*watch, flag_words(watch.stopped))


def changed(watch: Watch | None, state: Tensor, weights: Tensor, new_state: Tensor, new_weights: Tensor) -> None:
    """Writes new values in plain updates, except where the state would not be finite, which is reported; all values
    without a watch."""
    if watch is not None:
        whole = new_state.isfinite()
        watch.bad.masked_fill_(~whole.all(), 1)
        new_state, new_weights = torch.where(whole, new_state, state), torch.where(whole, new_weights, weights)
    state.copy_(new_state)
    weights.copy_(new_weights)


def flag_words(stopped: Tensor) -> int:
    """Returns the number of flags that `is_stopped` reads; it must be a power of two."""
    assert stopped.dtype == torch.int32 and len(stopped) == next_power_of_2(len(stopped)), "flags: int32 [2^k]"
    return len(stopped)


@jit
def _raise_flag_kernel(
    losses,
    bad,
    own,
    addresses,
    stride,
    bad_stride,
    rank,
    count: tl.constexpr,
    bad_count,
    ranks: tl.constexpr,
    block: tl.constexpr,
    bad_block: tl.constexpr,
) -> None:
    total = tl.zeros([block], tl.float32)
    for start in range(0, count, block):
        at = start + tl.arange(0, block)
        total += tl.load(losses + at.to(tl.int64) * stride, at < count, other=0.0)
    total = tl.sum(total, 0)
    finite = tl.abs(total) < float("inf")  # false for NaN too
    at = tl.arange(0, bad_block)
    told = tl.max((tl.load(bad + at * bad_stride, at < bad_count, other=0) != 0).to(tl.int32), 0)
    raised = tl.load(own + rank) | tl.where(finite, 0, 1) | told
    for peer in tl.static_range(ranks):
        flags = tl.load(addresses + peer).to(own.dtype)
        tl.store(flags + rank, raised)


@jit
def _together_kernel(
    stopped, bad, like, addresses, counts, flags: tl.constexpr, clears: tl.constexpr, block: tl.constexpr
) -> None:
    stops = is_stopped(stopped, flags)
    at = tl.arange(0, block)
    gradient = tl.load(addresses + tl.program_id(0)).to(like.dtype) + at
    mask = at < tl.load(counts + tl.program_id(0))
    if clears:
        if stops | (tl.load(bad) != 0):
            tl.store(gradient, tl.zeros([block], tl.float32), mask)
    else:
        g = tl.load(gradient, mask, other=0.0)
        whole = g * g < float("inf")  # false for NaN too
        tl.store(bad + at * 0, tl.full([block], 1, tl.int64), mask & (whole == 0) & (stops == 0))


@jit
def _clear_gradients_kernel(
    stopped,
    bad,
    gradients,
    out,
    count,
    flags: tl.constexpr,
    turns: tl.constexpr,
    copies: tl.constexpr,
    block: tl.constexpr,
) -> None:
    stops = is_stopped(stopped, flags)
    for turn in range(turns):
        at = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * block + tl.arange(0, block)
        mask = at < count
        g = tl.load(gradients + at, mask, other=0.0)
        unusable = mask & ((tl.abs(g.to(tl.float32)) < float("inf")) == 0)
        tl.store(bad + at * 0, at * 0 + 1, unusable & (stops == 0))
        if copies:
            tl.store(out + at, tl.where(unusable | stops, 0.0, g).to(out.dtype.element_ty), mask)
        else:
            tl.store(out + at, tl.zeros([block], out.dtype.element_ty), unusable | (mask & stops))
