"""Regrouping columns: Triton against plain, and backward as the inverse of forward."""

import pytest
import torch

from dlrm_bench.kernels.embedding.regroup import (
    RegroupSumTable,
    RegroupTable,
    Run,
    plain_regroup_backward,
    plain_regroup_forward,
    plain_regroup_sum,
    regroup_backward,
    regroup_forward,
    regroup_sum,
    triton_regroup_backward,
    triton_regroup_forward,
    triton_regroup_sum,
)
from tests.kernels.devices import DEVICE, needs_triton

WIDTH = 400
BLOCKS = [40, 0, 296]
EVEN = [Run(0, 0, 64, 32), Run(2, 0, 96, 256), Run(0, 32, 0, 8), Run(2, 256, 360, 40)]
PARTED_BLOCKS = [40, 0, 288, 32]
# Columns 64 to 96 in three parts, 96 to 352 in one, 0 to 8 in two parts of one block.
PARTED = [Run(0, 0, 64, 32), Run(2, 0, 96, 256), Run(0, 32, 0, 8), Run(2, 256, 64, 32), Run(3, 0, 64, 32)]
FOURS = [Run(0, 4, 64, 36), Run(2, 0, 100, 252), Run(0, 0, 0, 4), Run(2, 252, 356, 44)]


@needs_triton
@pytest.mark.parametrize("runs", [EVEN, FOURS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [1, 37])
def test_triton_equals_plain(runs: list[Run], dtype: torch.dtype, batch: int) -> None:
    table = RegroupTable(batch, BLOCKS, runs, DEVICE)
    flat = torch.randn(batch * sum(BLOCKS), device=DEVICE).to(dtype)
    padded = torch.zeros(2, batch, WIDTH + 8, device=DEVICE, dtype=dtype)
    got, expected = padded[:, :, :WIDTH]
    triton_regroup_forward(flat, table, got)
    plain_regroup_forward(flat, table, expected)
    assert torch.equal(got, expected)
    back, expected_back = torch.zeros(2, len(flat), device=DEVICE, dtype=dtype)
    triton_regroup_backward(got, table, back)
    plain_regroup_backward(got, table, expected_back)
    assert torch.equal(back, expected_back)
    assert torch.equal(back, flat)


def test_backward_is_what_autograd_gives() -> None:
    table = RegroupTable(5, BLOCKS, EVEN, DEVICE)
    flat = torch.randn(5 * sum(BLOCKS), device=DEVICE, requires_grad=True)
    blocks = [block.view(5, -1) for block in flat.split([5 * c for c in BLOCKS])]
    order = sorted(EVEN, key=lambda run: run.matrix_column)
    matrix = torch.cat([blocks[r.block][:, r.block_column : r.block_column + r.columns] for r in order], dim=1)
    grad = torch.randn(matrix.shape, device=DEVICE)
    matrix.backward(grad)
    runs, at = [], 0
    for run in order:
        runs.append(run._replace(matrix_column=at))
        at += run.columns
    table = RegroupTable(5, BLOCKS, runs, DEVICE)
    out, back = torch.empty(5, at, device=DEVICE), torch.empty(len(flat), device=DEVICE)
    regroup_forward(flat.detach(), table, out)
    regroup_backward(grad, table, back)
    assert torch.equal(out, matrix.detach())
    assert flat.grad is not None
    assert torch.equal(back, flat.grad)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [1, 37])
def test_triton_sums_equal_plain(dtype: torch.dtype, batch: int) -> None:
    table = RegroupSumTable(batch, PARTED_BLOCKS, PARTED, DEVICE)
    flat = torch.randint(-8, 9, (batch * sum(PARTED_BLOCKS),), device=DEVICE).to(dtype)  # sums are exact in bf16 too
    got, expected = torch.full((2, batch, WIDTH), 7.0, device=DEVICE, dtype=dtype)
    triton_regroup_sum(flat, table, got)
    plain_regroup_sum(flat, table, expected)
    assert torch.equal(got, expected)
    assert (got[:, 352:] == 7).all(), "columns without a run stay"


def test_parts_add_up() -> None:
    table = RegroupSumTable(5, PARTED_BLOCKS, PARTED, DEVICE)
    flat = torch.randn(5 * sum(PARTED_BLOCKS), device=DEVICE)
    first, _, second, third = (block.view(5, -1) for block in flat.split([5 * columns for columns in PARTED_BLOCKS]))
    out = torch.zeros(5, WIDTH, device=DEVICE)
    regroup_sum(flat, table, out)
    torch.testing.assert_close(out[:, 64:96], first[:, :32] + second[:, 256:] + third)
    assert torch.equal(out[:, 96:352], second[:, :256])
    assert torch.equal(out[:, :8], first[:, 32:])
