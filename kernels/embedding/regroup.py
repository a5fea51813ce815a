"""Regroups columns between the pooled all-to-all's blocks, one per source rank, and the interaction's input.

Ranks that hold row parts of a table each send a pooled vector of the ids in their rows; the vector of all ids is the
sum. The backward needs no sum: each part's gradient equals the whole one, which is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl

RUN = 128  # columns per program
ROWS = 32  # rows per program


class Run(NamedTuple):
    """`columns` adjacent columns of block `block`, from `block_column` on; they begin at `matrix_column`."""

    block: int
    block_column: int
    matrix_column: int
    columns: int


def cut(runs: Sequence[Run]) -> list[Run]:
    """Returns the same columns as runs of at most one program's size."""
    return [
        Run(run.block, run.block_column + start, run.matrix_column + start, min(RUN, run.columns - start))
        for run in runs
        for start in range(0, run.columns, RUN)
    ]


def alignment_of(numbers: Iterable[int]) -> int:
    """Returns 8 or 4: a divisor of all columns and offsets of a table."""
    numbers = list(numbers)
    assert all(number % 4 == 0 for number in numbers), "columns and offsets must be multiples of 4"
    return 8 if all(number % 8 == 0 for number in numbers) else 4


class RegroupTable:
    """The position of each column of the blocks in the matrix; cut into pieces, copied to the device once.

    batch: rows of every block and of the matrix. block_columns: columns of each block; block s starts after block
    s - 1 in the flat buffer and is [batch, block_columns[s]], row-major. All columns are multiples of 4, ideally of 8.
    pieces: int64 [pieces, 4]: flat offset of the first element, columns of its block, matrix column, columns.
    """

    def __init__(self, batch: int, block_columns: Sequence[int], runs: Sequence[Run], device: torch.device) -> None:
        self.batch, self.block_columns, self.runs = batch, tuple(block_columns), tuple(runs)
        self.flat_size = batch * sum(block_columns)
        pieces = [
            (
                batch * sum(block_columns[: piece.block]) + piece.block_column,
                block_columns[piece.block],
                piece.matrix_column,
                piece.columns,
            )
            for piece in cut(runs)
        ]
        self.alignment = alignment_of(number for piece in pieces for number in piece)
        self.pieces = torch.tensor(pieces, dtype=torch.int64).view(-1, 4).to(device)


def regroup_forward(flat: Tensor, table: RegroupTable, out: Tensor) -> None:
    """Copies every run from its block into its columns of `out`.

    flat: bf16 or fp32 [batch * sum(block_columns)]. out: [batch, width], contiguous columns, row stride a multiple of 8
    (4 if the table has odd multiples of 4); converted to its dtype. Columns without a run stay unchanged.
    """
    _check(flat, table, out)
    regroup = triton_regroup_forward if flat.is_cuda else plain_regroup_forward
    regroup(flat, table, out)


def regroup_backward(matrix: Tensor, table: RegroupTable, flat: Tensor) -> None:
    """Copies every run's columns of `matrix` back into its block: the inverse of `regroup_forward`, same shapes."""
    _check(flat, table, matrix)
    regroup = triton_regroup_backward if flat.is_cuda else plain_regroup_backward
    regroup(matrix, table, flat)


def _check(flat: Tensor, table: RegroupTable, matrix: Tensor) -> None:
    assert flat.is_contiguous() and flat.numel() == table.flat_size, f"flat buffer: {table.flat_size} elements"
    assert matrix.shape[0] == table.batch and matrix.stride(1) == 1, f"matrix: [{table.batch}, width], row-major"


