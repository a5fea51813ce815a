"""Products of matrices in eight bits, for Hopper GPUs, and the rounding of their factors.

A scale is a constant, so nothing has to be measured before a factor is written: e4m3 has 18 powers of two, from its
smallest number to 448, and e5m2 has 32. What is too large becomes the largest number of its sign.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import Kernel, TensorMap, available, tensor_map
from dlrm_bench.kernels._triton import cdiv, jit, tl

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {torch.bfloat16: 0, E4M3: 1, E5M2: 2}
"""As in hopper.cuh."""

# As in fp8.cu.
_TILE, _DEPTH, _THREADS = 128, 128, 384
# What aligns the rest; six stages of both factors, two warpgroups' outputs; barriers.
_SHARED_BYTES = 1024 + 6 * 2 * 16384 + 4 * 8192 + 256
_SOURCE = Path(__file__).with_suffix(".cu")

_ELEMENTS = 4096  # of one program of `quantise`


class Fp8(NamedTuple):
    """A matrix in eight bits."""

    values: Tensor
    """e4m3 or e5m2, contiguous: the numbers times `scale`."""
    scale: float
    """A power of two."""

    def rows(self, rows: slice) -> Fp8:
        """Returns these rows, in the same memory."""
        return Fp8(self.values[rows], self.scale)

    def float(self) -> Tensor:
        """Returns the numbers in fp32."""
        return self.values.float() / self.scale

    def take(self, x: Tensor) -> None:
        """Rounds x, of any format, in PyTorch; NaN stays NaN."""
        largest = torch.finfo(self.values.dtype).max
        self.values.copy_((x.float() * self.scale).clamp(-largest, largest))


def empty(rows: int, columns: int, dtype: torch.dtype, scale: float, device: torch.device) -> Fp8:
    """Returns memory for a matrix, all zeros."""
    return Fp8(torch.zeros(rows, columns, dtype=dtype, device=device), scale)


def applies(device: torch.device) -> bool:
    """Whether the GPU has the kernels' instructions. The plain functions take all."""
    return device.type == "cuda" and available()


def quantise(x: Tensor, out: Fp8) -> None:
    """Rounds x to `out`. x: bf16 or fp32, of out's shape, contiguous."""
    assert x.shape == out.values.shape and x.is_contiguous() and out.values.is_contiguous(), "contiguous, of one shape"
    round_to = triton_quantise if applies(x.device) else plain_quantise
    round_to(x, out)


def plain_quantise(x: Tensor, out: Fp8) -> None:
    """What `quantise` does, in PyTorch."""
    out.take(x)


def triton_quantise(x: Tensor, out: Fp8) -> None:
    """What `quantise` does, in one kernel."""
    _quantise_kernel[(cdiv(x.numel(), _ELEMENTS),)](x, out.values, x.numel(), out.scale, _ELEMENTS, num_warps=8)


def fp8_product(a: Fp8, b: Fp8, out: Tensor, out8: Fp8 | None = None, relu_bias: Tensor | None = None) -> None:
    """out = a @ b.T, or relu(a @ b.T + relu_bias); out8: the same, of the rounded `out`.

    a: e4m3 or e5m2 [rows, depth]; b: e4m3 [columns, depth]; out: bf16 (on CPUs also fp32) [rows, columns]; out8: of
    its shape; relu_bias: [columns]. All contiguous, depth and columns multiples of 16. On GPUs sums over 512 have some
    14 bits, and are added up in fp32; cuBLAS's, where out is all, of any depth.
    """
    assert out.shape == (len(a.values), len(b.values)) and a.values.shape[1] == b.values.shape[1], "shapes"
    assert b.values.dtype == E4M3 and a.values.shape[1] % 16 == 0 and out.shape[1] % 16 == 0, "b: e4m3, aligned"
    assert all(t.is_contiguous() for t in (a.values, b.values, out)), "contiguous tensors only"
    if not applies(out.device):
        plain_fp8_product(a, b, out, out8, relu_bias)
    elif out8 is None and relu_bias is None:
        # [3456, 1024] by 3456 on an H200: 21.9 us, the kernel 30.7; [3456, 3456] by 512: 12.9 and 12.6.
        scale_a, scale_b = (_inverse(factor.scale, out.device) for factor in (a, b))
        torch._scaled_mm(a.values, b.values.t(), scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=True, out=out)
    else:
        cuda_fp8_product(a, b, out, out8, relu_bias)


@functools.cache
def _inverse(scale: float, device: torch.device) -> Tensor:
    return torch.tensor(1 / scale, device=device)


def plain_fp8_product(a: Fp8, b: Fp8, out: Tensor, out8: Fp8 | None = None, relu_bias: Tensor | None = None) -> None:
    """What `fp8_product` does, in PyTorch."""
    product = a.float() @ b.float().t()
    out.copy_(product if relu_bias is None else (product + relu_bias.float()).relu())
    if out8 is not None:
        out8.take(out)


def cuda_fp8_product(a: Fp8, b: Fp8, out: Tensor, out8: Fp8 | None = None, relu_bias: Tensor | None = None) -> None:
    """What `fp8_product` does, in one kernel."""
    rows, columns = out.shape
    arguments = _Arguments(
        tensor_map(a.values, _TILE, _DEPTH),
        tensor_map(b.values, _TILE, _DEPTH),
        out.data_ptr(),
        None if out8 is None else out8.values.data_ptr(),
        None if relu_bias is None else relu_bias.data_ptr(),
        1 if out8 is None else out8.scale,
        1 / (a.scale * b.scale),
        rows,
        columns,
        cdiv(a.values.shape[1], _DEPTH),
        cdiv(columns, _TILE),
    )
    output = FORMATS[torch.bfloat16 if out8 is None else out8.values.dtype]
    kernel = _kernel(FORMATS[a.values.dtype], output, relu_bias is not None, out.device)
    kernel.launch(cdiv(rows, _TILE) * cdiv(columns, _TILE), arguments)


class _Arguments(ctypes.Structure):
    """fp8.cu's struct Arguments."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("out", ctypes.c_void_p),
        ("quantised", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("unscale", ctypes.c_float),
        ("batch", ctypes.c_int),
        ("width", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("padding", ctypes.c_char * 16),  # to a multiple of a TensorMap's alignment
    )


@functools.cache
def _kernel(factor: int, output: int, relu: bool, device: torch.device) -> Kernel:
    defines = {"FACTOR": factor, "OUTPUT": output, "RELU": int(relu)}
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "fp8_product", defines, _THREADS, _SHARED_BYTES)


def kernel_arguments(out8: Fp8 | None, unused: Tensor) -> tuple[Tensor, float, bool]:
    """Returns what Triton kernels take to write `out8` too: memory, scale, and whether there is any. unused: any
    tensor, for a memory that is not written."""
    return (unused, 1.0, False) if out8 is None else (*out8, True)


@jit
def rounded(value, out, scale) -> None:
    """Returns what Triton kernels store to `out`: for Hopper Triton's cast makes of what is too large the largest."""
    return (value.to(tl.float32) * scale).to(out.dtype.element_ty)


@jit
def _quantise_kernel(x, out, n, scale, elements: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    tl.store(out + at, rounded(tl.load(x + at, at < n, other=0.0), out, scale), at < n)
