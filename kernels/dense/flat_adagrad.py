"""Adagrad over one flat buffer of dense weights, which writes the working copy in the same pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._triton import cdiv, jit, tl
from dlrm_bench.kernels.non_finite import Watch, changed, is_stopped, watch_of

_BLOCK = 2048


class FlatAdagrad(NamedTuple):
    """Updates in place: state += grad^2; master -= lr * grad / (sqrt(state) + eps); working = master, rounded.

    All tensors are contiguous; fastest if 16-byte aligned with n a multiple of 16.
    """

    master: Tensor
    """fp32 [n]."""
    state: Tensor
    """fp32 [n]."""
    grad: Tensor
    """bf16 or fp32 [n]."""
    learning_rate: Tensor
    """fp32, one element, on the device."""
    eps: float
    working: Tensor | None = None
    """bf16 [n]."""
    watch: Watch | None = None
    """See non_finite.py."""

    def launch(self) -> None:
        """Checks the arguments and updates."""
        master, tensors = self.master, (self.master, self.state, self.grad, self.working)
        flat = [t for t in tensors if t is not None]
        assert all(t.shape == master.shape and t.dim() == 1 and t.is_contiguous() for t in flat), "flat buffers: [n]"
        assert master.dtype == self.state.dtype == torch.float32, "master and state: fp32"
        assert self.learning_rate.numel() == 1 and self.learning_rate.device == master.device, (
            "learning rate: a device scalar"
        )
        (self.triton if master.is_cuda else self.plain)()

    def plain(self) -> None:
        """Updates in PyTorch."""
        if self.watch is not None and self.watch.stopped.any():
            return
        g = self.grad.float()
        new_state = self.state + g * g
        new_master = self.master - self.learning_rate * g / (new_state.sqrt() + self.eps)
        changed(self.watch, self.state, self.master, new_state, new_master)
        if self.working is not None:
            self.working.copy_(self.master)

    def triton(self) -> None:
        """Updates in one kernel."""
        count = self.master.numel()
        if count:
            stopped, bad, flags = watch_of(self.watch)
            tensors = (self.master, self.state, self.grad, self.working, self.learning_rate, stopped, bad)
            _flat_adagrad_kernel[(cdiv(count, _BLOCK),)](*tensors, self.eps, count, flags, _BLOCK, num_warps=8)


flat_adagrad = function(FlatAdagrad, FlatAdagrad.launch)
plain_flat_adagrad = function(FlatAdagrad, FlatAdagrad.plain)
triton_flat_adagrad = function(FlatAdagrad, FlatAdagrad.triton)


@jit
def _flat_adagrad_kernel(
    master, state, grad, working, learning_rate, stopped, bad, eps, count, flags: tl.constexpr, block: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < count
    if flags:
        mask = mask & (is_stopped(stopped, flags) == 0)
    g = tl.load(grad + at, mask).to(tl.float32)
    s = tl.load(state + at, mask) + g * g
    w = tl.load(master + at, mask) - tl.div_rn(tl.load(learning_rate) * g, tl.sqrt_rn(s) + eps)
    if flags:
        whole = s < float("inf")  # false for NaN too; s is never negative
        tl.store(bad + at * 0, at * 0 + 1, mask & (whole == 0))
        mask = mask & whole
    tl.store(state + at, s, mask)
    tl.store(master + at, w, mask)
    if working is not None:
        tl.store(working + at, w, mask)
