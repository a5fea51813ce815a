"""The stock pipeline trains the same model as plain PyTorch does, and evaluating between steps changes nothing."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from dlrm.config import DataConfig, RunConfig
from dlrm.data.random_batches import RandomDataset
from dlrm.presets import preset
from dlrm.ranks import Ranks
from pipeline.torchrec_stock import StockPipeline
from tests.cases import PLACES
from tests.plain_dlrm import PlainDLRM

STEPS = 30


def small(**changes: object) -> RunConfig:
    smoke = preset("smoke")
    return replace(
        smoke,
        data=DataConfig(source="random", random_batches=STEPS),
        target_auc=None,
        iterations=STEPS,
        warmup_iterations=0,
        local_batch_size=32,
        **changes,  # type: ignore[arg-type]
    )


def train(ranks: Ranks, config: RunConfig, evaluate_every: int | None) -> tuple[list[float], dict[str, str]]:
    dataset = RandomDataset(config.data, config.model, config.seed)
    place = (ranks.rank, ranks.world_size, config.local_batch_size)
    pipeline = StockPipeline(config, ranks)
    batches = map(pipeline.prepare, dataset.train_batches(*place))
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(pipeline.train_step(batches).item())
        if evaluate_every and step % evaluate_every == 0:
            held_out = islice(dataset.train_batches(*place), 3)
            assert len(list(pipeline.evaluate(map(pipeline.prepare, held_out)))) == 3
    plan = {name: table["sharding_type"] for name, table in pipeline.describe()["sharding_plan"].items()}
    return losses, plan


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_losses_equal_plain_dlrm(run_ranks, world_size, gpu):
    config = small()
    per_rank = run_ranks(world_size, train, config, None, gpu=gpu)
    dataset = RandomDataset(config.data, config.model, config.seed)
    plain = PlainDLRM(config)
    batches = [dataset.train_batches(rank, world_size, config.local_batch_size) for rank in range(world_size)]
    expected = [plain.train_step([next(rank_batches) for rank_batches in batches]) for _ in range(STEPS)]
    losses = torch.tensor([losses for losses, _ in per_rank]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=0)
    assert expected[-1] < expected[0]


def test_evaluation_leaves_training_as_it_was(run_ranks):
    config = small()
    without, with_evaluation = (run_ranks(2, train, config, every) for every in (None, 7))
    assert with_evaluation == without


def test_plan_of_the_parity_test_is_mixed(run_ranks):
    (_, plan), _ = run_ranks(2, train, small(), None)
    assert {"table_wise", "data_parallel"} <= set(plan.values())
