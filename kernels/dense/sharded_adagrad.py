"""Adagrad over one rank's slice of flat dense weights: reduce-scatter, update and all-gather in one kernel."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import Kernel, available
from dlrm_bench.kernels._triton import cdiv, jit, tl
from dlrm_bench.kernels.non_finite import Watch, changed, is_stopped, watch_of
from dlrm_bench.kernels.peer_tensors import PeerTensors

# The fastest of a whole iteration on 4 x H200, where this runs beside the backward: more programs end sooner and leave
# GEMMs, whose blocks each want a multiprocessor, too few of those.
_PROGRAMS, _BLOCK, _WARPS = 24, 4096, 16

_SOURCE = Path(__file__).with_suffix(".cu")
# Threads of a block that compute, and the shared memory that its stages may take.
_THREADS, _STAGES_BYTES = 256, 196_608
_MOST_RANKS = 8


def sharded_adagrad(
    master: Tensor,
    state: Tensor,
    grads: PeerTensors,
    workings: PeerTensors,
    first: int,
    learning_rate: Tensor,
    eps: float,
    watch: Watch | None = None,
) -> None:
    """Update elements [first, first + n) with the sum of all ranks' gradients, and write them to all ranks.

    g = sum of grads[i], in fp32 and rank order; state[i] += g^2; master[i] -= lr * g / (sqrt(state[i]) + eps);
    workings[first + i] = master[i], rounded, on every rank. In place.

    master, state: fp32 [n]. grads: bf16 or fp32 [n], each rank's for this slice. workings: bf16 or fp32 [N],
    N >= first + n. learning_rate: fp32, one element, on the device. All contiguous, grads and workings 16-byte aligned;
    best `first` and n multiples of 16. Where workings are fp32, master may be the slice itself of this rank's own. The
    caller puts a barrier of all ranks before this, so that all gradients are written and nobody reads weights any more,
    and one after it, before anybody reads weights or writes gradients. watch: see non_finite.py; its
    flags are raised before the first of these barriers.
    """
    assert master.shape == state.shape and master.dim() == 1, "master and state: [n]"
    assert master.is_contiguous() and state.is_contiguous(), "flat buffers"
    assert master.dtype == state.dtype == torch.float32, "master and state: fp32"
    assert len(grads) == len(workings), "gradients and weights of the same ranks"
    flat = workings.own
    assert grads.own.shape == master.shape and grads.own.is_contiguous(), "gradients: [n]"
    assert flat.dim() == 1 and flat.is_contiguous(), "weights: [N]"
    assert 0 <= first <= flat.numel() - master.numel(), "a slice of the flat buffers"
    assert learning_rate.numel() == 1 and learning_rate.device == master.device, "learning rate: a device scalar"
    update = plain_sharded_adagrad
    if master.is_cuda:
        update = cuda_sharded_adagrad if _in_whole_accesses(master, grads, workings, first) else triton_sharded_adagrad
    update(master, state, grads, workings, first, learning_rate, eps, watch)


def _in_whole_accesses(master: Tensor, grads: PeerTensors, workings: PeerTensors, first: int) -> bool:
    width = 16 // grads.own.itemsize
    if grads.own.dtype != workings.own.dtype or len(grads) > _MOST_RANKS:
        return False
    return available() and first % width == 0 and master.numel() % width == 0


def plain_sharded_adagrad(
    master: Tensor,
    state: Tensor,
    grads: PeerTensors,
    workings: PeerTensors,
    first: int,
    learning_rate: Tensor,
    eps: float,
    watch: Watch | None = None,
) -> None:
    """What `sharded_adagrad` does, in PyTorch."""
    if watch is not None and watch.stopped.any():
        return
    g = torch.zeros_like(master)
    for grad in grads.tensors:
        g += grad.to(g)
    new_state = state + g * g
    changed(watch, state, master, new_state, master - learning_rate * g / (new_state.sqrt() + eps))
    for working in workings.tensors:
        working.narrow(0, first, len(g)).copy_(master)


def triton_sharded_adagrad(
    master: Tensor,
    state: Tensor,
    grads: PeerTensors,
    workings: PeerTensors,
    first: int,
    learning_rate: Tensor,
    eps: float,
    watch: Watch | None = None,
) -> None:
    """What `sharded_adagrad` does, in one kernel."""
    assert all(t.data_ptr() % 16 == 0 for t in (*grads.tensors, *workings.tensors)), "buffers: 16-byte aligned"
    if master.numel():
        programs = min(_PROGRAMS, cdiv(master.numel(), _BLOCK))
        stopped, bad, flags = watch_of(watch)
        _sharded_adagrad_kernel[(programs,)](
            master,
            state,
            grads.own,
            grads.addresses,
            workings.own,
            workings.addresses,
            first,
            learning_rate,
            stopped,
            bad,
            eps,
            master.numel(),
            flags,
            len(grads),
            cdiv(master.numel(), programs * _BLOCK),
            _BLOCK,
            num_warps=_WARPS,
        )


class _Arguments(ctypes.Structure):
    """sharded_adagrad.cu's struct Arguments."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("master", "state", "grads", "workings", "learning_rate")),
        ("stopped", ctypes.c_void_p),
        ("bad", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("first", ctypes.c_longlong),
        ("count", ctypes.c_int),
    )


