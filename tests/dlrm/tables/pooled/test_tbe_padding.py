"""Cross-cutting: in a TBE with padding, ids of -1 change no bag and no table, whatever the optimizer."""

from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.optim import RowWiseAdagrad

from dlrm_bench.dlrm.config import OptimizerConfig, TableOptimizer
from dlrm_bench.dlrm.tables.pooled.tbe import FixedTBE, TBEShape
from dlrm_bench.kernels.embedding.sorted_adagrad import sorted_adagrad

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
ROWS, HOT, COLUMNS, SAMPLES = [5, 1000, 1], [2, 7, 3], 16, 33
LEARNING_RATE, EPS = 0.1, 1e-8
OPTIMIZERS = {
    "adagrad": lambda tables: torch.optim.Adagrad(tables, lr=LEARNING_RATE, eps=EPS),
    "rowwise_adagrad": lambda tables: RowWiseAdagrad(tables, lr=LEARNING_RATE, eps=EPS),
    "sgd": lambda tables: torch.optim.SGD(tables, lr=LEARNING_RATE),
}


def bag_sums(table: Tensor, ids: Tensor) -> Tensor:
    lengths = (ids >= 0).sum(1)
    return functional.embedding_bag(ids[ids >= 0].long(), table, lengths.cumsum(0) - lengths, mode="sum")


@pytest.mark.parametrize(
    ("embedding", "presort"), [*((name, False) for name in get_args(TableOptimizer)), ("adagrad", True)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_padding_means_nothing(device: torch.device, embedding: TableOptimizer, presort: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, eps=EPS, embedding=embedding)
    shape = TBEShape(
        rows=tuple(ROWS), hot=tuple(HOT), columns=COLUMNS, samples=SAMPLES, dtype=torch.float32, padded=True
    )
    tbe = FixedTBE(shape, optimizer, device, sorted_updates=presort)
    tables = nn.ParameterList(torch.randn(rows, COLUMNS, generator=generator) for rows in ROWS)
    parts = [tbe.weights[first : first + rows] for first, rows in zip(tbe.first_row, ROWS, strict=True)]
    for part, table in zip(parts, tables, strict=True):
        part.copy_(table.detach())
    plain = OPTIMIZERS[embedding](tables)
    for _ in range(5):
        ids = [
            torch.randint(-rows, rows, (SAMPLES, hot), generator=generator, dtype=torch.int32).clamp(min=-1)
            for rows, hot in zip(ROWS, HOT, strict=True)
        ]
        ids[1][7] = -1
        flat = torch.cat([block.flatten() for block in ids]).to(device)
        tbe.shift(flat)
        pooled = tbe.lookup(flat)
        expected = torch.cat([bag_sums(table, block) for table, block in zip(tables, ids, strict=True)], dim=1)
        torch.testing.assert_close(pooled.cpu(), expected, rtol=1e-5, atol=1e-5)
        grad = torch.randn(expected.shape, generator=generator)
        if presort:
            sorted_ids, sorted_bags = torch.empty(2, tbe.num_ids, dtype=torch.int32, device=device)
            tbe.sort(flat, sorted_ids, sorted_bags)
            rate = torch.tensor([LEARNING_RATE], device=device)
            sorted_adagrad(tbe.weights, tbe.state, grad.to(device), sorted_ids, sorted_bags, rate, EPS)
        else:
            pooled.backward(grad.to(device))
        plain.zero_grad()
        expected.backward(grad)
        plain.step()
        for part, table in zip(parts, tables, strict=True):
            torch.testing.assert_close(part.cpu(), table.detach(), rtol=1e-5, atol=1e-5)
