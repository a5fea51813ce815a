"""Adagrad over one flat buffer of dense weights, the working copy written in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl
from dlrm_bench.kernels.non_finite import Watch, changed, is_stopped, watch_of

_BLOCK = 2048


def flat_adagrad(
    master: Tensor,
    state: Tensor,
    grad: Tensor,
    learning_rate: Tensor,
    eps: float,
    working: Tensor | None = None,
    watch: Watch | None = None,
) -> None:
    """state += grad^2; master -= lr * grad / (sqrt(state) + eps); working = master, rounded. In place.

    master, state: fp32 [n]. grad: bf16 or fp32 [n]. working: bf16 [n] or None. learning_rate: fp32, one element, on
    the device. All contiguous; best 16-byte aligned and n a multiple of 16. watch: see
    non_finite.py.
    """
    tensors = [master, state, grad] if working is None else [master, state, grad, working]
    assert all(t.shape == master.shape and t.dim() == 1 and t.is_contiguous() for t in tensors), "flat buffers: [n]"
    assert master.dtype == state.dtype == torch.float32, "master and state: fp32"
    assert learning_rate.numel() == 1 and learning_rate.device == master.device, "learning rate: a device scalar"
    update = triton_flat_adagrad if master.is_cuda else plain_flat_adagrad
    update(master, state, grad, learning_rate, eps, working, watch)


def plain_flat_adagrad(
    master: Tensor,
    state: Tensor,
    grad: Tensor,
    learning_rate: Tensor,
    eps: float,
    working: Tensor | None = None,
    watch: Watch | None = None,
) -> None:
    """What `flat_adagrad` does, in PyTorch."""
    if watch is not None and watch.stopped.any():
        return
    g = grad.float()
    new_state = state + g * g
    changed(watch, state, master, new_state, master - learning_rate * g / (new_state.sqrt() + eps))
    if working is not None:
        working.copy_(master)


def triton_flat_adagrad(
    master: Tensor,
    state: Tensor,
    grad: Tensor,
    learning_rate: Tensor,
    eps: float,
    working: Tensor | None = None,
    watch: Watch | None = None,
) -> None:
    """What `flat_adagrad` does, in one kernel."""
    if master.numel():
        stopped, bad, flags = watch_of(watch)
        tensors = (master, state, grad, working, learning_rate, stopped, bad)
        sizes = (eps, master.numel(), flags, _BLOCK)
        _flat_adagrad_kernel[(cdiv(master.numel(), _BLOCK),)](*tensors, *sizes, num_warps=8)


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
        whole = s < float("inf")  # false for NaN too, and s is never less than 0
        tl.store(bad + at * 0, at * 0 + 1, mask & (whole == 0))
        mask = mask & whole
    tl.store(state + at, s, mask)
    tl.store(master + at, w, mask)
    if working is not None:
        tl.store(working + at, w, mask)
