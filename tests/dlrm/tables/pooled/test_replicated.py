"""Replicated tables: local lookups, one summed gradient, the same bits on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.data.batch import feature_blocks
from dlrm_bench.dlrm.dcnv2.config import ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.pooled.replicated import ReplicatedTables
from dlrm_bench.dlrm.tables.pooled.ways import Layout
from tests.cases import PLACES

DIM = 16
MODEL = ModelConfig(
    num_embeddings=(5, 400, 1, 64, 3000, 9),
    multi_hot_sizes=(2, 1, 3, 1, 5, 40),
    embedding_dim=DIM,
    bottom_mlp=(DIM,),
    top_mlp=(1,),
)
TABLES = (0, 2, 4, 5)  # neither the first ones alone nor all
OPTIMIZER = OptimizerConfig(learning_rate=0.05)
STEPS = 3
BATCH_SIZES = (1, 37)


def draw_ids(batch_size: int, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    blocks = [
        # The upper half of each table's rows is never named.
        torch.randint((rows + 1) // 2, (batch_size * hot,), generator=generator, dtype=torch.int32)
        for rows, hot in zip(MODEL.rows, MODEL.multi_hot_sizes, strict=True)
    ]
    return torch.cat(blocks)


def draw_grad(batch_size: int, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank + 50)
    return torch.randn(batch_size, MODEL.num_features * DIM, generator=generator)


def pooled(ids: Tensor, tables: list[Tensor]) -> Tensor:
    """[B, len(tables) * DIM]"""
    blocks = feature_blocks(ids, MODEL.multi_hot_sizes)
    bags = [
        functional.embedding_bag(blocks[table].long(), weights, mode="sum")
        for table, weights in zip(TABLES, tables, strict=True)
    ]
    return torch.cat(bags, dim=1)


def columns_of_tables(matrix: Tensor) -> Tensor:
    return torch.cat([matrix[:, table * DIM : (table + 1) * DIM] for table in TABLES], dim=1)


def train(ranks: Ranks, batch_size: int, dtype: torch.dtype) -> dict[int, tuple[Tensor, Tensor]]:
    """Checks every lookup and the tables after some steps; returns them."""
    device = ranks.device
    rate, shape = torch.tensor([OPTIMIZER.learning_rate], device=device), BatchShape(samples=batch_size, dtype=dtype)
    sharded = set(range(MODEL.num_features)) - set(TABLES)
    plan = Plan(
        world_size=ranks.world_size,
        shards=tuple(Shard(0, table, 0, DIM) for table in sorted(sharded)),
        replicated=TABLES,
    )
    replicated = ReplicatedTables(Layout(MODEL.tables, plan, ranks, shape), OPTIMIZER.tables, rate, 7)
    parameters = []
    for table in TABLES:
        weights = torch.empty(MODEL.rows[table], DIM, device=device)
        fill_initial_weights(weights, seed=7, table=table, num_embeddings=MODEL.rows[table])
        parameters.append(weights.requires_grad_())
    before = [parameter.detach().clone() for parameter in parameters]
    adagrad = torch.optim.Adagrad(parameters, lr=OPTIMIZER.learning_rate, eps=OPTIMIZER.eps)
    out = replicated.empty_ids()
    for step in range(STEPS):
        adagrad.zero_grad()
        for rank in range(ranks.world_size):
            ids = draw_ids(batch_size, rank, step).to(device)
            grad = draw_grad(batch_size, rank, step).to(device, dtype)
            expected = pooled(ids, parameters)
            expected.backward(columns_of_tables(grad).float())
            if rank == ranks.rank:
                mine = ids, grad, expected.detach()
        ids, grad, expected = mine
        replicated.input_dist(ids, out)
        wider = torch.full((batch_size, (MODEL.num_features + 1) * DIM), 9.0, device=device, dtype=dtype)
        replicated.lookup(out, wider[:, DIM:])
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(columns_of_tables(wider[:, DIM:]).float(), expected, **close)
        others = [0, *(1 + table for table in range(MODEL.num_features) if table not in TABLES)]
        assert all((wider[:, other * DIM : (other + 1) * DIM] == 9).all() for other in others)
        replicated.update(out, grad)
        adagrad.step()
    parts = replicated.parts()
    assert tuple(parts) == TABLES
    for (weights, state), parameter, start in zip(parts.values(), parameters, before, strict=True):
        torch.testing.assert_close(state, adagrad.state[parameter]["sum"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(weights, parameter.detach(), rtol=1e-4, atol=1e-4)
        never_named = slice((len(weights) + 1) // 2, None)
        assert torch.equal(weights[never_named], start[never_named])
        assert not state[never_named].any()
    return {table: (weights.cpu(), state.cpu()) for table, (weights, state) in parts.items()}


def train_all(ranks: Ranks, gpu: bool) -> list[dict[int, tuple[Tensor, Tensor]]]:
    dtypes = [torch.float32, torch.bfloat16] if gpu else [torch.float32]
    results = [train(ranks, batch_size, dtype) for batch_size in BATCH_SIZES for dtype in dtypes]
    again = train(ranks, BATCH_SIZES[0], torch.float32)
    assert all(map(torch.equal, again[5], results[0][5])), "equal inputs, equal bits"
    return results


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_lookup_and_update_equal_plain_tables(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    first, *others = run_ranks(world_size, train_all, gpu, gpu=gpu)
    assert len(first) == (4 if gpu else 2)
    for other in others:
        for tables, expected in zip(other, first, strict=True):
            assert all(map(torch.equal, (t for pair in tables.values() for t in pair), sum(expected.values(), ())))
