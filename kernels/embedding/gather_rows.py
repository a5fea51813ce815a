"""Gathers rows of a matrix: embeddings of single ids, without pooling."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl

_TILE_ELEMENTS = 4096  # elements that a program copies


def gather_rows(source: Tensor, rows: Tensor, out: Tensor, places: Tensor | None = None) -> None:
    """Computes out[places[n]] = source[rows[n]], or out[n] without places; zeros where rows[n] is negative.

    source: fp32, bf16 or fp16 [R, C]; rows: int32 [N], each below R (not checked); out: [N, C] of any of the three
    formats, overlapping nothing. C: a power of two. places: int32 [N], a permutation of 0 .. N - 1: with sorted rows,
    frequent rows are read once and then found in a cache. All contiguous.
    """
    columns = source.shape[1]
    assert out.shape == (len(rows), columns), f"out: [N, C], not {list(out.shape)}"
    assert rows.dtype == torch.int32, "rows: int32"
    assert columns == next_power_of_2(columns), f"columns: a power of two, not {columns}"
    assert source.is_contiguous() and rows.is_contiguous() and out.is_contiguous(), "contiguous tensors only"
    if places is not None:
        assert places.dtype == torch.int32 and places.shape == rows.shape and places.is_contiguous(), (
            "places: int32 [N]"
        )
    gather = triton_gather_rows if source.is_cuda else plain_gather_rows
    gather(source, rows, out, places)


def plain_gather_rows(source: Tensor, rows: Tensor, out: Tensor, places: Tensor | None = None) -> None:
    """Computes `gather_rows` in PyTorch."""
    named = rows >= 0
    out.zero_()
    out[named if places is None else places[named].long()] = source[rows[named].long()].to(out.dtype)


def triton_gather_rows(source: Tensor, rows: Tensor, out: Tensor, places: Tensor | None = None) -> None:
    """Computes `gather_rows` in one kernel."""
    count, columns = out.shape
    if count:
        tile = max(1, _TILE_ELEMENTS // columns)
        _gather_rows_kernel[(cdiv(count, tile),)](source, rows, out, places, count, columns, tile, num_warps=4)


@jit
def _gather_rows_kernel(source, rows, out, places, count, columns: tl.constexpr, tile: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.arange(0, columns)[None, :]
    inside = at < count
    row = tl.load(rows + at, inside, other=-1)
    place = at
    if places is not None:
        place = tl.load(places + at, inside, other=0).to(tl.int64)
    value = tl.load(source + row.to(tl.int64)[:, None] * columns + column, (row >= 0)[:, None], other=0.0)
    tl.store(out + place[:, None] * columns + column, value.to(out.dtype.element_ty), inside[:, None])
