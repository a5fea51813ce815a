"""The cross network's wide products, each fused with its element-wise part in one kernel; on Hopper GPUs.

x' = x0 * (y + b) + x with y = u W^T and u = x V^T (dlrm.dcnv2.network.CrossLayer). Without fusion, kernels.dense.cross
and cuBLAS read and write the [batch, width] matrices once more than needed, while the tensor cores wait.

All matrices are bf16. Both factors may be 8-bit (kernels.dense.fp8), each with the summed dimension last; the inputs of
the next products may then be written in 8 bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._call import function
from dlrm_bench.kernels._cuda import Kernel, TensorMap, available, multiprocessors, tensor_map
from dlrm_bench.kernels._triton import cdiv
from dlrm_bench.kernels.dense.fp8 import FORMATS, Fp8, Fp8Pair, check_pair

# As in fused_cross.cu.
_ROWS, _COLUMNS, _CHUNK, _MAX_STEPS = 64, 128, 64, 8
_CHUNK_BYTES = 128  # of a factor's row
_FORWARD, _BACKWARD, _INPUT, _OUTPUT_BACKWARD = range(4)
_THREADS = 384
# Pairs of epilogue inputs in shared memory, beside the factors. The second: for 8-bit factors of up to four steps.
_SLOTS, _FP8_SLOTS = 3, 6
# Alignment; six stages of a, eight chunks of b, three slots for pairs of inputs; barriers. With 8-bit factors: four
# stages, which leaves room for four transposed pieces of 4096 bytes.
_SHARED_BYTES = 1024 + 6 * 8192 + 8 * 16384 + 3 * 2 * 8192 + 256
_SOURCE = Path(__file__).with_suffix(".cu")

Factor = Tensor | Fp8
"""A factor of a product: bf16, or 8-bit."""
Y = Tensor | Fp8
"""bf16 [batch, width], or e4m3 in the layout of `empty_y`."""


def applies(batch: int, width: int, depth: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels support matrices of these sizes; the plain functions take all."""
    aligned = width % 8 == 0 and depth % 8 == 0
    return batch > 0 and aligned and depth <= _CHUNK * _MAX_STEPS and dtype == torch.bfloat16 and _on_hopper(device)


def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and available()


