"""8-bit matrix products, for Hopper GPUs.

The instructions take both factors with the summed dimension last. A matrix that one product sums over its columns and
another over the batch is therefore stored twice, plain and transposed.

Scales are constants, so nothing has to be measured before a factor is written: e4m3 covers 18 powers of two, from its
smallest number to 448, and e5m2 covers 32. A number that is too large, Infinity included, saturates to the largest
number of its sign, and is counted if there is a tally.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import Kernel, TensorMap, available, tensor_map
from dlrm_bench.kernels._triton import cdiv

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {torch.bfloat16: 0, E4M3: 1, E5M2: 2}
"""Number of each format in hopper.cuh."""

# As in fp8.cu.
_TILE, _DEPTH, _THREADS = 128, 128, 384
# Alignment; six stages of both factors, outputs of two warpgroups; barriers.
_SHARED_BYTES = 1024 + 6 * 2 * 16384 + 4 * 8192 + 256
_SOURCE = Path(__file__).with_suffix(".cu")

# Order of samples in a transposed matrix: that of an accumulator fragment, where one lane holds rows r and r + 8. Both
# factors of a sum over the batch use this order.
_GROUP = 16


class Fp8(NamedTuple):
    """An 8-bit matrix."""

    values: Tensor
    """e4m3 or e5m2: the numbers times `scale`. Contiguous, except that rows of a part of a batch may be strided."""
    scale: float
    """A power of two."""
    tally: Tensor | None = None
    """int64 [2] or None. Rounding to `values` adds the number of finite numbers that were too large (and saturated),
    and the number of non-finite ones."""

    def rows(self, rows: slice) -> Fp8:
        """Returns these rows, in the same memory."""
        return self._replace(values=self.values[rows])

    def float(self) -> Tensor:
        """Returns the numbers in fp32."""
        return self.values.float() / self.scale

    def take(self, x: Tensor) -> None:
        """Rounds x, of any format, to `values`, in PyTorch; NaN stays NaN."""
        largest, x = torch.finfo(self.values.dtype).max, x.float()
        scaled = x * self.scale
        self.values.copy_(scaled.clamp(-largest, largest))
        if self.tally is not None:
            finite = x.isfinite()
            self.tally.add_(torch.stack([(finite & (scaled.abs() > largest)).sum(), (~finite).sum()]))

    def tallied(self) -> tuple[int | None, int]:
        """Returns, for kernels, the tally's address and the bits of the largest bf16 number that is not too large;
        without a tally, a limit that no number exceeds."""
        if self.tally is None:
            return None, 0xFFFF
        largest = torch.finfo(self.values.dtype).max / self.scale  # exact: scales are powers of two
        return self.tally.data_ptr(), int.from_bytes(struct.pack("<f", largest), "little") >> 16


class Fp8Pair(NamedTuple):
    """An 8-bit matrix of a batch, for products over its columns and for products over the batch."""

    plain: Fp8
    """[batch, columns]; batch: a multiple of 16."""
    transposed: Fp8
    """[columns, batch]; each group of 16 samples is stored in the order 0, 8, 1, 9, ... 7, 15."""

    def rows(self, rows: slice) -> Fp8Pair:
        """Returns these samples, in whole groups of 16, in the same memory."""
        plain, transposed = self
        return Fp8Pair(plain.rows(rows), Fp8(transposed.values[:, rows], transposed.scale))

    def take(self, x: Tensor) -> None:
        """Rounds x [batch, columns], of any format, in PyTorch; NaN stays NaN."""
        self.plain.take(x)
        values = self.plain.values
        groups = values.view(torch.uint8).view(-1, 2, _GROUP // 2, values.shape[1]).transpose(1, 2)
        self.transposed.values.view(torch.uint8).copy_(groups.reshape(values.shape).t())

    def addresses(self) -> tuple[int, int]:
        """Returns the addresses of both matrices, for kernels."""
        return self.plain.values.data_ptr(), self.transposed.values.data_ptr()


def rounded(x: Tensor, scale: float, tally: Tensor | None = None) -> Fp8:
    """Returns x, of any format and strides, in e4m3; by PyTorch. tally: see Fp8."""
    out = Fp8(torch.empty(x.shape, dtype=E4M3, device=x.device), scale, tally)
    out.take(x)
    return out


def empty(rows: int, columns: int, dtype: torch.dtype, scale: float, device: torch.device) -> Fp8:
    """Returns a zeroed matrix."""
    return Fp8(torch.zeros(rows, columns, dtype=dtype, device=device), scale)


def empty_pair(
    batch: int, columns: int, dtype: torch.dtype, scale: float, device: torch.device, tally: Tensor | None = None
) -> Fp8Pair:
    """Returns a zeroed matrix of a batch and its transpose. tally: see Fp8; the pair counts each number once."""
    plain, transposed = (empty(*size, dtype, scale, device) for size in ((batch, columns), (columns, batch)))
    return Fp8Pair(plain._replace(tally=tally), transposed)


def applies(device: torch.device) -> bool:
    """Whether the GPU has the kernels' instructions. The plain functions run anywhere."""
    return device.type == "cuda" and available()


