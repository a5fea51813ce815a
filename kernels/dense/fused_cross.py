"""The cross network's width-wide products with its element-wise parts in one kernel each; on Hopper GPUs.

x' = x0 * (y + b) + x with y = u W^T and u = x V^T (dlrm.model.CrossLayer). What kernels.cross does beside cuBLAS reads
and writes the matrices of [batch, width] once more than needed, and the multipliers wait meanwhile.

All matrices are bf16. Factors may both be in eight bits (kernels.dense.fp8), each with the summed dimension last, and
what the next product reads may be written in eight bits too.
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
from dlrm_bench.kernels.dense.fp8 import FORMATS, Fp8

# As in fused_cross.cu.
_ROWS, _COLUMNS, _CHUNK, _MAX_STEPS = 64, 128, 64, 8
_CHUNK_BYTES = 128  # of the factors' rows
_FORWARD, _BACKWARD, _INPUT = range(3)
_THREADS = 384
# Pairs of the epilogue's inputs in shared memory: what the factors leave room for.
_SLOTS, _FP8_SLOTS = 3, 6
# What aligns the rest; six stages of a, eight chunks of b, three slots of a pair of inputs; barriers.
_SHARED_BYTES = 1024 + 6 * 8192 + 8 * 16384 + 3 * 2 * 8192 + 256
_SOURCE = Path(__file__).with_suffix(".cu")

Factor = Tensor | Fp8
"""Of a product: bf16, or in eight bits."""


def applies(batch: int, width: int, depth: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels take such matrices; the plain functions take all."""
    aligned = width % 8 == 0 and depth % 8 == 0
    return batch > 0 and aligned and depth <= _CHUNK * _MAX_STEPS and dtype == torch.bfloat16 and _on_hopper(device)


def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and available()


def partial_rows(batch: int, width: int, device: torch.device) -> int:
    """How many rows of partial sums `fused_cross_backward` leaves."""
    return 8 * _blocks_of_columns(batch, width, multiprocessors(device)) if _on_hopper(device) else 1


def fused_cross_forward(
    x0: Tensor, x: Tensor, u: Factor, w: Factor, bias: Tensor, y: Tensor, out: Tensor, out8: Fp8 | None = None
) -> None:
    """y = u @ w.T + bias; out = x0 * y + x, of the y before it is rounded; out8: the rounded `out` in eight bits.

    x0, x, y, out, out8: [batch, width]; u: [batch, depth]; w: [width, depth]; bias: [width]. All contiguous. Computed
    in fp32, rounded once.
    """
    _check(u, w, (x0, x, y, out), turned=True)
    assert bias.shape == x0.shape[1:] and bias.is_contiguous(), "bias: [width]"
    forward = cuda_fused_cross_forward if _on_hopper(x0.device) else plain_fused_cross_forward
    forward(x0, x, u, w, bias, y, out, out8)


def fused_cross_backward(
    g: Tensor,
    du: Factor,
    v: Factor,
    x0: Tensor,
    dx: Tensor,
    dy: Tensor,
    partials: Tensor,
    dy8: Fp8 | None = None,
) -> None:
    """dx = g + du @ v: from the gradients g by a layer's output and du by its u that by its input, the output of the
    layer before. dy = dx * x0: the gradient by that layer's y. And partial column sums of dy, before it is rounded: the
    gradient by that layer's bias, once `column_sums` has added them up.

    g, x0, dx, dy: [batch, width]; du: [batch, depth]; v: [depth, width], in eight bits [width, depth], its transpose;
    dy8: the rounded dy in eight bits. All contiguous. partials: fp32 [partial_rows(batch, width), width], overwritten.
    Computed in fp32, dy from the dx before it is rounded.
    """
    _check(du, v, (g, x0, dx, dy), turned=isinstance(v, Fp8))
    batch, width = g.shape
    assert partials.shape == (partial_rows(batch, width, g.device), width) and partials.is_contiguous(), "partials"
    backward = cuda_fused_cross_backward if _on_hopper(g.device) else plain_fused_cross_backward
    backward(g, du, v, x0, dx, dy, partials, dy8)


def fused_cross_input_backward(gs: Sequence[Tensor], ys: Sequence[Tensor], du: Factor, v: Factor, dx0: Tensor) -> None:
    """The gradient by x0, whole: dx0 = du @ v + gs[0] + the sum over layers of g * y.

    gs: by the layers' outputs, first layer first; ys: what `fused_cross_forward` left of them; du, v: the first
    layer's. gs, ys, dx0: [batch, width]; du: [batch, depth]; v: as in `fused_cross_backward`. All contiguous. Computed
    in fp32, rounded once.
    """
    _check(du, v, (*gs, *ys, dx0), turned=isinstance(v, Fp8))
    assert len(gs) == len(ys) > 0, "one of each for every layer"
    backward = cuda_fused_cross_input_backward if _on_hopper(dx0.device) else plain_fused_cross_input_backward
    backward(gs, ys, du, v, dx0)


def _check(a: Factor, b: Factor, matrices: Sequence[Tensor], turned: bool) -> None:
    assert isinstance(a, Fp8) == isinstance(b, Fp8), "factors: both in eight bits, or neither"
    a, b = (factor.values if isinstance(factor, Fp8) else factor for factor in (a, b))
    depth, width = b.shape[::-1] if turned else b.shape
    assert a.shape[1] == depth and all(matrix.shape == (len(a), width) for matrix in matrices), "[batch, width]"
    assert all(t.is_contiguous() for t in (a, *matrices)), "contiguous tensors only"


