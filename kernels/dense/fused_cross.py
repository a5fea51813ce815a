"""The cross network's width-wide products with its element-wise parts in one kernel each; bf16, on Hopper GPUs.

x' = x0 * (y + b) + x with y = u W^T and u = x V^T (dlrm.model.CrossLayer). What kernels.cross does beside cuBLAS reads
and writes the matrices of [batch, width] once more than needed, and the multipliers wait meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import Kernel, TensorMap, available, multiprocessors, tensor_map
from dlrm_bench.kernels._triton import cdiv

# As in fused_cross.cu.
_ROWS, _COLUMNS, _CHUNK, _MAX_STEPS = 64, 128, 64, 8
_FORWARD, _BACKWARD, _INPUT = range(3)
_THREADS = 384
# What aligns the rest; six stages of a, eight chunks of b, three slots of a pair of inputs; barriers.
_SHARED_BYTES = 1024 + 6 * 8192 + 8 * 16384 + 3 * 2 * 8192 + 256
_SOURCE = Path(__file__).with_suffix(".cu")


def applies(batch: int, width: int, depth: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels take such matrices; the plain functions take all."""
    aligned = width % 8 == 0 and depth % 8 == 0
    return batch > 0 and aligned and depth <= _CHUNK * _MAX_STEPS and dtype == torch.bfloat16 and _on_hopper(device)


def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and available()


def partial_rows(batch: int, width: int, device: torch.device) -> int:
    """How many rows of partial sums `fused_cross_backward` leaves."""
    return 8 * _blocks_of_columns(batch, width, multiprocessors(device)) if _on_hopper(device) else 1


def fused_cross_forward(x0: Tensor, x: Tensor, u: Tensor, w: Tensor, bias: Tensor, y: Tensor, out: Tensor) -> None:
    """y = u @ w.T + bias; out = x0 * y + x, of the y before it is rounded.

    x0, x, y, out: [batch, width]; u: [batch, depth]; w: [width, depth]; bias: [width]. All bf16 and contiguous.
    Computed in fp32, rounded once.
    """
    _check(u, w.t(), (x0, x, y, out))
    assert bias.shape == x0.shape[1:] and bias.is_contiguous(), "bias: [width]"
    forward = cuda_fused_cross_forward if _on_hopper(x0.device) else plain_fused_cross_forward
    forward(x0, x, u, w, bias, y, out)


def fused_cross_backward(
    g: Tensor, du: Tensor, v: Tensor, x0: Tensor, dx: Tensor, dy: Tensor, partials: Tensor
) -> None:
    """dx = g + du @ v: from the gradients g by a layer's output and du by its u that by its input, the output of the
    layer before. dy = dx * x0: the gradient by that layer's y. And partial column sums of dy, before it is rounded: the
    gradient by that layer's bias, once `column_sums` has added them up.

    g, x0, dx, dy: [batch, width]; du: [batch, depth]; v: [depth, width]. All bf16 and contiguous. partials: fp32
    [partial_rows(batch, width), width], overwritten. Computed in fp32, dy from the dx before it is rounded.
    """
    _check(du, v, (g, x0, dx, dy))
    batch, width = g.shape
    assert partials.shape == (partial_rows(batch, width, g.device), width) and partials.is_contiguous(), "partials"
    backward = cuda_fused_cross_backward if _on_hopper(g.device) else plain_fused_cross_backward
    backward(g, du, v, x0, dx, dy, partials)


def fused_cross_input_backward(gs: Sequence[Tensor], ys: Sequence[Tensor], du: Tensor, v: Tensor, dx0: Tensor) -> None:
    """The gradient by x0, whole: dx0 = du @ v + gs[0] + the sum over layers of g * y.

    gs: by the layers' outputs, first layer first; ys: what `fused_cross_forward` left of them; du, v: the first
    layer's. gs, ys, dx0: [batch, width]; du: [batch, depth]; v: [depth, width]. All bf16 and contiguous. Computed in
    fp32, rounded once.
    """
    _check(du, v, (*gs, *ys, dx0))
    assert len(gs) == len(ys) > 0, "one of each for every layer"
    backward = cuda_fused_cross_input_backward if _on_hopper(dx0.device) else plain_fused_cross_input_backward
    backward(gs, ys, du, v, dx0)


def _check(a: Tensor, b: Tensor, matrices: Sequence[Tensor]) -> None:
    shape = (a.shape[0], b.shape[1])
    assert a.shape[1] == b.shape[0] and all(matrix.shape == shape for matrix in matrices), "[batch, width]"
    assert all(t.is_contiguous() for t in (a, *matrices)), "contiguous tensors only"


def plain_fused_cross_forward(
    x0: Tensor, x: Tensor, u: Tensor, w: Tensor, bias: Tensor, y: Tensor, out: Tensor
) -> None:
    """What `fused_cross_forward` does, in PyTorch."""
    product = u.float() @ w.float().t() + bias.float()
    y.copy_(product)
    out.copy_(x0.float() * product + x.float())


