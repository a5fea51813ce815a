"""An update as one kernel for all tasks, in Triton; plain_update is its plain twin.

One thread block, or several for a large batch, reads the samples of one task and sums them in float64. The last block
adds the blocks' sums in a fixed order, so that equal inputs give equal results. It then advances the windows of all
slots of its task at once, each by its own cursor on the device: nothing depends on the host, and a replayed graph
continues where the previous replay ended.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .layout import Layout
from .state import MAX_PARTS, Scratch, State

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs kernels in Python, for tests on CPUs."""

triton: Any = None
tl: Any = None
with contextlib.suppress(ImportError):
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")

MAX_TASKS = 64
"""Maximum number of tasks per launch, whose addresses are its arguments; more tasks take further launches."""

_BLOCK = 1024
_SAMPLES_OF_PART = 8192

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""Dtypes of labels, predictions and weights; the kernel identifies a dtype by its index."""

# Values for which the kernel is specialized: an address without alignment, and a number that is neither 1 nor a
# multiple of 16. So one kernel serves all addresses and numbers.
_ANY_ADDRESS = 2**40 + 1
_ANY_NUMBER = 3


def _jit(function: Callable[..., Any]) -> Any:
    """Returns `triton.jit(function)`, or the function itself if Triton is missing: it is then never called."""
    return triton.jit(function) if triton is not None else function


class Launch:
    """One kernel, for batches of certain sizes, strides and dtypes of some tasks.

    tasks: indices into the layout. sizes: of each of these tasks, in elements. strides: of labels, predictions and
    weights of each task in turn, in elements. dtypes: in the same order as strides.
    """

    def __init__(
        self,
        layout: Layout,
        state: State,
        scratch: Scratch,
        tasks: range,
        sizes: list[int],
        strides: list[int],
        dtypes: list[torch.dtype],
    ) -> None:
        kinds = [tuple(DTYPES.index(dtype) for dtype in dtypes[at : at + 3]) for at in range(0, len(dtypes), 3)]
        known = sorted(set(kinds))
        same = len(set(sizes)) == 1
        strided = any(stride != 1 for stride in strides)
        largest = max(sizes)
        parts = min(MAX_PARTS, _power_of_2(-(-largest // _SAMPLES_OF_PART)))
        block = min(_BLOCK, max(128, _power_of_2(largest)))
        self._grid = (len(tasks), parts, 1)
        self._numbers = (tuple(strides) if strided else (_ANY_NUMBER,), tuple(sizes[:1] if same else sizes))
        self._tensors = (*state, *scratch)
        slots = len(layout.sources)
        self._constants = (
            tasks.start,
            len(layout.tasks),
            len(tasks),
            tuple(code for kind in known for code in kind),
            tuple(known.index(kind) for kind in kinds),
            len(known),
            strided,
            same,
            layout.sources,
            slots,
            _power_of_2(slots),
            len(state.batches),
            layout.auc_window,
            layout.validate,
            layout.eta,
            layout.threshold,
            parts,
            MAX_PARTS,
            block,
        )
        self._kernel: Any = _update_kernel
        if not INTERPRETED:
            arguments = ((_ANY_ADDRESS,) * (3 * len(tasks)), *((_ANY_NUMBER,) * len(of) for of in self._numbers))
            self._kernel = _update_kernel.warmup(
                *arguments, *self._tensors, *self._constants, grid=self._grid, num_warps=min(8, block // 64)
            )

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Launches on the current stream. addresses: of labels, predictions and weights of each task in turn."""
        self._kernel[self._grid](addresses, *self._numbers, *self._tensors, *self._constants)


