"""Cross-cutting: every pipeline takes a learning rate that changes between steps as plain PyTorch does."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.cases import PLACES
from tests.pipeline.small_runs import BATCHES, batches_of, small
from tests.pipelines import changed, stock_pipeline
from tests.plain_dlrm import PlainDLRM

FIRST = 0.02
CHANGES = {0: 0.04, 5: 0.1, 6: 0.02, 12: 0.004}
"""Steps before which the rate changes, and the new rates."""
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("torchrec", {}),
    "stock, base": ("torchrec", {"schedule": "base"}),
    "five-stage": ("five-stage", {}),
    "five-stage, trimmed": ("five-stage", {"trim_input_dist": True}),
    "five-stage, graph": ("five-stage", {"trim_input_dist": True, "cuda_graph": "dense"}),
    "static": ("static", {}),
}
ON_GPUS_ALONE = "five-stage, graph"
BAD = (-1.0, float("nan"), float("inf"), 1e-50)


def config_of(name: str) -> RunConfig:
    pipeline, options = PIPELINES[name]
    return changed(small(learning_rate=FIRST), pipeline, **options)


def train(ranks: Ranks, name: str) -> list[float]:
    config = config_of(name)
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    batches = map(pipeline.prepare, batches_of(config, ranks))
    losses = []
    for step in range(BATCHES):
        if step in CHANGES:
            pipeline.set_learning_rate(CHANGES[step])
        losses.append(pipeline.train_step(batches).item())
    for value in BAD if name != "static" else (0.0, *BAD):  # a ramp of stock's begins with 0
        with pytest.raises(ValueError, match=r"--optimizer\.learning-rate"):
            pipeline.set_learning_rate(value)
    pipeline.close()
    return losses


def train_all(ranks: Ranks) -> dict[str, list[float]]:
    on_gpu = ranks.device.type == "cuda"
    return {name: train(ranks, name) for name in PIPELINES if on_gpu or name != ON_GPUS_ALONE}


@cache
def plain_losses(world_size: int, constant: bool = False) -> torch.Tensor:
    config = config_of("static")
    reference, dataset = PlainDLRM(config), RandomDataset(config.data, config.model, config.seed)
    batches = [dataset.train_batches(rank, world_size, config.local_batch_size) for rank in range(world_size)]
    losses = []
    for step in range(BATCHES):
        for group in reference.optimizer.param_groups:
            group["lr"] = FIRST if constant else CHANGES.get(step, group["lr"])
        losses.append(reference.train_step([next(of_rank) for of_rank in batches]))
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_losses_equal_plain_dlrm(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    per_rank, expected = run_ranks(world_size, train_all, gpu=gpu), plain_losses(world_size)
    assert (expected - plain_losses(world_size, constant=True))[2:].abs().min() > 1e-4, "the changes must show"
    assert per_rank[0].keys() == PIPELINES.keys() - (set() if gpu else {ON_GPUS_ALONE})
    for name in per_rank[0]:
        losses = torch.tensor([rank[name] for rank in per_rank], dtype=torch.float64).mean(dim=0)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0, msg=lambda why, name=name: f"{name}: {why}")


def set_in_fused_schedule(ranks: Ranks) -> None:
    pipeline = stock_pipeline(config_of("stock"), ranks)
    pipeline._options = replace(pipeline._options, schedule="fused-sparse-dist")  # which itself needs a GPU
    with pytest.raises(ValueError, match="--schedule fused-sparse-dist looks up tables a batch ahead"):
        pipeline.set_learning_rate(0.1)


def test_a_schedule_that_looks_up_ahead_refuses(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(1, set_in_fused_schedule)
