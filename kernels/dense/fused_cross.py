"""The cross network's width-wide products with its element-wise parts in one kernel each; on Hopper GPUs.

x' = x0 * (y + b) + x with y = u W^T and u = x V^T (dlrm.model.CrossLayer). What kernels.cross does beside cuBLAS reads
and writes the matrices of [batch, width] once more than needed, and the multipliers wait meanwhile.

All matrices are bf16. Factors may both be in eight bits (kernels.dense.fp8), each with the summed dimension last, and
what the next products read may then be written in eight bits.
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
from dlrm_bench.kernels.dense.fp8 import FORMATS, Fp8, Fp8Pair, check_pair

# As in fused_cross.cu.
_ROWS, _COLUMNS, _CHUNK, _MAX_STEPS = 64, 128, 64, 8
_CHUNK_BYTES = 128  # of the factors' rows
_FORWARD, _BACKWARD, _INPUT, _OUTPUT_BACKWARD = range(4)
_THREADS = 384
# Pairs of the epilogue's inputs in shared memory: what the factors leave room for. In eight bits of up to four steps.
_SLOTS, _FP8_SLOTS = 3, 6
# What aligns the rest; six stages of a, eight chunks of b, three slots of a pair of inputs; barriers. In eight bits:
# four stages, which leaves room for four transposed pieces of 4096 bytes.
_SHARED_BYTES = 1024 + 6 * 8192 + 8 * 16384 + 3 * 2 * 8192 + 256
_SOURCE = Path(__file__).with_suffix(".cu")

Factor = Tensor | Fp8
"""Of a product: bf16, or in eight bits."""
Y = Tensor | Fp8
"""bf16 [batch, width], or in e4m3 what `empty_y` gives."""


def applies(batch: int, width: int, depth: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels take such matrices; the plain functions take all."""
    aligned = width % 8 == 0 and depth % 8 == 0
    return batch > 0 and aligned and depth <= _CHUNK * _MAX_STEPS and dtype == torch.bfloat16 and _on_hopper(device)


def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and available()


def empty_y(batch: int, width: int, scale: float, device: torch.device, tally: Tensor | None = None) -> Fp8:
    """Returns memory for y in eight bits: tiles of 64 rows and 128 columns, the last ones filled up, all zeros.

    [tiles of rows, tiles of columns, 64 * 128], in the order of the kernels' accumulators, which nothing else reads.
    """
    size = (cdiv(batch, _ROWS), cdiv(width, _COLUMNS), _ROWS * _COLUMNS)
    return Fp8(torch.zeros(size, dtype=torch.float8_e4m3fn, device=device), scale, tally)


def take_y(tiles: Fp8, y: Tensor) -> None:
    """Rounds y to `tiles`, in PyTorch."""
    row_tiles, column_tiles, _ = tiles.values.shape
    filled = y.new_zeros(row_tiles * _ROWS, column_tiles * _COLUMNS)
    filled[: len(y), : y.shape[1]] = y
    # Rows: a warp's 16, twice 8. Columns: halves, twice four blocks of 8, pairs. A thread has a row of 8 and a pair.
    parts = filled.view(row_tiles, 4, 2, 8, column_tiles, 2, 2, 4, 4, 2)
    tiles.take(parts.permute(0, 4, 5, 6, 1, 3, 8, 7, 2, 9).reshape(tiles.values.shape))


def read_y(tiles: Fp8, batch: int, width: int) -> Tensor:
    """Returns what `tiles` has, in fp32 [batch, width], in PyTorch."""
    row_tiles, column_tiles, _ = tiles.values.shape
    parts = tiles.float().view(row_tiles, column_tiles, 2, 2, 4, 8, 4, 4, 2, 2).permute(0, 4, 8, 5, 1, 2, 3, 7, 6, 9)
    return parts.reshape(row_tiles * _ROWS, column_tiles * _COLUMNS)[:batch, :width]


def partial_rows(batch: int, width: int, device: torch.device) -> int:
    """How many rows of partial sums `fused_cross_backward` leaves."""
    return 8 * _blocks_of_columns(batch, width, multiprocessors(device)) if _on_hopper(device) else 1


