"""Adagrad over one rank's slice of flat dense weights: reduce-scatter, update and all-gather in one kernel."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._cuda import Kernel, available
from dlrm_bench.kernels._triton import cdiv, jit, tl
from dlrm_bench.kernels.non_finite import Watch, changed, is_stopped, watch_of
from dlrm_bench.kernels.peer_tensors import PeerTensors

# The fastest for a whole iteration on 4 x H200, where this kernel runs beside the backward: more programs finish sooner
# but take multiprocessors from GEMMs, each of whose blocks needs one.
_PROGRAMS, _BLOCK, _WARPS = 24, 4096, 16

_SOURCE = Path(__file__).with_suffix(".cu")
# Threads of a block that compute, and the maximum shared memory of its stages.
_THREADS, _STAGES_BYTES = 256, 196_608
_MOST_RANKS = 8


class ShardedAdagrad(NamedTuple):
    """Updates elements [first, first + n) with the sum of all ranks' gradients, and writes them to all ranks. In place.

    g = sum of grads[i], in fp32 and rank order; state[i] += g^2; master[i] -= lr * g / (sqrt(state[i]) + eps);
    workings[first + i] = master[i], rounded, on every rank.

    All tensors are contiguous, grads and workings 16-byte aligned; `first` and n are ideally multiples of 16. The
    caller puts a barrier of all ranks before this call, so that all gradients are written and no rank still reads
    weights, and one after it, before any rank reads weights or writes gradients.
    """

    master: Tensor
    """fp32 [n]; if workings are fp32, it may be this rank's slice of its own workings."""
    state: Tensor
    """fp32 [n]."""
    grads: PeerTensors
    """bf16 or fp32 [n]: each rank's gradient for this slice."""
    workings: PeerTensors
    """bf16 or fp32 [N], N >= first + n."""
    first: int
    learning_rate: Tensor
    """fp32, one element, on the device."""
    eps: float
    watch: Watch | None = None
    """See non_finite.py; its flags are raised before the first of the two barriers."""

    def launch(self) -> None:
        """Checks the arguments and updates."""
        master, state, grads, flat = self.master, self.state, self.grads, self.workings.own
        assert master.shape == state.shape and master.dim() == 1, "master and state: [n]"
        assert master.is_contiguous() and state.is_contiguous(), "flat buffers"
        assert master.dtype == state.dtype == torch.float32, "master and state: fp32"
        assert len(grads) == len(self.workings), "gradients and weights: of the same ranks"
        assert grads.own.shape == master.shape and grads.own.is_contiguous(), "gradients: [n]"
        assert {grads.own.dtype, flat.dtype} <= {torch.bfloat16, torch.float32}, "gradients and weights: bf16 or fp32"
        assert flat.dim() == 1 and flat.is_contiguous(), "weights: [N]"
        assert 0 <= self.first <= flat.numel() - master.numel(), "the slice must lie within the flat buffers"
        rate = self.learning_rate
        assert rate.numel() == 1 and rate.device == master.device, "learning rate: a device scalar"
        assert rate.dtype == torch.float32, f"learning rate: fp32, not {rate.dtype}"
        if not master.is_cuda:
            self.plain()
        elif self._in_whole_accesses():
            self.cuda()
        else:
            self.triton()

    def _in_whole_accesses(self) -> bool:
        width = 16 // self.grads.own.itemsize
        if self.grads.own.dtype != self.workings.own.dtype or len(self.grads) > _MOST_RANKS:
            return False
        return available() and self.first % width == 0 and self.master.numel() % width == 0

    def plain(self) -> None:
        """Updates in PyTorch."""
        if self.watch is not None and self.watch.stopped.any():
            return
        g = torch.zeros_like(self.master)
        for grad in self.grads.tensors:
            g += grad.to(g)
        new_state = self.state + g * g
        new_master = self.master - self.learning_rate * g / (new_state.sqrt() + self.eps)
        changed(self.watch, self.state, self.master, new_state, new_master)
        for working in self.workings.tensors:
            working.narrow(0, self.first, len(g)).copy_(self.master)

    def triton(self) -> None:
        """Updates in one kernel."""
        grads, workings, count = self.grads, self.workings, self.master.numel()
        assert all(t.data_ptr() % 16 == 0 for t in (*grads.tensors, *workings.tensors)), "buffers: 16-byte aligned"
        if count:
            programs = min(_PROGRAMS, cdiv(count, _BLOCK))
            stopped, bad, flags = watch_of(self.watch)
            _sharded_adagrad_kernel[(programs,)](
                self.master,
                self.state,
                grads.own,
                grads.addresses,
                workings.own,
                workings.addresses,
                self.first,
                self.learning_rate,
                stopped,
                bad,
                self.eps,
                count,
                flags,
                len(grads),
                cdiv(count, programs * _BLOCK),
                _BLOCK,
                num_warps=_WARPS,
            )

    def cuda(self, blocks: int = _PROGRAMS, threads: int = _THREADS, stages: int = 0) -> None:
        """Updates in one kernel for Hopper GPUs with more loads in flight; up to eight ranks, `first` and n multiples
        of a 16-byte access."""
        master, grads, workings, own = self.master, self.grads, self.workings, self.workings.own
        width = 16 // own.itemsize
        assert own.dtype == grads.own.dtype, "gradients and weights of one dtype"
        assert master.numel() % width == self.first % width == 0, "first and n: whole accesses of 16 bytes"
        aligned = (master, self.state, *grads.tensors, *workings.tensors)
        assert all(t.data_ptr() % 16 == 0 for t in aligned), "16-byte aligned"
        if master.numel() == 0:
            return
        tensors = (master, self.state, grads.addresses, workings.addresses, self.learning_rate)
        *watched, flags = watch_of(self.watch)
        pointers = [None if t is None else t.data_ptr() for t in (*tensors, *watched)]
        arguments = _Arguments(*pointers, flags, self.eps, self.first, master.numel() // width)
        kernel = _kernel(len(grads), own.dtype == torch.bfloat16, threads, stages, master.device)
        kernel.launch(min(blocks, cdiv(master.numel(), width * threads)), arguments)


sharded_adagrad = function(ShardedAdagrad, ShardedAdagrad.launch)
plain_sharded_adagrad = function(ShardedAdagrad, ShardedAdagrad.plain)
triton_sharded_adagrad = function(ShardedAdagrad, ShardedAdagrad.triton)
cuda_sharded_adagrad = function(ShardedAdagrad, ShardedAdagrad.cuda)


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
    # Alignment, the stages, barriers.
    shared_bytes = 128 + stages * (stage_bytes + 16)
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "sharded_adagrad", defines, threads + 32, shared_bytes)


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
        # This rank's tensors give the addresses their pointer type; alignment is a hint on the pointer, because the
        # cast loses the integer's.
        g = tl.zeros([block], tl.float32)
        for rank in tl.static_range(ranks):  # unrolled: the loads of all ranks are in flight together
            grad = tl.multiple_of(tl.load(grads + rank).to(own_grad.dtype), 16)
            g += tl.load(grad + at, mask).to(tl.float32)
        s = tl.load(state + at, mask) + g * g
        w = tl.load(master + at, mask) - tl.div_rn(rate * g, tl.sqrt_rn(s) + eps)
        if flags:
            whole = s < float("inf")  # false for NaN too; s is never negative
            tl.store(bad + at * 0, at * 0 + 1, mask & (whole == 0))
            mask = mask & whole
        tl.store(state + at, s, mask)
        tl.store(master + at, w, mask)
        for rank in tl.static_range(ranks):
            working = tl.multiple_of(tl.load(workings + rank).to(own_working.dtype), 16)
            tl.store(working + first + at, w, mask)
