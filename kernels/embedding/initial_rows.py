"""Initial weights of single rows, created when their ids are first named: the same as in complete tables.

An element of a table is a function of only the table's key, its row and its column: SplitMix64 (Steele, Lea, Flood,
OOPSLA 2014) of a counter, of which 24 bits become a number, uniform in +-bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl

_TILE_ELEMENTS = 2048  # of a program


# torch has no unsigned arithmetic on int64, but its products wrap modulo 2^64, so the constants are given as the signed
# integers with the same bits.
def signed(x: int) -> int:
    """Returns the signed integer of the same 64 bits."""
    return (x + 2**63) % 2**64 - 2**63


GOLDEN = signed(0x9E3779B97F4A7C15)
"""Step of SplitMix64's counter."""
MIX_1 = signed(0xBF58476D1CE4E5B9)
MIX_2 = signed(0x94D049BB133111EB)


class RowsOfTables(NamedTuple):
    """T tables' rows in an owner's numbering, and the distribution of their initial weights.

    Number first_rows[t] + i is row row_part + i * row_parts of table t."""

    first_rows: Tensor
    """int64 [T], ascending, each once."""
    keys: Tensor
    """int64 [T], start of each table's counters."""
    scales: Tensor
    """fp32 [T]: 2 * bound / 2^24."""
    bounds: Tensor
    """fp32 [T]."""
    row_part: int
    row_parts: int


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Returns the logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Returns SplitMix64's hash of int64 numbers."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


def uniform(counters: Tensor, key: int | Tensor) -> Tensor:
    """Returns 24-bit numbers in fp32 (exact), for the counters of a table's elements. counters: int64."""
    return shift_right(mix(counters * GOLDEN + key), 40).to(torch.float32)


def initial_rows(out: Tensor, targets: Tensor, numbers: Tensor, of: RowsOfTables) -> None:
    """Writes the initial weights of an owner's row numbers[n] to out[targets[n]]; nothing if targets[n] is negative.

    out: fp32, bf16 or fp16 [R, C], C a power of two, columns adjacent; targets: int32 [N], each below R; numbers:
    integers [N], not negative where the target is not. Both contiguous.
    """
    columns = out.shape[1]
    assert targets.dtype == torch.int32 and targets.shape == numbers.shape, "targets: int32 [N], numbers: [N]"
    assert columns == next_power_of_2(columns), f"columns: a power of two, not {columns}"
    assert out.stride(1) == 1 and targets.is_contiguous() and numbers.is_contiguous(), "adjacent elements only"
    write = triton_initial_rows if out.is_cuda else plain_initial_rows
    write(out, targets, numbers, of)


def plain_initial_rows(out: Tensor, targets: Tensor, numbers: Tensor, of: RowsOfTables) -> None:
    """Computes `initial_rows` in PyTorch."""
    named = targets >= 0
    number = numbers[named].long()
    table = torch.searchsorted(of.first_rows, number, right=True) - 1
    row = of.row_part + (number - of.first_rows[table]) * of.row_parts
    counters = (row[:, None] << 20) + torch.arange(out.shape[1], device=out.device)
    drawn = uniform(counters, of.keys[table][:, None])
    out[targets[named].long()] = (drawn * of.scales[table][:, None] - of.bounds[table][:, None]).to(out.dtype)


def triton_initial_rows(out: Tensor, targets: Tensor, numbers: Tensor, of: RowsOfTables) -> None:
    """Computes `initial_rows` in one kernel."""
    count, columns = len(targets), out.shape[1]
    if not count:
        return
    tile, tables = max(1, _TILE_ELEMENTS // columns), len(of.keys)
    tensors = (out, targets, numbers, of.first_rows, of.keys, of.scales, of.bounds)
    numbering = (of.row_part, of.row_parts, tables, next_power_of_2(tables))
    sizes = (count, out.stride(0), *numbering, columns, tile, GOLDEN, MIX_1, MIX_2)
    # Without fusion: the product and the difference are rounded separately, as in PyTorch.
    _initial_rows_kernel[(cdiv(count, tile),)](*tensors, *sizes, num_warps=4, enable_fp_fusion=False)


@jit
def mix_kernel(x, mix_1: tl.constexpr, mix_2: tl.constexpr):
    """Computes SplitMix64's hash of int64 numbers, for kernels; mix_1, mix_2: its factors."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * mix_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * mix_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@jit
def _initial_rows_kernel(
    out,
    targets,
    numbers,
    first_rows,
    keys,
    scales,
    bounds,
    count,
    stride,
    row_part,
    row_parts,
    tables: tl.constexpr,
    table_block: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
    golden: tl.constexpr,
    mix_1: tl.constexpr,
    mix_2: tl.constexpr,
) -> None:
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    target = tl.load(targets + at, at < count, other=-1)
    if tl.max(target, 0) >= 0:
        number = tl.load(numbers + at, at < count, other=0).to(tl.int64)
        each = tl.arange(0, table_block)
        first = tl.load(first_rows + each, each < tables, other=9223372036854775807)
        table = tl.maximum(tl.sum((first[None, :] <= number[:, None]).to(tl.int32), 1) - 1, 0)
        row = row_part + (number - tl.load(first_rows + table)) * row_parts
        column = tl.arange(0, columns)[None, :]
        x = ((row << 20)[:, None] + column) * golden + tl.load(keys + table)[:, None]
        drawn = ((mix_kernel(x, mix_1, mix_2) >> 40) & 0xFFFFFF).to(tl.float32)
        value = drawn * tl.load(scales + table)[:, None] - tl.load(bounds + table)[:, None]
        place = out + target.to(tl.int64)[:, None] * stride + column
        tl.store(place, value.to(out.dtype.element_ty), (target >= 0)[:, None])
