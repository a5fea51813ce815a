"""Second stage of column sums: adds rows of partial sums into one row, without atomics: equal inputs, equal bits."""

from __future__ import annotations

from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl


def column_sums(partials: Tensor, out: Tensor) -> None:
    """Computes out = partials.sum(0). partials: fp32 [rows, columns], contiguous; out: bf16 or fp32 [columns]."""
    assert partials.is_contiguous() and out.shape == partials.shape[1:], "partials: [rows, columns], out: [columns]"
    sums = triton_column_sums if partials.is_cuda else plain_column_sums
    sums(partials, out)


def plain_column_sums(partials: Tensor, out: Tensor) -> None:
    """Computes `column_sums` in PyTorch."""
    out.copy_(partials.sum(0))


def triton_column_sums(partials: Tensor, out: Tensor) -> None:
    """Computes `column_sums` in one kernel."""
    rows, columns = partials.shape
    _column_sums_kernel[(cdiv(columns, 32),)](partials, out, rows, columns, 64, 32)


@jit
def sum_columns(partials, column, rows: tl.constexpr, columns, block_rows: tl.constexpr, block_columns: tl.constexpr):
    """Returns the sums of these columns, fp32 [block_columns], adding rows in order, block by block."""
    total = tl.zeros([block_rows, block_columns], tl.float32)
    for start in range(0, rows, block_rows):
        row = start + tl.arange(0, block_rows)[:, None]
        mask = (row < rows) & (column < columns)[None, :]
        total += tl.load(partials + row * columns + column[None, :], mask, other=0.0)
    return tl.sum(total, 0)


@jit
def _column_sums_kernel(
    partials, out, rows: tl.constexpr, columns, block_rows: tl.constexpr, block_columns: tl.constexpr
) -> None:
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    sums = sum_columns(partials, column, rows, columns, block_rows, block_columns)
    tl.store(out + column, sums, column < columns)