def empty_y(batch: int, width: int, scale: float, device: torch.device, tally: Tensor | None = None) -> Fp8:
    """Returns zeroed memory for an 8-bit y: tiles of 64 rows and 128 columns, the last ones padded.

    [row tiles, column tiles, 64 * 128], in the order of the kernels' accumulators; only these kernels read it.
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
    """Returns the values of `tiles` in fp32 [batch, width], in PyTorch."""
    row_tiles, column_tiles, _ = tiles.values.shape
    parts = tiles.float().view(row_tiles, column_tiles, 2, 2, 4, 8, 4, 4, 2, 2).permute(0, 4, 8, 5, 1, 2, 3, 7, 6, 9)
    return parts.reshape(row_tiles * _ROWS, column_tiles * _COLUMNS)[:batch, :width]


def partial_rows(batch: int, width: int, device: torch.device) -> int:
    """Returns the number of rows of partial sums that `fused_cross_backward` writes."""
    return 8 * _blocks_of_columns(batch, width, multiprocessors(device)) if _on_hopper(device) else 1


def _check(a: Factor, b: Factor, matrices: Sequence[Tensor], out8: Fp8Pair | None, turned: bool) -> None:
    assert isinstance(a, Fp8) == isinstance(b, Fp8), "factors: both 8-bit, or neither"
    assert isinstance(a, Fp8) or out8 is None, "an 8-bit output needs 8-bit factors"
    if out8 is not None:
        check_pair(out8, *matrices[0].shape)
    a, b = (factor.values if isinstance(factor, Fp8) else factor for factor in (a, b))
    depth, width = b.shape[::-1] if turned else b.shape
    assert a.shape[1] == depth and all(matrix.shape == (len(a), width) for matrix in matrices), "[batch, width]"
    assert all(t.is_contiguous() for t in (a, *matrices)), "contiguous tensors only"


def _product(a: Factor, b: Factor, turned: bool) -> Tensor:
    """Returns a @ b in fp32, or a @ b.T."""
    return a.float() @ (b.float().t() if turned else b.float())


class FusedCrossForward(NamedTuple):
    """Computes y = u @ w.T + bias; out = x0 * y + x, from y before rounding; out8: the rounded `out` in 8 bits.

    Computed in fp32, rounded once. All tensors are contiguous.
    """

    x0: Tensor
    """[batch, width], as x, y, out and out8."""
    x: Tensor
    u: Factor
    """[batch, depth]."""
    w: Factor
    """[width, depth]."""
    bias: Tensor
    """[width]."""
    y: Y
    out: Tensor | None
    """Given unless `out8` is; both may be."""
    out8: Fp8Pair | None = None

    def launch(self) -> None:
        """Checks the arguments and computes the outputs."""
        matrices = [matrix for matrix in (self.x0, self.x, self.y, self.out) if isinstance(matrix, Tensor)]
        _check(self.u, self.w, matrices, self.out8, turned=True)
        assert self.out is not None or self.out8 is not None, "an output"
        assert self.bias.shape == self.x0.shape[1:] and self.bias.is_contiguous(), "bias: [width]"
        (self.cuda if _on_hopper(self.x0.device) else self.plain)()

    def plain(self) -> None:
        """Computes the outputs in PyTorch."""
        product = _product(self.u, self.w, turned=True) + self.bias.float()
        if isinstance(self.y, Fp8):
            take_y(self.y, product)
        else:
            self.y.copy_(product)
        result = self.x0.float() * product + self.x.float()
        if self.out is not None:
            self.out.copy_(result)
        if self.out8 is not None:
            self.out8.take(result.to(self.x.dtype))

    def cuda(self) -> None:
        """Computes the outputs in one kernel."""
        in_bf16, tiles = (None, [self.y]) if isinstance(self.y, Fp8) else (self.y, [])
        outputs = (in_bf16, self.out)
        _launch(_FORWARD, self.u, self.w, (self.x0, self.x), outputs, self.out8, bias=self.bias, tiles=tiles)


class FusedCrossBackward(NamedTuple):
    """Computes dx = g + du @ v, the gradient of a layer's input, which is the previous layer's output; dy = dx * x0,
    the gradient of the previous layer's y; and partial column sums of dy before rounding, for its bias gradient.

    All tensors are contiguous. Computed in fp32, dy from dx before rounding.
    """

    g: Tensor | None
    """[batch, width]: gradient of the layer's output. None: dx = du @ v, for the last layer, whose output is the input
    of another product; du is then the gradient of that product's output."""
    du: Factor
    """[batch, depth]: gradient of the layer's u."""
    v: Factor
    """[depth, width]; if 8-bit, its transpose, [width, depth]."""
    x0: Tensor
    """[batch, width]."""
    dx: Tensor
    """[batch, width]."""
    dy: Tensor | Fp8Pair
    """[batch, width]; if 8-bit, from values rounded to bf16 first."""
    partials: Tensor
    """fp32 [partial_rows(batch, width), width], overwritten. Their `column_sums` is the bias gradient."""

    def launch(self) -> None:
        """Checks the arguments and computes the gradients."""
        in_bf16, in_eight_bits = self._outputs()
        matrices = [matrix for matrix in (self.x0, self.g, self.dx, in_bf16) if matrix is not None]
        _check(self.du, self.v, matrices, in_eight_bits, turned=isinstance(self.v, Fp8))
        batch, width = self.x0.shape
        rows = partial_rows(batch, width, self.x0.device)
        assert self.partials.shape == (rows, width) and self.partials.is_contiguous(), "partials"
        (self.cuda if _on_hopper(self.x0.device) else self.plain)()

    def _outputs(self) -> tuple[Tensor | None, Fp8Pair | None]:
        """Returns dy as bf16 and as 8-bit; one of them is None."""
        return (None, self.dy) if isinstance(self.dy, Fp8Pair) else (self.dy, None)

    def plain(self) -> None:
        """Computes the gradients in PyTorch."""
        gradient = _product(self.du, self.v, turned=isinstance(self.v, Fp8))
        if self.g is not None:
            gradient += self.g.float()
        product = gradient * self.x0.float()
        self.partials.zero_()[0] = product.sum(0)
        self.dx.copy_(gradient)
        if isinstance(self.dy, Fp8Pair):
            self.dy.take(product.to(self.x0.dtype))
        else:
            self.dy.copy_(product)

    def cuda(self) -> None:
        """Computes the gradients in one kernel."""
        in_bf16, in_eight_bits = self._outputs()
        mode, first = (_OUTPUT_BACKWARD, self.x0) if self.g is None else (_BACKWARD, self.g)
        outputs = (self.dx, in_bf16)
        _launch(mode, self.du, self.v, (first, self.x0), outputs, in_eight_bits, partials=self.partials)