def _power_of_2(number: int) -> int:
    """Returns the smallest power of two that is at least `number` and at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def addresses_of(tensors: list[Tensor]) -> tuple[int, ...]:
    """Returns the addresses of the tensors, for a launch."""
    return tuple(map(Tensor.data_ptr, tensors))


@_jit
def _read(address, at, mask, dtype: tl.constexpr):
    """Returns elements of a tensor at an address, in float64; zero where masked."""
    if dtype == 0:
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask, other=0)
    elif dtype == 1:
        values = tl.load(address.to(tl.pointer_type(tl.float64)) + at, mask, other=0)
    elif dtype == 2:
        values = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask, other=0)
    elif dtype == 3:
        values = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask, other=0)
    elif dtype == 4:
        values = tl.load(address.to(tl.pointer_type(tl.int64)) + at, mask, other=0)
    elif dtype == 5:
        values = tl.load(address.to(tl.pointer_type(tl.int32)) + at, mask, other=0)
    elif dtype == 6:
        values = tl.load(address.to(tl.pointer_type(tl.int16)) + at, mask, other=0)
    elif dtype == 7:
        values = tl.load(address.to(tl.pointer_type(tl.int8)) + at, mask, other=0)
    else:
        values = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask, other=0)
    return values.to(tl.float64)


@_jit
def _read_signal(address, at, mask, kind, role: tl.constexpr, codes: tl.constexpr, kinds: tl.constexpr):
    """Returns labels (role 0), predictions (1) or weights (2) of a task, whose dtypes are those of its kind."""
    if kinds == 1:
        values = _read(address, at, mask, codes[role])
    else:
        values = tl.zeros(at.shape, tl.float64)
        for known in tl.static_range(kinds):
            values += _read(address, at, mask & (kind == known), codes[3 * known + role])
    return values


@_jit
def _add(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@_jit
def _update_kernel(
    addresses,
    strides,
    sizes,
    lifetimes,
    window_sums,
    batches,
    batch_sizes,
    cursors,
    valid,
    samples,
    seen,
    windows,
    auc_rows,
    partial_sums,
    arrivals,
    first_task: tl.constexpr,
    all_tasks: tl.constexpr,
    tasks: tl.constexpr,
    codes: tl.constexpr,
    kind_of: tl.constexpr,
    kinds: tl.constexpr,
    strided: tl.constexpr,
    same_size: tl.constexpr,
    sources: tl.constexpr,
    slots: tl.constexpr,
    padded_slots: tl.constexpr,
    most: tl.constexpr,
    auc_window: tl.constexpr,
    validate: tl.constexpr,
    eta: tl.constexpr,
    threshold: tl.constexpr,
    parts: tl.constexpr,
    max_parts: tl.constexpr,
    block: tl.constexpr,
) -> None:
    own = tl.program_id(0)
    part = tl.program_id(1)
    labels, predictions, weights = addresses[0], addresses[1], addresses[2]
    size, kind = sizes[0], 0
    label_stride, prediction_stride, weight_stride = 1, 1, 1
    if strided:
        label_stride, prediction_stride, weight_stride = strides[0], strides[1], strides[2]
    if kinds > 1:
        kind = kind_of[0]
    for other in tl.static_range(1, tasks):
        mine = own == other
        labels = tl.where(mine, addresses[3 * other], labels)
        predictions = tl.where(mine, addresses[3 * other + 1], predictions)
        weights = tl.where(mine, addresses[3 * other + 2], weights)
        if not same_size:
            size = tl.where(mine, sizes[other], size)
        if strided:
            label_stride = tl.where(mine, strides[3 * other], label_stride)
            prediction_stride = tl.where(mine, strides[3 * other + 1], prediction_stride)
            weight_stride = tl.where(mine, strides[3 * other + 2], weight_stride)
        if kinds > 1:
            kind = tl.where(mine, kind_of[other], kind)
    task = own + first_task

    # Issues the loads for the windows before those for the samples.
    slot = tl.arange(0, padded_slots)
    of_slots = slot < slots
    at_slot = task * slots + slot
    in_step: tl.constexpr = all_tasks * slots
    lifetime = tl.load(lifetimes + at_slot, of_slots, other=0.0)
    window = tl.load(window_sums + at_slot, of_slots, other=0.0)
    first = tl.load(cursors + at_slot, of_slots, other=0)
    count = tl.load(cursors + in_step + at_slot, of_slots, other=0)
    used = tl.load(cursors + 2 * in_step + at_slot, of_slots, other=0)
    limit = tl.load(windows + slot, of_slots, other=0)
    held = of_slots & (count > 0)
    oldest = tl.load(batches + first * in_step + at_slot, held, other=0.0)
    oldest_size = tl.load(batch_sizes + first * in_step + at_slot, held, other=0)
    if auc_window > 0:
        row = tl.load(auc_rows + task)
        before = tl.load(seen + row, row >= 0, other=0)

    taken = size > 0
    lane = tl.arange(0, block)
    if validate:
        nonzero = tl.zeros([block], tl.int32)
        start = size * 0
        while start < size:
            at = start + lane
            weight = _read_signal(
                weights, at.to(tl.int64) * weight_stride, at < size, kind, role=2, codes=codes, kinds=kinds
            )
            nonzero |= (weight != 0.0).to(tl.int32)
            start += block
        taken = tl.max(nonzero, 0) != 0

    low, high = tl.full([block], eta, tl.float64), tl.full([block], 1.0 - eta, tl.float64)
    cut = tl.full([block], threshold, tl.float64)
    s0 = tl.zeros([block], tl.float64)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    start = part * block
    while start < size:
        at = start + lane
        here = at < size
        far = at.to(tl.int64)
        label = _read_signal(labels, far * label_stride, here, kind, role=0, codes=codes, kinds=kinds)
        p = _read_signal(predictions, far * prediction_stride, here, kind, role=1, codes=codes, kinds=kinds)
        weight = _read_signal(weights, far * weight_stride, here, kind, role=2, codes=codes, kinds=kinds)
        inside = tl.where(p < low, low, tl.where(p > high, high, p))  # keeps NaN
        positive, negative = weight * label, weight * (1.0 - label)
        s0 += -positive * tl.log2(inside) - negative * tl.log2(1.0 - inside)
        s1 += weight
        s2 += positive
        s3 += negative
        s4 += p * weight
        s5 += weight * (label - p) * (label - p)
        s6 += positive * label
        s7 += weight * tl.where(tl.where(p >= cut, 1.0, 0.0) == label, 1.0, 0.0)
        if auc_window > 0:
            kept = here & taken & (row >= 0) & (at >= size - auc_window)
            ring = samples + row.to(tl.int64) * (3 * auc_window) + (before + at) % auc_window
            tl.store(ring, p.to(tl.float32), kept)
            tl.store(ring + auc_window, label.to(tl.float32), kept)
            tl.store(ring + 2 * auc_window, weight.to(tl.float32), kept)
        start += parts * block
    s0, s1, s2, s3, s4, s5, s6, s7 = tl.reduce((s0, s1, s2, s3, s4, s5, s6, s7), 0, _add)

    closes = True
    if parts > 1:
        mine = partial_sums + (task * max_parts + part) * 8
        tl.store(mine, s0)
        tl.store(mine + 1, s1)
        tl.store(mine + 2, s2)
        tl.store(mine + 3, s3)
        tl.store(mine + 4, s4)
        tl.store(mine + 5, s5)
        tl.store(mine + 6, s6)
        tl.store(mine + 7, s7)
        tl.debug_barrier()  # all threads' stores before the arrival
        closes = tl.atomic_add(arrivals + task, 1, sem="acq_rel") == parts - 1
        tl.debug_barrier()
        if closes:
            each = partial_sums + (task * max_parts + tl.arange(0, parts)) * 8
            s0 = tl.sum(tl.load(each, volatile=True), 0)
            s1 = tl.sum(tl.load(each + 1, volatile=True), 0)
            s2 = tl.sum(tl.load(each + 2, volatile=True), 0)
            s3 = tl.sum(tl.load(each + 3, volatile=True), 0)
            s4 = tl.sum(tl.load(each + 4, volatile=True), 0)
            s5 = tl.sum(tl.load(each + 5, volatile=True), 0)
            s6 = tl.sum(tl.load(each + 6, volatile=True), 0)
            s7 = tl.sum(tl.load(each + 7, volatile=True), 0)
            tl.store(arrivals + task, 0)

    if closes & taken:
        added = tl.zeros([padded_slots], tl.float64)
        for j in tl.static_range(slots):
            sum_of_slot = (s0, s1, s2, s3, s4, s5, s6, s7)[sources[j]]
            added = tl.where(slot == j, sum_of_slot, added)
        # As in TorchRec's WindowBuffer: a full buffer drops its oldest batch, this batch is added, and batches beyond
        # the window are dropped, possibly including this one.
        full = of_slots & (count == most)
        window = tl.where(full, window - oldest, window)
        used = tl.where(full, used - oldest_size, used)
        first = tl.where(full, (first + 1) % most, first)
        count = tl.where(full, count - 1, count)
        last = (first + count) % most
        tl.store(batches + last * in_step + at_slot, added, of_slots)
        tl.store(batch_sizes + last * in_step + at_slot, tl.zeros([padded_slots], tl.int32) + size, of_slots)
        window += added
        used += size
        count += 1
        fresh = first == last
        moved = full & (fresh == 0)
        oldest = tl.where(moved, tl.load(batches + first * in_step + at_slot, moved, other=0.0), oldest)
        oldest_size = tl.where(moved, tl.load(batch_sizes + first * in_step + at_slot, moved, other=0), oldest_size)
        oldest = tl.where(fresh, added, oldest)
        oldest_size = tl.where(fresh, size, oldest_size)
        over = of_slots & (used > limit)
        while tl.max(over.to(tl.int32), 0) != 0:
            window = tl.where(over, window - oldest, window)
            used = tl.where(over, used - oldest_size, used)
            first = tl.where(over, (first + 1) % most, first)
            count = tl.where(over, count - 1, count)
            over = of_slots & (used > limit)
            fresh = first == last  # just stored, perhaps by another thread
            old = over & (fresh == 0)
            oldest = tl.where(fresh, added, tl.load(batches + first * in_step + at_slot, old, other=0.0))
            oldest_size = tl.where(fresh, size, tl.load(batch_sizes + first * in_step + at_slot, old, other=0))
        tl.store(lifetimes + at_slot, lifetime + added, of_slots)
        tl.store(window_sums + at_slot, window, of_slots)
        tl.store(cursors + at_slot, first, of_slots)
        tl.store(cursors + in_step + at_slot, count, of_slots)
        tl.store(cursors + 2 * in_step + at_slot, used, of_slots)
        if validate:
            one = tl.zeros([padded_slots], tl.int32) + 1
            tl.store(valid + task * (slots + 1) + slot, one, of_slots)
        if auc_window > 0:
            tl.store(seen + row, before + size, row >= 0)
            if validate:
                tl.store(valid + task * (slots + 1) + slots, 1, row >= 0)
