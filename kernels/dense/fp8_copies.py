"""8-bit copies of matrices, plain and transposed (kernels.dense.fp8.Fp8Pair), with an optional ReLU backward."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import Kernel
from dlrm_bench.kernels._triton import cdiv
from dlrm_bench.kernels.dense.fp8 import FORMATS, Fp8Pair, applies, check_pair

# As in fp8_copies.cu.
_TILE, _WARPS = 64, 4
_SOURCE = Path(__file__).with_suffix(".cu")


def partial_rows(batch: int) -> int:
    """Returns the number of rows of partial sums that `fp8_copies` writes for `batch` samples."""
    return cdiv(batch, _TILE)


def fp8_copies(x: Tensor, out: Fp8Pair, mask: Tensor | None = None, partials: Tensor | None = None) -> None:
    """Computes out = x, zeroed where mask <= 0: the backward of a ReLU whose output is `mask`.

    x, mask: bf16 (on CPUs also fp32) [batch, width], contiguous, multiples of 16. partials, given exactly if mask is:
    fp32 [partial_rows(batch), width], overwritten by partial column sums before rounding; their `column_sums` is a
    bias gradient.
    """
    batch, width = x.shape
    assert (mask is None) == (partials is None), "mask and partials: both or neither"
    assert x.is_contiguous() and (mask is None or (mask.shape == x.shape and mask.is_contiguous())), "[batch, width]"
    check_pair(out, batch, width)
    if partials is not None:
        assert partials.shape == (partial_rows(batch), width) and partials.is_contiguous(), (
            "partials: [partial_rows(batch), width], contiguous"
        )
        assert partials.dtype == torch.float32, "partials: fp32"
    copies = cuda_fp8_copies if applies(x.device) else plain_fp8_copies
    copies(x, out, mask, partials)


def plain_fp8_copies(x: Tensor, out: Fp8Pair, mask: Tensor | None = None, partials: Tensor | None = None) -> None:
    """Computes `fp8_copies` in PyTorch."""
    result = x.float() if mask is None else x.float().masked_fill(mask <= 0, 0)
    if partials is not None:
        partials.zero_()[0] = result.sum(0)
    out.take(result)


def cuda_fp8_copies(x: Tensor, out: Fp8Pair, mask: Tensor | None = None, partials: Tensor | None = None) -> None:
    """Computes `fp8_copies` in one kernel."""
    inputs = [x] if mask is None else [x, mask]
    assert all(t.dtype == torch.bfloat16 and t.data_ptr() % 16 == 0 for t in inputs), (
        "x and mask: bf16, 16-byte aligned"
    )
    batch, width = x.shape
    row_tiles, column_tiles = partial_rows(batch), cdiv(width, _TILE)
    tally, limit = out.plain.tallied()
    arguments = _Arguments(
        x.data_ptr(),
        None if mask is None else mask.data_ptr(),
        *out.addresses(),
        None if partials is None else partials.data_ptr(),
        tally,
        out.plain.scale,
        limit,
        out.transposed.values.stride(0),
        batch,
        width,
        column_tiles,
    )
    kernel = _kernel(mask is not None, FORMATS[out.plain.values.dtype], x.device)
    kernel.launch(cdiv(row_tiles * column_tiles, _WARPS), arguments)


class _Arguments(ctypes.Structure):
    """fp8_copies.cu's struct Arguments."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("quantised", ctypes.c_void_p),
        ("transposed", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("tally", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("limit", ctypes.c_uint),
        ("transposed_stride", ctypes.c_int),
        ("batch", ctypes.c_int),
        ("width", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
    )


@functools.cache
def _kernel(masks: bool, output: int, device: torch.device) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "fp8_copies", {"MASK": int(masks), "OUTPUT": output}, 32 * _WARPS, 0)