def fused_cross_forward(
    x0: Tensor,
    x: Tensor,
    u: Factor,
    w: Factor,
    bias: Tensor,
    y: Y,
    out: Tensor | None,
    out8: Fp8Pair | None = None,
) -> None:
    """y = u @ w.T + bias; out = x0 * y + x, of the y before it is rounded; out8: the rounded `out` in eight bits.
    Either of the last two, or both.

    x0, x, y, out, out8: [batch, width]; u: [batch, depth]; w: [width, depth]; bias: [width]. All contiguous. Computed
    in fp32, rounded once.
    """
    matrices = [matrix for matrix in (x0, x, y, out) if isinstance(matrix, Tensor)]
    _check(u, w, matrices, out8, turned=True)
    assert out is not None or out8 is not None, "an output"
    assert bias.shape == x0.shape[1:] and bias.is_contiguous(), "bias: [width]"
    forward = cuda_fused_cross_forward if _on_hopper(x0.device) else plain_fused_cross_forward
    forward(x0, x, u, w, bias, y, out, out8)


def fused_cross_backward(
    g: Tensor | None,
    du: Factor,
    v: Factor,
    x0: Tensor,
    dx: Tensor,
    dy: Tensor | Fp8Pair,
    partials: Tensor,
) -> None:
    """dx = g + du @ v: from the gradients g by a layer's output and du by its u that by its input, the output of the
    layer before. dy = dx * x0: the gradient by that layer's y. And partial column sums of dy, before it is rounded: the
    gradient by that layer's bias, once `column_sums` has added them up.

    Without g: dx = du @ v, as of the layer whose output another product reads, du being the gradient by that one.

    g, x0, dx, dy: [batch, width]; du: [batch, depth]; v: [depth, width], in eight bits [width, depth], its transpose.
    All contiguous; dy may be in eight bits, of what is rounded to bf16 first. partials: fp32 [partial_rows(batch,
    width), width], overwritten. Computed in fp32, dy from the dx before it is rounded.
    """
    in_bf16, in_eight_bits = (None, dy) if isinstance(dy, Fp8Pair) else (dy, None)
    matrices = [matrix for matrix in (x0, g, dx, in_bf16) if matrix is not None]
    _check(du, v, matrices, in_eight_bits, turned=isinstance(v, Fp8))
    batch, width = x0.shape
    assert partials.shape == (partial_rows(batch, width, x0.device), width) and partials.is_contiguous(), "partials"
    backward = cuda_fused_cross_backward if _on_hopper(x0.device) else plain_fused_cross_backward
    backward(g, du, v, x0, dx, dy, partials)


def fused_cross_input_backward(gs: Sequence[Tensor], ys: Sequence[Y], du: Factor, v: Factor, dx0: Tensor) -> None:
    """The gradient by x0, whole: dx0 = du @ v + gs[0] + the sum over layers of g * y.

    gs: by the layers' outputs, first layer first; ys: what `fused_cross_forward` left of them; du, v: the first
    layer's. gs, ys, dx0: [batch, width]; du: [batch, depth]; v: as in `fused_cross_backward`. All contiguous. Computed
    in fp32, rounded once.
    """
    _check(du, v, [*gs, *(y for y in ys if isinstance(y, Tensor)), dx0], None, turned=isinstance(v, Fp8))
    assert len(gs) == len(ys) > 0, "one of each for every layer"
    assert len({y.scale if isinstance(y, Fp8) else None for y in ys}) == 1, "ys of one format and scale"
    backward = cuda_fused_cross_input_backward if _on_hopper(dx0.device) else plain_fused_cross_input_backward
    backward(gs, ys, du, v, dx0)


