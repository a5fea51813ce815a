"""Cross-cutting: a number that is not finite on one rank changes no weight on any: a loss from its own iteration on, a
gradient behind a finite loss from the next one on, in every pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.cases import CPU_PLACES, PLACES, SMALL_MODEL, WAYS
from tests.pipeline.cpu_graphs import dense_graph_on_cpu
from tests.pipeline.small_runs import batches_of
from tests.pipelines import run_config

STEPS, BAD = 8, 5
"""Iterations, and the first that has something not finite on the last rank; in graphs on a GPU it is a replayed one."""
COLUMN = 1
"""Column of the dense features: in a bad gradient's run it is 0, with weights of 0, so that none but the bad number
counts."""
HUGE = 1e25
"""Times weights of 0 it is 0; the gradient of these weights has a square that is not finite."""
BOTTOM_MLP = "dense_arch.model._mlp.0._linear.weight"
CAPTURED = "five-stage, captured"
"""Pipelines captured on the CPU by a graph's stand-in, which replays operators and no hooks; the last one, because that
stays."""
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    **{way: ("static", options) for way, options in WAYS.items()},
    "torchrec": ("torchrec", {}),
    "torchrec by columns": ("torchrec", {"row_wise": False, "schedule": "base"}),
    "five-stage": ("five-stage", {"trim_input_dist": True, "launch_threads": 2}),
    CAPTURED: ("five-stage", {"trim_input_dist": True, "row_wise": False, "cuda_graph": "dense"}),
}
ON_GPU: dict[str, dict[str, Any]] = {
    "static": {"cuda_graph": "iteration", "overlap": True},
    "five-stage": {"cuda_graph": "dense", "pinned_d2h": True},
    "torchrec": {},
}


@dataclass(slots=True)
class Trained:
    losses: list[float]
    changed: list[str]
    """Keys that the bad iteration or a later one changed."""
    learned: bool
    """Whether the iterations before it changed all weights."""
    told: bool
    """Whether the pipeline tells of a gradient that is not finite."""
    spoilt: list[str]
    """Keys that are not finite after all iterations."""
    dense_changed: bool
    """Whether the bad iteration changed any weight of the dense network."""


def copies(pipeline: Any) -> dict[str, Tensor]:
    """This rank's weights and optimizer state."""
    return {
        f"{kind} {key} {i}": block.local.clone()
        for kind, of_kind in zip(("weights", "state"), pipeline.state_blocks(), strict=True)
        for key, blocks in of_kind.items()
        for i, block in enumerate(blocks)
        if block.local is not None
    }


def without_column(pipeline: Any, batches: list[Any]) -> None:
    for batch in batches:
        batch.dense[:, COLUMN] = 0
    blocks = pipeline.state_blocks()
    for block in blocks.weights[BOTTOM_MLP]:
        if block.local is not None:
            block.local[:, COLUMN] = 0
    pipeline.take_blocks(blocks)


def train(ranks: Ranks, config: RunConfig, bad: str) -> Trained:
    """bad: 'loss' or 'gradient'."""
    pipeline = build_pipeline(config, config.pipeline, ranks)
    batches, of_loss = list(batches_of(config, ranks, STEPS)), bad == "loss"
    if not of_loss:
        without_column(pipeline, batches)
    if ranks.rank == ranks.world_size - 1:
        batches[BAD].dense[3, COLUMN] = torch.nan if of_loss else HUGE
    prepared, losses = map(pipeline.prepare, batches), []
    first = copies(pipeline)
    for _ in range(BAD):
        losses.append(pipeline.train_step(prepared).item())
    before = copies(pipeline)
    whole = before
    if not of_loss:
        losses.append(pipeline.train_step(prepared).item())
        before = copies(pipeline)
    while len(losses) < STEPS:
        losses.append(pipeline.train_step(prepared).item())
    after = copies(pipeline)
    told = bool(pipeline.tallies().not_finite.any())
    pipeline.close()
    changed = [key for key, value in before.items() if not torch.equal(value, after[key])]
    spoilt = [key for key, value in after.items() if not value.isfinite().all()]
    learned = all(not torch.equal(value, whole[key]) for key, value in first.items())
    dense_changed = any(not torch.equal(value, before[key]) for key, value in whole.items() if "embedding" not in key)
    return Trained(losses, changed, learned, told, spoilt, dense_changed)


def config_of(steps: int, pipeline: str, **options: Any) -> RunConfig:
    """The configuration of `steps` iterations, each on another batch."""
    return run_config(
        pipeline,
        preset="test",
        model=SMALL_MODEL,
        data=DataConfig(source="random", random_batches=steps),
        precision="fp32",
        local_batch_size=24,
        iterations=steps,
        warmup_iterations=0,
        **options,
    )


def train_all(ranks: Ranks, bad: str) -> dict[str, Trained]:
    trained = {}
    for name, (kind, options) in PIPELINES.items():
        if ranks.device.type == "cuda":
            options = options | ON_GPU[kind]
        elif name == CAPTURED:
            dense_graph_on_cpu()
        trained[name] = train(ranks, config_of(STEPS, kind, **options), bad)
    return trained


@pytest.mark.parametrize(("world_size", "gpu"), [place for place in PLACES if place != CPU_PLACES[0]])
def test_no_weight_changes_from_the_first_bad_loss_on(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    for rank, of_rank in enumerate(run_ranks(world_size, train_all, "loss", gpu=gpu)):
        for name, trained in of_rank.items():
            assert not trained.told, name
            bad = [i for i, loss in enumerate(trained.losses) if not torch.tensor(loss).isfinite()]
            assert bad == ([BAD] if rank == world_size - 1 else []), name
            assert trained.learned, name
            assert trained.changed == [], name


@pytest.mark.parametrize(("world_size", "gpu"), [place for place in PLACES if place != CPU_PLACES[0]])
def test_no_weight_changes_after_a_bad_gradient_and_all_stay_finite(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    of_ranks = run_ranks(world_size, train_all, "gradient", gpu=gpu)
    for of_rank in of_ranks:
        for name, trained in of_rank.items():
            assert torch.tensor(trained.losses).isfinite().all(), name
            assert trained.learned, name
            assert trained.changed == [], name
            assert trained.spoilt == [], name
            # TorchRec's dense gradients are known before any of their updates, ours beside them.
            assert trained.dense_changed == (PIPELINES[name][0] == "static"), name
    for name in PIPELINES:
        assert any(of_rank[name].told for of_rank in of_ranks), name