class FusedCrossInputBackward(NamedTuple):
    """Computes the whole gradient of x0: dx0 = du @ v + gs[0] + the sum over layers of g * y.

    All tensors are contiguous. Computed in fp32, rounded once.
    """

    gs: Sequence[Tensor]
    """[batch, width] each: gradients of the layers' outputs, first layer first."""
    ys: Sequence[Y]
    """The layers' y of `FusedCrossForward`."""
    du: Factor
    """[batch, depth], the first layer's."""
    v: Factor
    """The first layer's, as in `FusedCrossBackward`."""
    dx0: Tensor
    """[batch, width]."""

    def launch(self) -> None:
        """Checks the arguments and computes dx0."""
        in_bf16 = [y for y in self.ys if isinstance(y, Tensor)]
        _check(self.du, self.v, [*self.gs, *in_bf16, self.dx0], None, turned=isinstance(self.v, Fp8))
        assert len(self.gs) == len(self.ys) > 0, "gs and ys: one for every layer"
        assert len({y.scale if isinstance(y, Fp8) else None for y in self.ys}) == 1, "ys of one format and scale"
        (self.cuda if _on_hopper(self.dx0.device) else self.plain)()

    def plain(self) -> None:
        """Computes dx0 in PyTorch."""
        in_fp32 = (read_y(y, *self.dx0.shape) if isinstance(y, Fp8) else y.float() for y in self.ys)
        through_y = sum(g.float() * y for g, y in zip(self.gs, in_fp32, strict=True))
        product = _product(self.du, self.v, turned=isinstance(self.v, Fp8))
        self.dx0.copy_(product + self.gs[0].float() + through_y)

    def cuda(self) -> None:
        """Computes dx0 in one kernel."""
        tiles = [y for y in self.ys if isinstance(y, Fp8)]
        pairs = zip(self.gs, self.ys, strict=True)
        inputs = [m for g, y in pairs for m in (g, g if isinstance(y, Fp8) else y)]
        _launch(_INPUT, self.du, self.v, inputs, (self.dx0,), tiles=tiles)


fused_cross_forward = function(FusedCrossForward, FusedCrossForward.launch)
plain_fused_cross_forward = function(FusedCrossForward, FusedCrossForward.plain)
cuda_fused_cross_forward = function(FusedCrossForward, FusedCrossForward.cuda)
fused_cross_backward = function(FusedCrossBackward, FusedCrossBackward.launch)
plain_fused_cross_backward = function(FusedCrossBackward, FusedCrossBackward.plain)
cuda_fused_cross_backward = function(FusedCrossBackward, FusedCrossBackward.cuda)
fused_cross_input_backward = function(FusedCrossInputBackward, FusedCrossInputBackward.launch)
plain_fused_cross_input_backward = function(FusedCrossInputBackward, FusedCrossInputBackward.plain)
cuda_fused_cross_input_backward = function(FusedCrossInputBackward, FusedCrossInputBackward.cuda)


@functools.cache
def _kernel(
    mode: int, pairs: int, steps: int, factors: int, output: int, keeps: bool, tiles: bool, device: torch.device
) -> Kernel:
    """Returns the compiled kernel. factors, output: the formats of a and of the second output's copies. keeps: whether
    the second output is stored in bf16. tiles: whether y is 8-bit."""
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
    written = [t for t in (*outputs, bias) if t is not None]
    assert all(t.dtype == torch.bfloat16 and t.data_ptr() % 16 == 0 for t in written), "bf16, 16-byte aligned"
    assert partials is None or partials.dtype == torch.float32, "partials: fp32"
    unscale = 1 / (a.scale * b.scale) if isinstance(a, Fp8) and isinstance(b, Fp8) else 1
    a, b = (factor.values if isinstance(factor, Fp8) else factor for factor in (a, b))
    (batch, width), pairs, depth = inputs[0].shape, len(inputs) // 2, _CHUNK_BYTES // a.itemsize
    # Rows of b's box: with bf16, the backward's factors have the summed dimension first.
    b_box_rows = _CHUNK if mode != _FORWARD and a.dtype == torch.bfloat16 else _COLUMNS
    row_tiles, column_tiles = cdiv(batch, _ROWS), cdiv(width, _COLUMNS)
    blocks = _blocks(row_tiles * column_tiles, multiprocessors(a.device))
    size = (row_tiles, column_tiles, _ROWS * _COLUMNS)
    assert all(y.values.shape == size and y.values.is_contiguous() for y in tiles), "y: from empty_y"
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
        _blocks_of_columns(batch, width, multiprocessors(a.device)),
    )
    formats = FORMATS[a.dtype], FORMATS[torch.bfloat16 if out8 is None else out8.plain.values.dtype]
    steps = cdiv(a.shape[1], depth)
    assert steps <= _MAX_STEPS, f"depth: at most {_MAX_STEPS * depth}, not {a.shape[1]}"  # b would not fit
    kernel = _kernel(mode, pairs, steps, *formats, outputs[-1] is not None, len(tiles) > 0, a.device)
    kernel.launch(blocks, arguments)


def _blocks(tiles: int, multiprocessors: int) -> int:
    """Returns the number of blocks: the fewest none of which has more tiles than if each multiprocessor had a block.

    The multiprocessors that are left over run the kernels beside this one, for which its last blocks would else wait.
    """
    return cdiv(tiles, cdiv(tiles, multiprocessors))


@functools.cache
def _blocks_of_columns(batch: int, width: int, multiprocessors: int) -> int:
    """Returns the largest number of blocks of the kernel that work on the same columns."""
    row_tiles, column_tiles = cdiv(batch, _ROWS), cdiv(width, _COLUMNS)
    tiles = row_tiles * column_tiles
    blocks = _blocks(tiles, multiprocessors)

    def block_of(tile: int) -> int:
        return ((tile + 1) * blocks - 1) // tiles

    return max(
        block_of((column + 1) * row_tiles - 1) - block_of(column * row_tiles) + 1 for column in range(column_tiles)
    )