def require_products(device: torch.device) -> None:
    """Raises ValueError if the device is a GPU without 8-bit products."""
    if device.type == "cuda" and not applies(device):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"--fp8 needs a Hopper GPU (sm_90) and cuda-bindings, but this is {name}: leave --fp8 out")


def check_pair(pair: Fp8Pair, batch: int, columns: int) -> None:
    """Asserts the requirements of kernels that write pairs."""
    plain, transposed = pair.plain.values, pair.transposed.values
    assert plain.shape == (batch, columns) and transposed.shape == (columns, batch), "[batch, columns], and transposed"
    assert batch % _GROUP == 0 and columns % 16 == 0, "batch and columns: multiples of 16"
    assert plain.is_contiguous() and transposed.stride(1) == 1, "contiguous rows"
    assert transposed.stride(0) % 16 == plain.data_ptr() % 16 == transposed.data_ptr() % 16 == 0, "16-byte aligned"
    assert plain.dtype == transposed.dtype and pair.plain.scale == pair.transposed.scale, "one format, one scale"


def fp8_product(
    a: Fp8,
    b: Fp8,
    out: Tensor | Fp8Pair,
    relu_bias: Tensor | None = None,
    exact: bool = False,
    bias: Tensor | None = None,
) -> None:
    """Computes out = a @ b.T, relu(a @ b.T + relu_bias), or a @ b.T + bias.

    a: e4m3 or e5m2 [rows, depth]; b: e4m3 [columns, depth]; out: bf16 (on CPUs also fp32) [rows, columns], or an 8-bit
    matrix of this shape, from values rounded to bf16 first; relu_bias, bias: like a row of a bf16 (or fp32) out. All
    contiguous, depth and columns multiples of 16. On GPUs, partial sums over a depth of 512 have some 14 bits and are
    added in fp32. cuBLAS, which computes products to bf16 without a ReLU, accumulates any depth that way; with `exact`,
    which only these products take, at most 128.
    """
    rows, columns = len(a.values), len(b.values)
    assert b.values.dtype == E4M3 and a.values.shape[1] % 16 == 0 and columns % 16 == 0, "b: e4m3, aligned"
    assert a.values.shape[1] == b.values.shape[1], "one depth"
    assert a.values.is_contiguous() and b.values.is_contiguous(), "contiguous factors"
    assert bias is None or (relu_bias is None and isinstance(out, Tensor)), "bias: for bf16 outputs without a ReLU"
    for of_columns in (bias, relu_bias):
        assert of_columns is None or (of_columns.shape == (columns,) and of_columns.is_contiguous()), "bias: [columns]"
    if isinstance(out, Fp8Pair):
        check_pair(out, rows, columns)
    else:
        assert out.shape == (rows, columns) and out.is_contiguous(), "out: [rows, columns], contiguous"
    if not applies(a.values.device):
        plain_fp8_product(a, b, out, relu_bias, bias)
    elif isinstance(out, Tensor) and relu_bias is None:
        # [3456, 1024] by 3456 on an H200: 21.9 us, the kernel 30.7; [3456, 3456] by 512: 12.9 and 12.6.
        scale_a, scale_b = (_inverse(factor.scale, out.device) for factor in (a, b))
        factors, fast = (a.values, b.values.t(), scale_a, scale_b), not exact
        torch._scaled_mm(*factors, bias, out_dtype=out.dtype, use_fast_accum=fast, out=out)
    else:
        assert not exact, "exact: for bf16 outputs without a ReLU only"
        cuda_fp8_product(a, b, out, relu_bias)


