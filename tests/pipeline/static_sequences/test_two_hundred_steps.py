"""Cross-cutting: 200 steps of DLRMv4 in fp32, by stock TorchRec and by the static pipeline with fused kernels."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_bench.bench.config import PIPELINES, RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dlrmv4.config import Kernels
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.parts import open_data
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.pipeline.whole_state import ModelState, whole_state

STEPS = 200
NEAR = 1e-5
"""Weights travel up to 0.08 in these steps: a rate that is a thousandth larger is seen."""


def small(folder: Path, pipeline: str, kernels: Kernels) -> RunConfig:
    """The smoke preset at a width of 16, without dropout, whose masks the pipelines draw in other orders."""
    config = preset("smoke-dlrmv4")
    widths = {"embedding_dim": 16, "width": 16, "heads": 1}
    return replace(
        config,
        model=replace(config.model, input_dropout=0.0, layer_dropout=0.0, kernels=kernels, **widths),
        data=replace(config.data, path=folder),
        optimizer=replace(config.optimizer, learning_rate=1e-3, ramp_steps=100),
        local_batch_size=4,
        pipeline=PIPELINES[pipeline](),
    )


def train(ranks: Ranks, config: RunConfig) -> tuple[list[float], ModelState, ModelState]:
    """Returns this rank's losses, and the whole state before and after."""
    torch.set_float32_matmul_precision("highest")
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    before = whole_state(pipeline)
    batches = open_data(config).train_batches(ranks.rank, ranks.world_size, config.local_batch_size)
    prepared, losses = map(pipeline.prepare, islice(batches, STEPS)), []
    for iteration in range(1, STEPS + 1):
        pipeline.set_learning_rate(config.optimizer.rate(iteration))
        losses.append(pipeline.train_step(prepared).item())
    after = whole_state(pipeline)
    pipeline.close()
    return losses, before, after


def train_both(ranks: Ranks, folder: Path) -> tuple[Any, Any]:
    return train(ranks, small(folder, "torchrec", "plain")), train(ranks, small(folder, "static", "fused"))


@pytest.mark.slow
def test_losses_and_weights_are_those_of_stock(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    generate(replace(smoke_config(tmp_path), users=300, days=5))
    for (stock, before, theirs), (static, _, ours) in run_ranks(2, train_both, tmp_path):
        assert len(set(stock)) > STEPS // 2
        torch.testing.assert_close(torch.tensor(static), torch.tensor(stock), rtol=0, atol=NEAR)
        assert ours.weights.keys() == theirs.weights.keys()
        for key, weight in theirs.weights.items():
            assert (weight - before.weights[key]).abs().max() > 100 * NEAR, key
            torch.testing.assert_close(ours.weights[key], weight, rtol=0, atol=NEAR, msg=key)
        for key, state in theirs.optimizer.items():
            torch.testing.assert_close(ours.optimizer[key], state, rtol=1e-3, atol=NEAR, msg=key)
