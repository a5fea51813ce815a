"""Pushing columns to the ranks' buffers: the plain twin element by element, Triton against the plain twin."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.embedding.push_columns import PushTable, plain_push_columns, push_columns, triton_push_columns
from dlrm_bench.kernels.embedding.regroup import Run
from dlrm_bench.kernels.peer_tensors import PeerTensors
from tests.kernels.devices import DEVICE, needs_triton

WIDTH = 400
ROW_COLUMNS = [40, 296, 0, 16]
STARTS = [8, 0, 24, 64]
EVEN = [Run(0, 0, 64, 32), Run(1, 0, 96, 256), Run(0, 32, 0, 8), Run(1, 256, 360, 40), Run(3, 8, 16, 8)]
FOURS = [Run(0, 4, 64, 36), Run(1, 0, 100, 252), Run(0, 0, 0, 4), Run(1, 252, 356, 44), Run(3, 4, 16, 8)]


def table_of(batch: int, ranks: int, runs: list[Run]) -> PushTable:
    return PushTable(batch, ROW_COLUMNS[:ranks], STARTS[:ranks], [r for r in runs if r.block < ranks], DEVICE)


def buffers(ranks: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns buffers, each its own allocation, as those of several GPUs are; full of a number that no matrix has."""
    return [torch.full((count,), -1, device=DEVICE, dtype=dtype) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_element_stands_where_its_run_says(ranks: int) -> None:
    batch = 3
    table = table_of(batch, ranks, EVEN)
    matrix = torch.arange(batch * WIDTH, device=DEVICE).view(batch, WIDTH).float()
    outs = buffers(ranks, table.end + 8, torch.float32)
    push_columns(matrix, table, PeerTensors(outs, ranks - 1))
    for rank, out in enumerate(outs):
        expected = [-1.0] * len(out)
        for run in EVEN:
            for row in range(batch if run.block == rank else 0):
                for column in range(run.columns):
                    at = STARTS[rank] + row * ROW_COLUMNS[rank] + run.block_column + column
                    expected[at] = row * WIDTH + run.matrix_column + column
        assert out.tolist() == expected


@needs_triton
@pytest.mark.parametrize("runs", [EVEN, FOURS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [1, 37])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_triton_equals_plain(ranks: int, batch: int, dtype: torch.dtype, runs: list[Run]) -> None:
    table = table_of(batch, ranks, runs)
    size = 8 * (table.end // 8 + 1)
    got, expected = buffers(ranks, ranks * size + 8, dtype), buffers(ranks, ranks * size + 8, dtype)
    for rank in range(ranks):  # each pushes into a part of its own, with something between the parts
        matrix = torch.rand(batch, WIDTH + 8, device=DEVICE).to(dtype)[:, :WIDTH]
        triton_push_columns(matrix, table, PeerTensors([out[rank * size :] for out in got], rank))
        plain_push_columns(matrix, table, PeerTensors([out[rank * size :] for out in expected], rank))
    for ours, plain in zip(got, expected, strict=True):
        assert torch.equal(ours, plain)
