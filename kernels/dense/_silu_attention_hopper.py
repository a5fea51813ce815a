"""The launch of silu_attention.cu: its list of tiles, its passes, its arguments."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import Kernel, TensorMap, multiprocessors, tensor_map
from dlrm_bench.kernels._triton import cdiv

_SOURCE = Path(__file__).with_name("silu_attention.cu")
FORWARD, KEY, QUERY = range(3)
WIDTH = 128
"""Width of heads."""
PIECE = 64
"""Rows, and keys, of a stored piece of the scores' gradients in the backward pass."""
PIECE_BYTES = PIECE * PIECE * 2
_X_ROWS, _THREADS = 128, 384
_Y_ROWS = {FORWARD: 128, KEY: 64, QUERY: 64}
_SHARED_BYTES = 224 * 1024 + 1024 + 256  # tiles, their alignment, barriers and items


class ItemsArguments(ctypes.Structure):
    """silu_attention_items.cu's struct Arguments."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("offsets", "targets", "items", "first", "taken")),
        *((name, ctypes.c_int) for name in ("sequences", "heads", "offsets_bytes", "targets_bytes")),
        *((name, ctypes.c_int) for name in ("max_length", "passes", "pieces")),
    )


class Arguments(ctypes.Structure):
    """silu_attention.cu's struct Arguments."""

    _fields_ = (
        ("x", TensorMap * 2),
        ("y", TensorMap * 2),
        ("out", ctypes.c_void_p * 2),
        ("stride", ctypes.c_uint64 * 2),
        *((name, ctypes.c_void_p) for name in ("items", "range", "taken", "pieces")),
        ("half_alpha", ctypes.c_float),
        ("scale", ctypes.c_float * 2),
        ("padding", ctypes.c_char * 52),  # to a multiple of a TensorMap's alignment
    )


class Work(NamedTuple):
    """Work list of all kernels of a pass.

    items: int32 [capacity, 8], tiles of all sequences and heads; first: int32 [passes + 1], index of each pass's first
    item, then the number of items; taken: int32 [passes, 2], zeros; pass_pieces: number of pieces that begin in a pass.
    """

    items: Tensor
    first: Tensor
    taken: Tensor
    pass_pieces: int


@functools.cache
def _kernel(mode: int, device: torch.device) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "silu_attention", {"MODE": mode}, _THREADS, _SHARED_BYTES)


@functools.cache
def _items_kernel(device: torch.device) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(_SOURCE.with_name("silu_attention_items.cu"), "silu_attention_items", {}, 128, 0)


def pieces_at_most(q: Tensor, targets: Tensor, max_length: int) -> int:
    """Returns the largest number of pieces for sequences no longer than max_length, whose lengths are unknown."""
    rows = cdiv(max_length, PIECE)
    return q.shape[1] * (cdiv(len(q), PIECE) + len(targets)) * (rows + 1) // 2


def list_items(
    q: Tensor, offsets: Tensor, targets: Tensor, max_length: int, passes: int = 1, pass_pieces: int = 2**31 - 1
) -> Work:
    """Lists the tiles of q, [T, H, D], and divides them among passes."""
    heads, device = q.shape[1], q.device
    assert pieces_at_most(q, targets, max_length) < 2**31, "items count pieces of 64 rows and keys in 32 bits"
    at_most = (cdiv(len(q), _X_ROWS) + len(targets)) * heads
    shapes = (at_most, 8), (passes + 1,), (passes, 2)
    items, first, taken = (torch.empty(*shape, dtype=torch.int32, device=device) for shape in shapes)
    addresses = (tensor.data_ptr() for tensor in (offsets, targets, items, first, taken))
    sizes = len(targets), heads, offsets.itemsize, targets.itemsize, max_length, passes, pass_pieces
    _items_kernel(device).launch(len(targets), ItemsArguments(*addresses, *sizes))
    return Work(items, first, taken, pass_pieces)


def arguments_of(
    mode: int, xs: Sequence[Tensor], ys: Sequence[Tensor], outputs: Sequence[Tensor], scales: Sequence[float]
) -> Arguments:
    """Returns a kernel's arguments except its work list. xs, ys, outputs: named as in silu_attention.cu, [T, H, D];
    scales: factors of the outputs."""
    return Arguments(
        x=(TensorMap * 2)(*(tensor_map(x.flatten(1), _X_ROWS, 64) for x in xs)),
        y=(TensorMap * 2)(*(tensor_map(y.flatten(1), _Y_ROWS[mode], 64) for y in ys)),
        out=(ctypes.c_void_p * 2)(*(out.data_ptr() for out in outputs)),
        stride=(ctypes.c_uint64 * 2)(*(out.stride(0) for out in outputs)),
        half_alpha=0.5 * WIDTH**-0.5,
        scale=(ctypes.c_float * 2)(*scales),
    )


def launch(mode: int, arguments: Arguments, work: Work, number: int = 0, pieces: Tensor | None = None) -> None:
    """Launches a mode's kernel on the items of pass `number`. pieces: bf16, memory for that pass's pieces."""
    arguments.items = work.items.data_ptr()
    arguments.range = work.first[number:].data_ptr()
    arguments.taken = work.taken[number, int(mode == QUERY) :].data_ptr()
    if pieces is not None:  # items number pieces through all passes
        arguments.pieces = pieces.data_ptr() - number * work.pass_pieces * PIECE_BYTES
    device = work.items.device
    _kernel(mode, device).launch(min(multiprocessors(device), len(work.items)), arguments)
