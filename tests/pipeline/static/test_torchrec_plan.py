"""Cross-cutting: the static pipeline under TorchRec's plan trains what plain PyTorch does."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from tests.cases import PLACES, SMALL_MODEL, WAYS
from tests.pipeline.small_runs import BATCHES, batches_of, small
from tests.pipelines import static_pipeline
from tests.plain_dlrm import PlainDLRM

# Wide enough to be split by columns, and one table so hot that TorchRec's planner does.
MODEL = replace(
    SMALL_MODEL,
    embedding_dim=64,
    bottom_mlp=(24, 64),
    num_embeddings=(5000, 7, 30, 20000, 600, 400, 90, 800),
    multi_hot_sizes=(3, 1, 2, 60, 4, 1, 1, 2),
)


def config(**changes: Any) -> RunConfig:
    return small(model=MODEL, plan="torchrec", learning_rate=0.004, **changes)


def train(ranks: Ranks) -> list[tuple[list[float], Plan]]:
    results = []
    for way in WAYS.values():
        pipeline = static_pipeline(config(**way), ranks)
        batches = batches_of(config(), ranks)
        losses = [pipeline.train_step(batches).item() for _ in range(BATCHES)]
        results.append((losses, pipeline.ebc.plan))
    return results


@cache
def plain_losses(world_size: int) -> list[float]:
    reference, dataset = PlainDLRM(config()), RandomDataset(config().data, MODEL, config().seed)
    batches = [dataset.train_batches(rank, world_size, config().local_batch_size) for rank in range(world_size)]
    return [reference.train_step([next(of_rank) for of_rank in batches]) for _ in range(BATCHES)]


@pytest.mark.parametrize(("world_size", "gpu"), [*PLACES, (4, False)])
def test_losses_equal_plain_dlrm(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    per_rank = run_ranks(world_size, train, gpu=gpu)
    expected = torch.tensor(plain_losses(world_size), dtype=torch.float64)
    for results in zip(*per_rank, strict=True):
        losses = torch.tensor([losses for losses, _ in results], dtype=torch.float64).mean(dim=0)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        plans = {plan for _, plan in results}
        assert len(plans) == 1, "all ranks have one plan"
        widths = {shard.columns for plan in plans for shard in plan.shards}
        assert min(widths) < 64 or world_size == 1


def mixed(ranks: Ranks) -> list[float]:
    """A whole table beside a part of another on each rank, as `convert` leaves them."""
    import dlrm_bench.pipeline.static.pipeline

    whole = [Shard(table % 2, table, column, 16) for table in (0, 1, 2, 4, 5, 6, 7) for column in range(0, 64, 16)]
    split = [Shard(column // 32, 3, column, 16) for column in range(0, 64, 16)]
    plan = Plan(2, tuple(sorted(whole + split)))
    dlrm_bench.pipeline.static.pipeline.torchrec_plan = lambda *_: plan  # type: ignore[assignment]
    trained, batches = static_pipeline(config(presort_ids=True), ranks), batches_of(config(), ranks)
    return [trained.train_step(batches).item() for _ in range(BATCHES)]


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.multi_gpu)])
def test_pieces_of_one_table_on_one_rank(run_ranks: Callable[..., list[Any]], gpu: bool) -> None:
    losses = torch.tensor(run_ranks(2, mixed, gpu=gpu), dtype=torch.float64).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(plain_losses(2), dtype=torch.float64), rtol=1e-5, atol=0)


def too_many(ranks: Ranks) -> str:
    model = replace(SMALL_MODEL, num_embeddings=(5000,), multi_hot_sizes=(3,), embedding_dim=40, bottom_mlp=(40,))
    with pytest.raises(ValueError, match="TorchRec's planner leaves some of 2 ranks without a table") as raised:
        static_pipeline(small(model=model, plan="torchrec"), ranks)
    return str(raised.value)


def test_every_rank_learns_why_there_is_no_plan(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(2, too_many)
    assert first == second
    assert "--plan balanced" in first
