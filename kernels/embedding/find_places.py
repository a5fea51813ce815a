"""Finds the places of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit_of_any, tl

_BLOCK = 256


def find_places(place: Tensor, rows: Tensor, out: Tensor) -> None:
    """Computes out[n] = place[rows[n]], and -1 for negative rows.

    place: int32 [R]; rows: int32 [N], each below R (not checked); out: int32 [N]. All contiguous.
    """
    assert place.dtype == rows.dtype == out.dtype == torch.int32, "int32"
    assert place.is_contiguous() and rows.is_contiguous() and out.is_contiguous(), "contiguous tensors only"
    assert rows.shape == out.shape, "a place for each row"
    find = triton_find_places if place.is_cuda else plain_find_places
    find(place, rows, out)


def plain_find_places(place: Tensor, rows: Tensor, out: Tensor) -> None:
    """Computes `find_places` in PyTorch."""
    out.copy_(torch.where(rows < 0, -1, place[rows.clamp_min(0).long()]))


def triton_find_places(place: Tensor, rows: Tensor, out: Tensor) -> None:
    """Computes `find_places` in one kernel."""
    if len(rows):
        _find_places_kernel[(cdiv(len(rows), _BLOCK),)](place, rows, out, len(rows), _BLOCK)


@jit_of_any("count")
def _find_places_kernel(place, rows, out, count, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.load(rows + at, at < count, other=-1)
    tl.store(out + at, tl.load(place + row, row >= 0, other=-1), at < count)
