"""Cross-cutting: a loss that is not finite on one rank changes no weight on any, in every pipeline."""

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
"""Iterations, and the first whose loss is not finite on the last rank; in graphs on a GPU it is a replayed one."""
CAPTURED = "five-stage, captured"
"""On the CPU by a graph's stand-in, which replays operators and no hooks; the last one, because that stays."""
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
    """What the bad iteration or a later one changed, by key."""
    learned: bool
    """Whether the iterations before it changed all weights."""


def copies(pipeline: Any) -> dict[str, Tensor]:
    """This rank's weights and optimizer state."""
    return {
        f"{kind} {key} {i}": block.local.clone()
        for kind, of_kind in zip(("weights", "state"), pipeline.state_blocks(), strict=True)
        for key, blocks in of_kind.items()
        for i, block in enumerate(blocks)
        if block.local is not None
    }


def train(ranks: Ranks, config: RunConfig) -> Trained:
    pipeline = build_pipeline(config, config.pipeline, ranks)
    batches = list(batches_of(config, ranks, STEPS))
    if ranks.rank == ranks.world_size - 1:
        batches[BAD].dense[3, 1] = torch.nan
    prepared, losses = map(pipeline.prepare, batches), []
    first = copies(pipeline)
    for _ in range(BAD):
        losses.append(pipeline.train_step(prepared).item())
    before = copies(pipeline)
    for _ in range(BAD, STEPS):
        losses.append(pipeline.train_step(prepared).item())
    after = copies(pipeline)
    pipeline.close()
    changed = [key for key, value in before.items() if not torch.equal(value, after[key])]
    return Trained(losses, changed, all(not torch.equal(value, before[key]) for key, value in first.items()))


def train_all(ranks: Ranks) -> dict[str, Trained]:
    trained = {}
    for name, (kind, options) in PIPELINES.items():
        if ranks.device.type == "cuda":
            options = options | ON_GPU[kind]
        elif name == CAPTURED:
            dense_graph_on_cpu()
        config = run_config(
            kind,
            preset="test",
            model=SMALL_MODEL,
            data=DataConfig(source="random", random_batches=STEPS),
            precision="fp32",
            local_batch_size=24,
            iterations=STEPS,
            warmup_iterations=0,
            **options,
        )
        trained[name] = train(ranks, config)
    return trained


@pytest.mark.parametrize(("world_size", "gpu"), [place for place in PLACES if place != CPU_PLACES[0]])
def test_no_weight_changes_from_the_first_bad_loss_on(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    for rank, of_rank in enumerate(run_ranks(world_size, train_all, gpu=gpu)):
        for name, trained in of_rank.items():
            bad = [i for i, loss in enumerate(trained.losses) if not torch.tensor(loss).isfinite()]
            assert bad == ([BAD] if rank == world_size - 1 else []), name
            assert trained.learned, name
            assert trained.changed == [], name