def _product(a: Factor, b: Factor, turned: bool) -> Tensor:
    """Returns a @ b in fp32, or a @ b.T."""
    return a.float() @ (b.float().t() if turned else b.float())


def plain_fused_cross_forward(
    x0: Tensor, x: Tensor, u: Factor, w: Factor, bias: Tensor, y: Tensor, out: Tensor, out8: Fp8 | None = None
) -> None:
    """What `fused_cross_forward` does, in PyTorch."""
    product = _product(u, w, turned=True) + bias.float()
    y.copy_(product)
    out.copy_(x0.float() * product + x.float())
    if out8 is not None:
        out8.take(out)


def plain_fused_cross_backward(
    g: Tensor,
    du: Factor,
    v: Factor,
    x0: Tensor,
    dx: Tensor,
    dy: Tensor,
    partials: Tensor,
    dy8: Fp8 | None = None,
) -> None:
    """What `fused_cross_backward` does, in PyTorch."""
    gradient = g.float() + _product(du, v, turned=isinstance(v, Fp8))
    product = gradient * x0.float()
    partials.zero_()[0] = product.sum(0)
    dx.copy_(gradient)
    dy.copy_(product)
    if dy8 is not None:
        dy8.take(dy)


def plain_fused_cross_input_backward(
    gs: Sequence[Tensor], ys: Sequence[Tensor], du: Factor, v: Factor, dx0: Tensor
) -> None:
    """What `fused_cross_input_backward` does, in PyTorch."""
    through_y = sum(g.float() * y.float() for g, y in zip(gs, ys, strict=True))
    dx0.copy_(_product(du, v, turned=isinstance(v, Fp8)) + gs[0].float() + through_y)


def cuda_fused_cross_forward(
    x0: Tensor, x: Tensor, u: Factor, w: Factor, bias: Tensor, y: Tensor, out: Tensor, out8: Fp8 | None = None
) -> None:
    """What `fused_cross_forward` does, in one kernel."""
    _launch(_FORWARD, u, w, (x0, x), (y, out), out8, bias=bias)


def cuda_fused_cross_backward(
    g: Tensor,
    du: Factor,
    v: Factor,
    x0: Tensor,
    dx: Tensor,
    dy: Tensor,
    partials: Tensor,
    dy8: Fp8 | None = None,
) -> None:
    """What `fused_cross_backward` does, in one kernel."""
    _launch(_BACKWARD, du, v, (g, x0), (dx, dy), dy8, partials=partials)


def cuda_fused_cross_input_backward(
    gs: Sequence[Tensor], ys: Sequence[Tensor], du: Factor, v: Factor, dx0: Tensor
) -> None:
    """What `fused_cross_input_backward` does, in one kernel."""
    inputs = [matrix for pair in zip(gs, ys, strict=True) for matrix in pair]
    _launch(_INPUT, du, v, inputs, (dx0,))


@functools.cache
def _kernel(mode: int, pairs: int, steps: int, factors: int, output: int, device: torch.device) -> Kernel:
    """factors, output: the formats of a and of the second output's copy."""
    defines = {"MODE": mode, "PAIRS": pairs, "STEPS": steps, "FACTORS": factors, "OUTPUT": output}
    defines["SLOTS"] = _FP8_SLOTS if factors else _SLOTS
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "fused_cross", defines, _THREADS, _SHARED_BYTES)


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
            ("quantised", ctypes.c_void_p),
            ("scale", ctypes.c_float),
            ("unscale", ctypes.c_float),
            ("batch", ctypes.c_int),
            ("width", ctypes.c_int),
            ("row_tiles", ctypes.c_int),
            ("column_tiles", ctypes.c_int),
            ("blocks_of_columns", ctypes.c_int),
            ("padding", ctypes.c_char * 60),  # to a multiple of a TensorMap's alignment
        )

    return Arguments


def _launch(
    mode: int,
    a: Factor,
    b: Factor,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    out8: Fp8 | None = None,
    bias: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    unscale = 1 / (a.scale * b.scale) if isinstance(a, Fp8) and isinstance(b, Fp8) else 1
    a, b = (factor.values if isinstance(factor, Fp8) else factor for factor in (a, b))
    (batch, width), pairs, depth = inputs[0].shape, len(inputs) // 2, _CHUNK_BYTES // a.itemsize
    # Of b's rows: in bf16 the backward's have the summed dimension first.
    b_box_rows = _CHUNK if mode != _FORWARD and a.dtype == torch.bfloat16 else _COLUMNS
    blocks = multiprocessors(a.device)
    row_tiles, column_tiles = cdiv(batch, _ROWS), cdiv(width, _COLUMNS)
    arguments = _arguments(pairs)(
        tensor_map(a, _ROWS, depth),
        tensor_map(b, b_box_rows, depth),
        (TensorMap * (2 * pairs))(*(tensor_map(matrix, _ROWS, _CHUNK) for matrix in inputs)),
        (ctypes.c_void_p * 2)(*(matrix.data_ptr() for matrix in outputs)),
        *(None if t is None else t.data_ptr() for t in (bias, partials, None if out8 is None else out8.values)),
        1 if out8 is None else out8.scale,
        unscale,
        batch,
        width,
        row_tiles,
        column_tiles,
        _blocks_of_columns(batch, width, blocks),
    )
    output = FORMATS[torch.bfloat16 if out8 is None else out8.values.dtype]
    kernel = _kernel(mode, pairs, cdiv(a.shape[1], depth), FORMATS[a.dtype], output, a.device)
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
