"""Initial weights of single rows, created when their ids are first named: the same as in complete tables.

An element of a table is a function of only the table's start, its row and its column: SplitMix64 (Steele, Lea, Flood,
OOPSLA 2014) of a counter, of which 24 bits become a number, uniform in +-bound. The counter is row * 2^20 + column; a
row may be any 64-bit id, and the counter's bits beyond 64 (0 of rows below 2^44) move the table's start by their hash.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.embedding._split_mix import GOLDEN, MIX_1, MIX_2, mix, mix_kernel, shift_right
from dlrm_bench.kernels.embedding.id_map import Keys

_TILE_ELEMENTS = 2048  # that a program computes at a time
# A program looks at many targets, as few are new in a large batch; but programs must fill the GPU where many are.
_TARGETS, _PROGRAMS = 512, 4096
_COLUMN_BITS = 20  # of a counter


class RowsOfTables(NamedTuple):
    """T tables' rows in an owner's numbering, and the distribution of their initial weights.

    Number first_rows[t] + i is row row_part + i * row_parts of table t. Keys with tables, 0 to T - 1, have the numbers
    of their own table."""

    first_rows: Tensor
    """int64 [T]; ascending, each once, for keys without tables."""
    starts: Tensor
    """int64 [T], start of each table's counters."""
    scales: Tensor
    """fp32 [T]: 2 * bound / 2^24."""
    bounds: Tensor
    """fp32 [T]."""
    row_part: int
    row_parts: int


def uniform(counters: Tensor, key: int | Tensor) -> Tensor:
    """Returns 24-bit numbers in fp32 (exact), for the counters of a table's elements. counters: int64."""
    return shift_right(mix(counters * GOLDEN + key), 40).to(torch.float32)


def initial_rows(out: Tensor, targets: Tensor, keys: Keys, of: RowsOfTables, zeros: Tensor | None = None) -> None:
    """Writes the initial weights of an owner's row keys[n] to out[targets[n]]; nothing if targets[n] is negative.

    out: fp32, bf16 or fp16 [R, C], C a power of two, columns adjacent; targets: int32 [N], each below R; keys: N, valid
    where the target is not negative. zeros: fp32 [R, 0, 1 or C], columns adjacent, whose rows targets[n] become 0.
    """
    columns = out.shape[1]
    assert targets.dtype == torch.int32 and targets.shape == keys.ids.shape, "targets: int32 [N], keys: N"
    assert columns == next_power_of_2(columns), f"columns: a power of two, not {columns}"
    assert out.stride(1) == 1 and targets.is_contiguous() and keys.ids.is_contiguous(), "adjacent elements only"
    assert keys.tables is None or keys.tables.is_contiguous(), "adjacent elements only"
    assert zeros is None or (zeros.stride(1) == 1 and zeros.shape[1] in (0, 1, columns)), "zeros: [R, 0, 1 or C]"
    write = triton_initial_rows if out.is_cuda else plain_initial_rows
    write(out, targets, keys, of, zeros)


def plain_initial_rows(out: Tensor, targets: Tensor, keys: Keys, of: RowsOfTables, zeros: Tensor | None = None) -> None:
    """Computes `initial_rows` in PyTorch."""
    named = (targets >= 0).nonzero().flatten()
    if zeros is not None:
        zeros[targets[named].long()] = 0.0
    number, table = keys.ids[named].long(), table_of(keys.some(named), of.first_rows)
    row = of.row_part + (number - of.first_rows[table]) * of.row_parts
    counters = (row[:, None] << _COLUMN_BITS) + torch.arange(out.shape[1], device=out.device)
    starts = of.starts[table] + mix(shift_right(row, 64 - _COLUMN_BITS))
    drawn = uniform(counters, starts[:, None])
    out[targets[named].long()] = (drawn * of.scales[table][:, None] - of.bounds[table][:, None]).to(out.dtype)