def _check(a: Factor, b: Factor, matrices: Sequence[Tensor], out8: Fp8Pair | None, turned: bool) -> None:
    assert isinstance(a, Fp8) == isinstance(b, Fp8), "factors: both in eight bits, or neither"
    assert isinstance(a, Fp8) or out8 is None, "an output in eight bits of such factors only"
    if out8 is not None:
        check_pair(out8, *matrices[0].shape)
    a, b = (factor.values if isinstance(factor, Fp8) else factor for factor in (a, b))
    depth, width = b.shape[::-1] if turned else b.shape
    assert a.shape[1] == depth and all(matrix.shape == (len(a), width) for matrix in matrices), "[batch, width]"
    assert all(t.is_contiguous() for t in (a, *matrices)), "contiguous tensors only"


def _product(a: Factor, b: Factor, turned: bool) -> Tensor:
    """Returns a @ b in fp32, or a @ b.T."""
    return a.float() @ (b.float().t() if turned else b.float())


def plain_fused_cross_forward(
    x0: Tensor,
    x: Tensor,
    u: Factor,
    w: Factor,
    bias: Tensor,
    y: Y,
    out: Tensor | None,
    out8: Fp8Pair | None = None,
) -> None:
    """What `fused_cross_forward` does, in PyTorch."""
    product = _product(u, w, turned=True) + bias.float()
    if isinstance(y, Fp8):
        take_y(y, product)
    else:
        y.copy_(product)
    result = x0.float() * product + x.float()
    if out is not None:
        out.copy_(result)
    if out8 is not None:
        out8.take(result.to(x.dtype))


def plain_fused_cross_backward(
    g: Tensor | None,
    du: Factor,
    v: Factor,
    x0: Tensor,
    dx: Tensor,
    dy: Tensor | Fp8Pair,
    partials: Tensor,
) -> None:
    """What `fused_cross_backward` does, in PyTorch."""
    gradient = _product(du, v, turned=isinstance(v, Fp8))
    if g is not None:
        gradient += g.float()
    product = gradient * x0.float()
    partials.zero_()[0] = product.sum(0)
    dx.copy_(gradient)
    if isinstance(dy, Fp8Pair):
        dy.take(product.to(x0.dtype))
    else:
        dy.copy_(product)


def plain_fused_cross_input_backward(gs: Sequence[Tensor], ys: Sequence[Y], du: Factor, v: Factor, dx0: Tensor) -> None:
    """What `fused_cross_input_backward` does, in PyTorch."""
    in_fp32 = (read_y(y, *dx0.shape) if isinstance(y, Fp8) else y.float() for y in ys)
    through_y = sum(g.float() * y for g, y in zip(gs, in_fp32, strict=True))
    dx0.copy_(_product(du, v, turned=isinstance(v, Fp8)) + gs[0].float() + through_y)


def cuda_fused_cross_forward(
    x0: Tensor,
    x: Tensor,
    u: Factor,
    w: Factor,
    bias: Tensor,
    y: Y,
    out: Tensor | None,
    out8: Fp8Pair | None = None,
) -> None:
    """What `fused_cross_forward` does, in one kernel."""
    in_bf16, tiles = (None, [y]) if isinstance(y, Fp8) else (y, [])
    _launch(_FORWARD, u, w, (x0, x), (in_bf16, out), out8, bias=bias, tiles=tiles)


def cuda_fused_cross_backward(
    g: Tensor | None,
    du: Factor,
    v: Factor,
    x0: Tensor,
    dx: Tensor,
    dy: Tensor | Fp8Pair,
    partials: Tensor,
) -> None:
    """What `fused_cross_backward` does, in one kernel."""
    in_bf16, in_eight_bits = (None, dy) if isinstance(dy, Fp8Pair) else (dy, None)
    mode, inputs = (_OUTPUT_BACKWARD, (x0, x0)) if g is None else (_BACKWARD, (g, x0))
    _launch(mode, du, v, inputs, (dx, in_bf16), in_eight_bits, partials=partials)


def cuda_fused_cross_input_backward(gs: Sequence[Tensor], ys: Sequence[Y], du: Factor, v: Factor, dx0: Tensor) -> None:
    """What `fused_cross_input_backward` does, in one kernel."""
    tiles = [y for y in ys if isinstance(y, Fp8)]
    inputs = [m for g, y in zip(gs, ys, strict=True) for m in (g, g if isinstance(y, Fp8) else y)]
    _launch(_INPUT, du, v, inputs, (dx0,), tiles=tiles)