@functools.cache
def _inverse(scale: float, device: torch.device) -> Tensor:
    return torch.tensor(1 / scale, device=device)


def plain_fp8_product(
    a: Fp8, b: Fp8, out: Tensor | Fp8Pair, relu_bias: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """Computes `fp8_product` in PyTorch."""
    product = a.float() @ b.float().t()
    if relu_bias is not None:
        product = (product + relu_bias.float()).relu()
    if bias is not None:
        product += bias.float()
    if isinstance(out, Fp8Pair):
        out.take(product.to(torch.bfloat16))
    else:
        out.copy_(product)


def cuda_fp8_product(a: Fp8, b: Fp8, out: Tensor | Fp8Pair, relu_bias: Tensor | None = None) -> None:
    """Computes `fp8_product` in one kernel."""
    in_16_bits = [t for t in (out, relu_bias) if isinstance(t, Tensor)]
    assert all(t.dtype == torch.bfloat16 for t in in_16_bits), "bf16 outputs and biases"
    rows, columns = len(a.values), len(b.values)
    in_bf16, in_eight_bits = (None, out) if isinstance(out, Fp8Pair) else (out, None)
    tally, limit = (None, 0) if in_eight_bits is None else in_eight_bits.plain.tallied()
    arguments = _Arguments(
        tensor_map(a.values, _TILE, _DEPTH),
        tensor_map(b.values, _TILE, _DEPTH),
        None if in_bf16 is None else in_bf16.data_ptr(),
        *((None, None) if in_eight_bits is None else in_eight_bits.addresses()),
        None if relu_bias is None else relu_bias.data_ptr(),
        tally,
        1 if in_eight_bits is None else in_eight_bits.plain.scale,
        1 / (a.scale * b.scale),
        limit,
        0 if in_eight_bits is None else in_eight_bits.transposed.values.stride(0),
        rows,
        columns,
        cdiv(a.values.shape[1], _DEPTH),
        cdiv(columns, _TILE),
    )
    output = torch.bfloat16 if in_eight_bits is None else in_eight_bits.plain.values.dtype
    kernel = _kernel(FORMATS[a.values.dtype], FORMATS[output], relu_bias is not None, a.values.device)
    kernel.launch(cdiv(rows, _TILE) * cdiv(columns, _TILE), arguments)


class _Arguments(ctypes.Structure):
    """fp8.cu's struct Arguments."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("out", ctypes.c_void_p),
        ("quantised", ctypes.c_void_p),
        ("transposed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("tally", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("unscale", ctypes.c_float),
        ("limit", ctypes.c_uint),
        ("transposed_stride", ctypes.c_int),
        ("batch", ctypes.c_int),
        ("width", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("padding", ctypes.c_char * 56),  # to a multiple of a TensorMap's alignment
    )


@functools.cache
def _kernel(factor: int, output: int, relu: bool, device: torch.device) -> Kernel:
    defines = {"FACTOR": factor, "OUTPUT": output, "RELU": int(relu)}
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "fp8_product", defines, _THREADS, _SHARED_BYTES)
