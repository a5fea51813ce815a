"""Cross-cutting: in bf16, at widths that the bottom MLP's own kernel takes, and in eight bits a bad feature stops every
update in its own iteration."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.bench.instruments.losses import LossHistory, NonFiniteError
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.dense import small_mlp
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from tests.cases import GPU_PLACES, SMALL_MODEL
from tests.pipeline.small_runs import batches_of, small
from tests.pipelines import static_pipeline

MODEL = replace(SMALL_MODEL, embedding_dim=64, bottom_mlp=(128, 64, 64), cross_rank=16, top_mlp=(32, 16, 1))
STEPS, BAD = 9, 6


@dataclass(slots=True)
class Trained:
    losses: list[float]
    counts: list[dict[str, list[int]]]
    """Tallies of numbers too large and not finite, before the bad iteration and at the end, by tensor."""
    changed: list[int]
    """The iterations that changed a weight or optimizer state."""
    finite: bool
    """Whether all of these are, at the end."""
    error: str


def tensors_of(pipeline: StaticPipeline) -> list[Tensor]:
    tables = (tensor for part in pipeline.ebc.table_shards() for tensor in (part.weights, part.state))
    return [tensor.clone() for tensor in (*tables, *(t for b in pipeline.dense.buckets for t in (b.master, b.state)))]


def counts_of(pipeline: StaticPipeline) -> dict[str, list[int]]:
    tallies = pipeline.tallies()
    return {name: row for name, row in zip(tallies.names, tallies.counts.tolist(), strict=True) if any(row)}


def train(ranks: Ranks, fp8: bool, bad: float) -> Trained:
    assert small_mlp.applies(MODEL.bottom_mlp, 16, torch.bfloat16)
    graph: dict[str, Any] = {"cuda_graph": "iteration", "overlap": True} if ranks.device.type == "cuda" else {}
    way = {"presort_ids": True, "peer_memory": True}
    config = small(model=MODEL, precision="bf16", fp8=fp8, local_batch_size=32, **way, **graph)
    pipeline, batches = static_pipeline(config, ranks), list(batches_of(config, ranks, STEPS))
    batches[BAD].dense[3, 1] = bad
    read, history = iter(batches), LossHistory(ranks.device, STEPS, tallies=pipeline.tallies)
    losses, changed, counts, before = [], [], [], tensors_of(pipeline)
    for step in range(STEPS):
        if step == BAD:
            counts.append(counts_of(pipeline))
        loss = pipeline.train_step(read)
        losses.append(loss.item())
        history.add(loss.detach().clone())
        after = tensors_of(pipeline)
        if not all(map(torch.equal, before, after)):
            changed.append(step)
        before = after
    counts.append(counts_of(pipeline))
    try:
        history.finish()
        error = ""
    except NonFiniteError as stopped:
        error = str(stopped)
    pipeline.close()
    return Trained(losses, counts, changed, all(tensor.isfinite().all().item() for tensor in after), error)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("world_size", "gpu"), [(1, False), *GPU_PLACES])
def test_a_feature_that_is_nan(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool, fp8: bool) -> None:
    for trained in run_ranks(world_size, train, fp8, torch.nan, gpu=gpu):
        assert [i for i, loss in enumerate(trained.losses) if loss != loss] == [BAD]
        assert trained.changed == list(range(BAD))
        assert trained.finite
        assert trained.counts[0] == {}
        assert trained.error.startswith(f"the loss of iteration {BAD + 1} is nan")


@pytest.mark.parametrize(("world_size", "gpu"), [(1, False), *GPU_PLACES])
def test_numbers_that_eight_bits_do_not_hold(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    for trained in run_ranks(world_size, train, True, 3e38, gpu=gpu):
        assert trained.changed == list(range(BAD))
        assert trained.finite
        assert trained.counts[0] == {}
        assert any(not_finite for _, not_finite in trained.counts[1].values())
        assert trained.error
    for trained in run_ranks(world_size, train, True, 1e7, gpu=gpu):
        large = {name for name, (too_large, _) in trained.counts[1].items() if too_large}
        assert "cross.0.x" in large
        assert all(not_finite == 0 for _, not_finite in trained.counts[1].values())
        assert trained.changed == list(range(STEPS)), "large numbers are counted and stop nothing"