@functools.cache
def _kernel(ranks: int, bf16: bool, threads: int, stages: int, device: torch.device) -> Kernel:
    stage_bytes = threads * ((64 if bf16 else 32) + 16 * ranks)
    stages = stages or min(8, _STAGES_BYTES // stage_bytes)
    defines = {"RANKS": ranks, "WEIGHTS_BF16": int(bf16), "THREADS": threads, "STAGES": stages}
    # What aligns the stages, the stages, barriers.
    shared_bytes = 128 + stages * (stage_bytes + 16)
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "sharded_adagrad", defines, threads + 32, shared_bytes)


def cuda_sharded_adagrad(
    master: Tensor,
    state: Tensor,
    grads: PeerTensors,
    workings: PeerTensors,
    first: int,
    learning_rate: Tensor,
    eps: float,
    watch: Watch | None = None,
    blocks: int = _PROGRAMS,
    threads: int = _THREADS,
    stages: int = 0,
) -> None:
    """What `sharded_adagrad` does, in one kernel for Hopper GPUs with more on its way at a time; up to eight ranks,
    `first` and n in whole accesses of 16 bytes."""
    own = workings.own
    width = 16 // own.itemsize
    assert own.dtype == grads.own.dtype, "gradients and weights of one dtype"
    assert master.numel() % width == first % width == 0, "whole accesses of 16 bytes"
    assert all(t.data_ptr() % 16 == 0 for t in (master, state, *grads.tensors, *workings.tensors)), "16-byte aligned"
    if master.numel() == 0:
        return
    tensors = (master, state, grads.addresses, workings.addresses, learning_rate)
    *watched, flags = watch_of(watch)
    pointers = [None if t is None else t.data_ptr() for t in (*tensors, *watched)]
    arguments = _Arguments(*pointers, flags, eps, first, master.numel() // width)
    kernel = _kernel(len(grads), own.dtype == torch.bfloat16, threads, stages, master.device)
    kernel.launch(min(blocks, cdiv(master.numel(), width * threads)), arguments)


@jit
def _sharded_adagrad_kernel(
    master,
    state,
    own_grad,
    grads,
    own_working,
    workings,
    first,
    learning_rate,
    stopped,
    bad,
    eps,
    count,
    flags: tl.constexpr,
    ranks: tl.constexpr,
    turns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    rate = tl.load(learning_rate)
    goes_on = tl.full([block], 1, tl.int1)
    if flags:
        goes_on = goes_on & (is_stopped(stopped, flags) == 0)
    for turn in range(turns):
        at = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * block + tl.arange(0, block)
        mask = (at < count) & goes_on
        # The own tensors give the addresses their pointer type; alignment is a hint on the pointer, as the cast loses
        # the integer's.
        g = tl.zeros([block], tl.float32)
        for rank in tl.static_range(ranks):  # unrolled: the loads of all ranks are in flight together
            grad = tl.multiple_of(tl.load(grads + rank).to(own_grad.dtype), 16)
            g += tl.load(grad + at, mask).to(tl.float32)
        s = tl.load(state + at, mask) + g * g
        w = tl.load(master + at, mask) - tl.div_rn(rate * g, tl.sqrt_rn(s) + eps)
        if flags:
            whole = s < float("inf")  # false for NaN too, and s is never less than 0
            tl.store(bad + at * 0, at * 0 + 1, mask & (whole == 0))
            mask = mask & whole
        tl.store(state + at, s, mask)
        tl.store(master + at, w, mask)
        for rank in tl.static_range(ranks):
            working = tl.multiple_of(tl.load(workings + rank).to(own_working.dtype), 16)
            tl.store(working + first + at, w, mask)