@functools.cache
def _kernel(
    mode: int, pairs: int, steps: int, factors: int, output: int, keeps: bool, tiles: bool, device: torch.device
) -> Kernel:
    """factors, output: the formats of a and of the second output's copies. keeps: whether it is stored in bf16. tiles:
    whether y is in eight bits."""
    defines = {"MODE": mode, "PAIRS": pairs, "STEPS": steps, "FACTORS": factors, "OUTPUT": output}
    defines |= {"KEEPS": int(keeps), "TILES": int(tiles)}
    defines["SLOTS"] = _FP8_SLOTS if factors and 2 * steps <= _MAX_STEPS else _SLOTS
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
            ("transposed", ctypes.c_void_p),
            ("tiles", ctypes.c_void_p * pairs),
            ("tally", ctypes.c_void_p),
            ("tiles_tally", ctypes.c_void_p),
            ("scale", ctypes.c_float),
            ("unscale", ctypes.c_float),
            ("tiles_scale", ctypes.c_float),
            ("limit", ctypes.c_uint),
            ("transposed_stride", ctypes.c_int),
            ("batch", ctypes.c_int),
            ("width", ctypes.c_int),
            ("row_tiles", ctypes.c_int),
            ("column_tiles", ctypes.c_int),
            ("blocks_of_columns", ctypes.c_int),
            ("padding", ctypes.c_char * (-(104 + 8 * pairs) % 64)),  # to a multiple of a TensorMap's alignment
        )

    return Arguments


def _launch(
    mode: int,
    a: Factor,
    b: Factor,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    out8: Fp8Pair | None = None,
    bias: Tensor | None = None,
    partials: Tensor | None = None,
    tiles: Sequence[Fp8] = (),
) -> None:
    unscale = 1 / (a.scale * b.scale) if isinstance(a, Fp8) and isinstance(b, Fp8) else 1
    a, b = (factor.values if isinstance(factor, Fp8) else factor for factor in (a, b))
    (batch, width), pairs, depth = inputs[0].shape, len(inputs) // 2, _CHUNK_BYTES // a.itemsize
    # Of b's rows: in bf16 the backward's have the summed dimension first.
    b_box_rows = _CHUNK if mode != _FORWARD and a.dtype == torch.bfloat16 else _COLUMNS
    blocks = multiprocessors(a.device)
    row_tiles, column_tiles = cdiv(batch, _ROWS), cdiv(width, _COLUMNS)
    size = (row_tiles, column_tiles, _ROWS * _COLUMNS)
    assert all(y.values.shape == size and y.values.is_contiguous() for y in tiles), "y: what empty_y gives"
    tally, limit = (None, 0) if out8 is None else out8.plain.tallied()
    arguments = _arguments(pairs)(
        tensor_map(a, _ROWS, depth),
        tensor_map(b, b_box_rows, depth),
        (TensorMap * (2 * pairs))(*(tensor_map(matrix, _ROWS, _CHUNK) for matrix in inputs)),
        (ctypes.c_void_p * 2)(*(None if matrix is None else matrix.data_ptr() for matrix in outputs)),
        *(None if t is None else t.data_ptr() for t in (bias, partials)),
        *((None, None) if out8 is None else out8.addresses()),
        (ctypes.c_void_p * pairs)(*(y.values.data_ptr() for y in tiles)),
        tally,
        tiles[0].tallied()[0] if tiles else None,
        1 if out8 is None else out8.plain.scale,
        unscale,
        1 if not tiles else tiles[0].scale if mode == _FORWARD else 1 / tiles[0].scale,
        limit,
        0 if out8 is None else out8.transposed.values.stride(0),
        batch,
        width,
        row_tiles,
        column_tiles,
        _blocks_of_columns(batch, width, blocks),
    )
    formats = FORMATS[a.dtype], FORMATS[torch.bfloat16 if out8 is None else out8.plain.values.dtype]
    kernel = _kernel(mode, pairs, cdiv(a.shape[1], depth), *formats, outputs[-1] is not None, len(tiles) > 0, a.device)
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
