"""Pushes columns of a matrix into buffers of the ranks that own them: the gradient's all-to-all without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl
from dlrm_bench.kernels.embedding.regroup import ROWS, RUN, Run, alignment_of, cut
from dlrm_bench.kernels.peer_tensors import PeerTensors


class PushTable:
    """The destination of each column of the matrix in the ranks' buffers; cut into pieces, copied to the device once.

    batch: rows of the matrix. row_columns: columns of each rank's rows; rank r's are [batch, row_columns[r]],
    row-major, from element starts[r] of r's buffer on. runs: `block` is the rank. Columns and starts are multiples of
    4, ideally of 8. pieces: int64 [pieces, 5]: rank, offset of the first element in its buffer, columns of its rows,
    matrix column, columns.
    """

    def __init__(
        self, batch: int, row_columns: Sequence[int], starts: Sequence[int], runs: Sequence[Run], device: torch.device
    ) -> None:
        assert len(row_columns) == len(starts), "row_columns and starts: one for each rank"
        assert all(run.block_column + run.columns <= row_columns[run.block] for run in runs), "runs lie within rows"
        self.batch, self.row_columns, self.starts, self.runs = batch, tuple(row_columns), tuple(starts), tuple(runs)
        self.end = max(start + batch * columns for start, columns in zip(starts, row_columns, strict=True))
        pieces = [
            (
                piece.block,
                starts[piece.block] + piece.block_column,
                row_columns[piece.block],
                piece.matrix_column,
                piece.columns,
            )
            for piece in cut(runs)
        ]
        self.alignment = alignment_of(number for _, *numbers in pieces for number in numbers)
        self.pieces = torch.tensor(pieces, dtype=torch.int64).view(-1, 5).to(device)


def push_columns(matrix: Tensor, table: PushTable, outs: PeerTensors) -> None:
    """Copies every run's columns of `matrix` into its rank's buffer.

    matrix: bf16 or fp32 [batch, width], contiguous columns, row stride a multiple of 8 (4 if the table has odd
    multiples of 4). outs: flat, 16-byte aligned, at least table.end elements; values are converted to their dtype,
    elements without a run stay unchanged. The caller puts a barrier of all ranks before this call, after the last read
    of the buffers, and one after it, before the next read.
    """
    assert matrix.shape[0] == table.batch and matrix.stride(1) == 1, f"matrix: [{table.batch}, width], row-major"
    assert len(outs) == len(table.starts), "a buffer for each rank of the table"
    assert outs.own.dim() == 1 and outs.own.is_contiguous(), "flat buffers"
    assert outs.own.numel() >= table.end, f"flat buffers: {table.end} elements"
    push = triton_push_columns if matrix.is_cuda else plain_push_columns
    push(matrix, table, outs)


def plain_push_columns(matrix: Tensor, table: PushTable, outs: PeerTensors) -> None:
    """Computes `push_columns` in PyTorch."""
    for run in table.runs:
        columns = table.row_columns[run.block]
        rows = outs.tensors[run.block].narrow(0, table.starts[run.block], table.batch * columns)
        into = rows.view(table.batch, columns).narrow(1, run.block_column, run.columns)
        into.copy_(matrix.narrow(1, run.matrix_column, run.columns))


def triton_push_columns(matrix: Tensor, table: PushTable, outs: PeerTensors) -> None:
    """Computes `push_columns` in one kernel."""
    assert matrix.stride(0) % table.alignment == 0, f"row stride must be a multiple of {table.alignment}"
    assert all(t.data_ptr() % 16 == 0 for t in outs.tensors), "buffers: 16-byte aligned"
    grid = (len(table.pieces), cdiv(table.batch, ROWS))
    if all(grid):
        _push_columns_kernel[grid](
            matrix,
            outs.own,
            outs.addresses,
            table.pieces,
            table.batch,
            matrix.stride(0),
            table.alignment,
            RUN,
            ROWS,
        )


@jit
def _push_columns_kernel(
    matrix,
    own_out,
    outs,
    pieces,
    batch,
    matrix_stride,
    alignment: tl.constexpr,
    run_size: tl.constexpr,
    num_rows: tl.constexpr,
) -> None:
    piece = pieces + 5 * tl.program_id(0)
    # The own tensor gives the address its pointer type; alignment is a hint on the pointer, the cast loses the int's.
    out = tl.multiple_of(tl.load(outs + tl.load(piece)).to(own_out.dtype), 16)
    base = tl.multiple_of(tl.load(piece + 1), alignment)
    row_columns = tl.multiple_of(tl.load(piece + 2), alignment)
    matrix_column = tl.multiple_of(tl.load(piece + 3), alignment)
    columns = tl.multiple_of(tl.load(piece + 4), alignment)
    row = (tl.program_id(1) * num_rows + tl.arange(0, num_rows)).to(tl.int64)[:, None]
    column = tl.arange(0, run_size)[None, :]
    mask = (row < batch) & (column < columns)
    value = tl.load(matrix + matrix_column + row * matrix_stride + column, mask)
    tl.store(out + base + row * row_columns + column, value, mask)