def table_of(keys: Keys, first_rows: Tensor) -> Tensor:
    """Returns the table of each key, int64 [N]. first_rows: as in RowsOfTables."""
    if keys.tables is not None:
        return keys.tables.long()
    return torch.searchsorted(first_rows, keys.ids.long(), right=True) - 1


def triton_initial_rows(
    out: Tensor, targets: Tensor, keys: Keys, of: RowsOfTables, zeros: Tensor | None = None
) -> None:
    """Computes `initial_rows` in one kernel."""
    count, columns = len(targets), out.shape[1]
    if not count:
        return
    tile, tables = max(1, _TILE_ELEMENTS // columns), len(of.starts)
    block = max(min(_TARGETS, next_power_of_2(cdiv(count, _PROGRAMS))), tile)
    zero_columns, zero_stride = (0, 0) if zeros is None else (zeros.shape[1], zeros.stride(0))
    tensors = (out, zeros if zero_columns else None, targets, *keys, of.first_rows, of.starts, of.scales, of.bounds)
    numbering = (of.row_part, of.row_parts, tables, next_power_of_2(tables))
    sizes = (
        count,
        out.stride(0),
        zero_stride,
        *numbering,
        columns,
        zero_columns,
        _COLUMN_BITS,
        block,
        tile,
        GOLDEN,
        MIX_1,
        MIX_2,
    )
    # Without fusion: the product and the difference are rounded separately, as in PyTorch.
    _initial_rows_kernel[(cdiv(count, block),)](*tensors, *sizes, num_warps=4, enable_fp_fusion=False)


@jit
def _initial_rows_kernel(
    out,
    zeros,
    targets,
    numbers,
    tables_of,
    first_rows,
    starts,
    scales,
    bounds,
    count,
    stride,
    zero_stride,
    row_part,
    row_parts,
    tables: tl.constexpr,
    table_block: tl.constexpr,
    columns: tl.constexpr,
    zero_columns: tl.constexpr,
    column_bits: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    golden: tl.constexpr,
    mix_1: tl.constexpr,
    mix_2: tl.constexpr,
) -> None:
    begin = tl.program_id(0) * block
    each_target = begin + tl.arange(0, block)
    if tl.max(tl.load(targets + each_target, each_target < count, other=-1), 0) >= 0:
        for first_of_tile in range(0, block, tile):
            at = begin + first_of_tile + tl.arange(0, tile)
            target = tl.load(targets + at, at < count, other=-1)
            if tl.max(target, 0) >= 0:
                number = tl.load(numbers + at, at < count, other=0).to(tl.int64)
                if tables_of is not None:
                    table = tl.load(tables_of + at, at < count, other=0)
                else:
                    each = tl.arange(0, table_block)
                    first = tl.load(first_rows + each, each < tables, other=9223372036854775807)
                    table = tl.maximum(tl.sum((first[None, :] <= number[:, None]).to(tl.int32), 1) - 1, 0)
                row = row_part + (number - tl.load(first_rows + table)) * row_parts
                high = (row >> (64 - column_bits)) & ((1 << column_bits) - 1)
                start = tl.load(starts + table) + mix_kernel(high, mix_1, mix_2)
                column = tl.arange(0, columns)[None, :]
                x = ((row << column_bits)[:, None] + column) * golden + start[:, None]
                drawn = ((mix_kernel(x, mix_1, mix_2) >> 40) & 0xFFFFFF).to(tl.float32)
                value = drawn * tl.load(scales + table)[:, None] - tl.load(bounds + table)[:, None]
                place = out + target.to(tl.int64)[:, None] * stride + column
                tl.store(place, value.to(out.dtype.element_ty), (target >= 0)[:, None])
                if zeros is not None:
                    zero = zeros + target.to(tl.int64)[:, None] * zero_stride + tl.arange(0, zero_columns)[None, :]
                    tl.store(zero, tl.full([tile, zero_columns], 0, tl.float32), (target >= 0)[:, None])
