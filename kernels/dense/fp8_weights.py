"""8-bit weights for the products of kernels.dense.fp8, which take both factors with the summed dimension last: stored
plain for one product and transposed for another."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import Kernel
from dlrm_bench.kernels._triton import cdiv
from dlrm_bench.kernels.dense.fp8 import E4M3, Fp8, applies

# As in fp8_weights.cu.
_ROWS, _COLUMNS, _WARPS = 64, 64, 4
_SOURCE = Path(__file__).with_suffix(".cu")


class WeightCopy(NamedTuple):
    """A weight and its copies in e4m3."""

    weight: Tensor
    """bf16 (on CPUs also fp32) [rows, columns], contiguous, multiples of 16."""
    plain: Fp8
    """[rows, columns]; its tally, if any, counts the weight's elements once."""
    transposed: Fp8
    """[columns, rows]."""


class WeightCopies:
    """Weights of one network, rounded by one kernel."""

    def __init__(self, copies: Sequence[WeightCopy]) -> None:
        """copies: all of one scale, on one device."""
        formats = {t.values.dtype for copy in copies for t in copy[1:]}
        assert len({t.scale for copy in copies for t in copy[1:]}) == 1 and formats == {E4M3}, "e4m3 with one scale"
        assert len({copy.plain.tally is None for copy in copies}) == 1, "tallies: for all weights or for none"
        assert all(n % 16 == 0 for copy in copies for n in copy.weight.shape), "rows and columns: multiples of 16"
        assert all(t.is_contiguous() for copy in copies for t in _matrices(copy)), "contiguous matrices only"
        assert all(plain.shape == w.shape == t.t().shape for w, plain, t in map(_matrices, copies)), (
            "copies: shaped like the weight, and like its transpose"
        )
        self.copies, device = copies, copies[0].weight.device
        self.tiles = torch.tensor(_tiles(copies), device=device) if applies(device) else None


def fp8_weights(weights: WeightCopies) -> None:
    """Rounds the current weights to both copies of each."""
    copy = plain_fp8_weights if weights.tiles is None else cuda_fp8_weights
    copy(weights)


def plain_fp8_weights(weights: WeightCopies) -> None:
    """Computes `fp8_weights` in PyTorch."""
    for weight, plain, transposed in weights.copies:
        plain.take(weight)
        transposed.take(weight.t())


def cuda_fp8_weights(weights: WeightCopies) -> None:
    """Computes `fp8_weights` in one kernel."""
    assert weights.tiles is not None, "weights on a Hopper GPU"
    first = weights.copies[0].plain
    arguments = _Arguments(weights.tiles.data_ptr(), first.scale, first.tallied()[1], len(weights.tiles))
    _kernel(weights.tiles.device).launch(cdiv(len(weights.tiles), _WARPS), arguments)


def _matrices(copy: WeightCopy) -> tuple[Tensor, Tensor, Tensor]:
    return copy.weight, copy.plain.values, copy.transposed.values


def _tiles(copies: Sequence[WeightCopy]) -> list[list[int]]:
    """Returns fp8_weights.cu's struct Tile for each warp, in 8-byte words."""
    assert all(copy.weight.dtype == torch.bfloat16 for copy in copies), "bf16 weights"
    tiles = []
    for copy in copies:
        addresses = [t.data_ptr() for t in _matrices(copy)]
        assert all(address % 16 == 0 for address in addresses), "16-byte aligned"
        rows, columns = copy.weight.shape
        addresses.append(copy.plain.tallied()[0] or 0)
        tiles += [
            [*addresses, rows | columns << 32, row | column << 32]
            for row in range(0, rows, _ROWS)
            for column in range(0, columns, _COLUMNS)
        ]
    return tiles


class _Arguments(ctypes.Structure):
    """fp8_weights.cu's struct Arguments."""

    _fields_ = (
        ("tiles", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("limit", ctypes.c_uint),
        ("count", ctypes.c_int),
    )


@functools.cache
def _kernel(device: torch.device) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(_SOURCE, "fp8_weights", {}, 32 * _WARPS, 0)