def _views(flat: Tensor, table: RegroupTable, matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
    blocks = [
        block.view(table.batch, -1) for block in flat.view(-1).split([table.batch * c for c in table.block_columns])
    ]
    return [
        (blocks[run.block].narrow(1, run.block_column, run.columns), matrix.narrow(1, run.matrix_column, run.columns))
        for run in table.runs
    ]


def plain_regroup_forward(flat: Tensor, table: RegroupTable, out: Tensor) -> None:
    """Computes `regroup_forward` in PyTorch."""
    for block, matrix in _views(flat, table, out):
        matrix.copy_(block)


def plain_regroup_backward(matrix: Tensor, table: RegroupTable, flat: Tensor) -> None:
    """Computes `regroup_backward` in PyTorch."""
    for block, columns in _views(flat, table, matrix):
        block.copy_(columns)


def triton_regroup_forward(flat: Tensor, table: RegroupTable, out: Tensor) -> None:
    """Computes `regroup_forward` in one kernel."""
    _launch(flat, table, out, to_matrix=True)


def triton_regroup_backward(matrix: Tensor, table: RegroupTable, flat: Tensor) -> None:
    """Computes `regroup_backward` in one kernel."""
    _launch(flat, table, matrix, to_matrix=False)


def _launch(flat: Tensor, table: RegroupTable, matrix: Tensor, to_matrix: bool) -> None:
    assert matrix.stride(0) % table.alignment == 0, f"row stride must be a multiple of {table.alignment}"
    grid = (len(table.pieces), cdiv(table.batch, ROWS))
    if all(grid):
        _regroup_kernel[grid](
            flat, matrix, table.pieces, table.batch, matrix.stride(0), table.alignment, to_matrix, RUN, ROWS
        )


@jit
def _regroup_kernel(
    flat,
    matrix,
    pieces,
    batch,
    matrix_stride,
    alignment: tl.constexpr,
    to_matrix: tl.constexpr,
    run_size: tl.constexpr,
    num_rows: tl.constexpr,
) -> None:
    piece = pieces + 4 * tl.program_id(0)
    base = tl.multiple_of(tl.load(piece), alignment)
    block_stride = tl.multiple_of(tl.load(piece + 1), alignment)
    matrix_column = tl.multiple_of(tl.load(piece + 2), alignment)
    columns = tl.multiple_of(tl.load(piece + 3), alignment)
    row = (tl.program_id(1) * num_rows + tl.arange(0, num_rows)).to(tl.int64)[:, None]
    column = tl.arange(0, run_size)[None, :]
    mask = (row < batch) & (column < columns)
    in_block = flat + base + row * block_stride + column
    in_matrix = matrix + matrix_column + row * matrix_stride + column
    if to_matrix:
        tl.store(in_matrix, tl.load(in_block, mask), mask)
    else:
        tl.store(in_block, tl.load(in_matrix, mask), mask)


class RegroupSumTable:
    """The columns of the matrix, and the positions of their summands in the blocks; copied to the device once.

    batch, block_columns, runs: as for `RegroupTable`, except that runs may cover the same columns of the matrix: they
    then start and end together. targets: int64 [targets, 4]: matrix column, columns, first summand, summands; summands:
    int64 [summands, 2]: flat offset of the first element, columns of its block; in the order of the runs.
    """

    def __init__(self, batch: int, block_columns: Sequence[int], runs: Sequence[Run], device: torch.device) -> None:
        self.batch, self.block_columns, self.runs = batch, tuple(block_columns), tuple(runs)
        self.flat_size = batch * sum(block_columns)
        by_target: dict[tuple[int, int], list[Run]] = {}
        for piece in cut(runs):
            by_target.setdefault((piece.matrix_column, piece.columns), []).append(piece)
        targets: list[tuple[int, int, int, int]] = []
        summands: list[tuple[int, int]] = []
        for (matrix_column, columns), pieces in sorted(by_target.items()):
            targets.append((matrix_column, columns, len(summands), len(pieces)))
            for piece in pieces:
                offset = batch * sum(block_columns[: piece.block]) + piece.block_column
                summands.append((offset, block_columns[piece.block]))
        self.alignment = alignment_of(
            [*(number for target in targets for number in target[:2]), *(n for summand in summands for n in summand)]
        )
        self.targets = torch.tensor(targets, dtype=torch.int64).view(-1, 4).to(device)
        self.summands = torch.tensor(summands, dtype=torch.int64).view(-1, 2).to(device)


def regroup_sum(flat: Tensor, table: RegroupSumTable, out: Tensor) -> None:
    """Writes to each column of `out` that runs cover the sum of these runs' columns, added up in fp32 in their order.

    flat: bf16 or fp32 [batch * sum(block_columns)]. out: [batch, width], contiguous columns, row stride a multiple of 8
    (4 if the table has odd multiples of 4); converted to its dtype. Columns without a run stay unchanged.
    """
    assert flat.is_contiguous() and flat.numel() == table.flat_size, f"flat buffer: {table.flat_size} elements"
    assert out.shape[0] == table.batch and out.stride(1) == 1, f"matrix: [{table.batch}, width], row-major"
    regroup = triton_regroup_sum if flat.is_cuda else plain_regroup_sum
    regroup(flat, table, out)


def plain_regroup_sum(flat: Tensor, table: RegroupSumTable, out: Tensor) -> None:
    """Computes `regroup_sum` in PyTorch."""
    blocks = [b.view(table.batch, -1) for b in flat.view(-1).split([table.batch * c for c in table.block_columns])]
    sums: dict[tuple[int, int], Tensor] = {}
    for run in table.runs:
        part = blocks[run.block].narrow(1, run.block_column, run.columns).float()
        key = (run.matrix_column, run.columns)
        sums[key] = sums[key] + part if key in sums else part
    for (matrix_column, columns), total in sums.items():
        out.narrow(1, matrix_column, columns).copy_(total)


def triton_regroup_sum(flat: Tensor, table: RegroupSumTable, out: Tensor) -> None:
    """Computes `regroup_sum` in one kernel."""
    assert out.stride(0) % table.alignment == 0, f"row stride must be a multiple of {table.alignment}"
    grid = (len(table.targets), cdiv(table.batch, ROWS))
    if all(grid):
        _regroup_sum_kernel[grid](
            flat, out, table.targets, table.summands, table.batch, out.stride(0), table.alignment, RUN, ROWS
        )


@jit
def _regroup_sum_kernel(
    flat,
    matrix,
    targets,
    summands,
    batch,
    matrix_stride,
    alignment: tl.constexpr,
    run_size: tl.constexpr,
    num_rows: tl.constexpr,
) -> None:
    target = targets + 4 * tl.program_id(0)
    matrix_column = tl.multiple_of(tl.load(target), alignment)
    columns = tl.multiple_of(tl.load(target + 1), alignment)
    summand = summands + 2 * tl.load(target + 2)
    count = tl.load(target + 3)
    row = (tl.program_id(1) * num_rows + tl.arange(0, num_rows)).to(tl.int64)[:, None]
    column = tl.arange(0, run_size)[None, :]
    mask = (row < batch) & (column < columns)
    total = tl.zeros([num_rows, run_size], tl.float32)
    nth = 0
    while nth < count:
        base = tl.multiple_of(tl.load(summand + 2 * nth), alignment)
        block_stride = tl.multiple_of(tl.load(summand + 2 * nth + 1), alignment)
        total += tl.load(flat + base + row * block_stride + column, mask, other=0.0).to(tl.float32)
        nth += 1
    tl.store(matrix + matrix_column + row * matrix_stride + column, total.to(matrix.dtype.element_ty), mask)