def plain_fused_cross_backward(
    g: Tensor, du: Tensor, v: Tensor, x0: Tensor, dx: Tensor, dy: Tensor, partials: Tensor
) -> None:
    """What `fused_cross_backward` does, in PyTorch."""
    gradient = g.float() + du.float() @ v.float()
    product = gradient * x0.float()
    partials.zero_()[0] = product.sum(0)
    dx.copy_(gradient)
    dy.copy_(product)


def plain_fused_cross_input_backward(
    gs: Sequence[Tensor], ys: Sequence[Tensor], du: Tensor, v: Tensor, dx0: Tensor
) -> None:
    """What `fused_cross_input_backward` does, in PyTorch."""
    through_y = sum(g.float() * y.float() for g, y in zip(gs, ys, strict=True))
    dx0.copy_(du.float() @ v.float() + gs[0].float() + through_y)


def cuda_fused_cross_forward(x0: Tensor, x: Tensor, u: Tensor, w: Tensor, bias: Tensor, y: Tensor, out: Tensor) -> None:
    """What `fused_cross_forward` does, in one kernel."""
    _launch(_FORWARD, u, w, _COLUMNS, (x0, x), (y, out), bias=bias)


def cuda_fused_cross_backward(
    g: Tensor, du: Tensor, v: Tensor, x0: Tensor, dx: Tensor, dy: Tensor, partials: Tensor
) -> None:
    """What `fused_cross_backward` does, in one kernel."""
    _launch(_BACKWARD, du, v, _CHUNK, (g, x0), (dx, dy), partials=partials)


def cuda_fused_cross_input_backward(
    gs: Sequence[Tensor], ys: Sequence[Tensor], du: Tensor, v: Tensor, dx0: Tensor
) -> None:
    """What `fused_cross_input_backward` does, in one kernel."""
    inputs = [matrix for pair in zip(gs, ys, strict=True) for matrix in pair]
    _launch(_INPUT, du, v, _CHUNK, inputs, (dx0,))


@functools.cache
def _kernel(mode: int, pairs: int, steps: int, device: torch.device) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "fused_cross", {"MODE": mode, "PAIRS": pairs, "STEPS": steps}, _THREADS, _SHARED_BYTES)


@functools.cache
def _arguments(pairs: int) -> type[ctypes.Structure]:
    """fused_cross.cu's struct Arguments."""

    class Arguments(ctypes.Structure):
        _fields_ = (
            ("a", TensorMap),
            ("b", TensorMap),
            ("inputs", TensorMap * (2 * pairs)),
            ("outputs", ctypes.c_void_p * 2),
            ("bias", ctypes.c_void_p),
            ("partials", ctypes.c_void_p),
            ("batch", ctypes.c_int),
            ("width", ctypes.c_int),
            ("row_tiles", ctypes.c_int),
            ("column_tiles", ctypes.c_int),
            ("blocks_of_columns", ctypes.c_int),
            ("padding", ctypes.c_char * 12),  # to a multiple of a TensorMap's alignment
        )

    return Arguments


def _launch(
    mode: int,
    a: Tensor,
    b: Tensor,
    b_box_rows: int,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    bias: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    (batch, width), pairs = inputs[0].shape, len(inputs) // 2
    blocks = multiprocessors(a.device)
    row_tiles, column_tiles = cdiv(batch, _ROWS), cdiv(width, _COLUMNS)
    arguments = _arguments(pairs)(
        tensor_map(a, _ROWS, _CHUNK),
        tensor_map(b, b_box_rows, _CHUNK),
        (TensorMap * (2 * pairs))(*(tensor_map(matrix, _ROWS, _CHUNK) for matrix in inputs)),
        (ctypes.c_void_p * 2)(*(matrix.data_ptr() for matrix in outputs)),
        *(tensor.data_ptr() if tensor is not None else None for tensor in (bias, partials)),
        batch,
        width,
        row_tiles,
        column_tiles,
        _blocks_of_columns(batch, width, blocks),
    )
    kernel = _kernel(mode, pairs, cdiv(a.shape[1], _CHUNK), a.device)
    kernel.launch(min(blocks, row_tiles * column_tiles), arguments)


@functools.cache
def _blocks_of_columns(batch: int, width: int, multiprocessors: int) -> int:
    """How many blocks of the kernel work on the same columns, at most."""
    row_tiles, column_tiles = cdiv(batch, _ROWS), cdiv(width, _COLUMNS)
    tiles = row_tiles * column_tiles
    blocks = min(multiprocessors, tiles)

    def block_of(tile: int) -> int:
        return ((tile + 1) * blocks - 1) // tiles

    return max(
        block_of((column + 1) * row_tiles - 1) - block_of(column * row_tiles) + 1 for column in range(column_tiles)
    )
