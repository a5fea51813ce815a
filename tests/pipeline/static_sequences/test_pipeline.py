"""DLRMv4 in the static pipeline: losses and states of stock TorchRec on the same batches, whatever room these need."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_bench.bench.config import PIPELINES, RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dlrmv4.data.dataset import WindowBatch
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.parts import open_data
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.pipeline.whole_state import ModelState, load_whole_state, whole_state

STEPS = 30
"""Of each half: 60 in all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    generate(replace(smoke_config(folder), users=400, days=6))
    return folder


def small(folder: Path, pipeline: str, samples: int = 16, **options: Any) -> RunConfig:
    """The smoke preset without dropout, whose masks the pipelines draw in other orders, at full rates at once."""
    config = preset("smoke-dlrmv4")
    return replace(
        config,
        model=replace(config.model, input_dropout=0.0, layer_dropout=0.0),
        data=replace(config.data, path=folder),
        optimizer=replace(config.optimizer, learning_rate=2e-3, ramp_steps=20),
        local_batch_size=samples,
        pipeline=PIPELINES[pipeline](**options),
    )


@dataclass(slots=True)
class Trained:
    losses: list[float]
    state: ModelState
    later: list[float]
    """Losses with which it goes on."""
    logits: list[Tensor]
    """Of the evaluation between."""
    described: dict[str, Any]


def drawn(config: RunConfig, ranks: Ranks, count: int) -> list[WindowBatch]:
    dataset = open_data(config)
    batches = dataset.train_batches(ranks.rank, ranks.world_size, config.local_batch_size)
    assert len(batches) >= count
    # From the end of the windows on, where histories are longest, and back.
    return [batches[i] for i in range(len(batches) - count, len(batches))][::-1]


def train(ranks: Ranks, config: RunConfig, state: ModelState | None = None) -> Trained:
    """state: to go on from, with the second half of the batches."""
    torch.set_float32_matmul_precision("highest")
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    if config.pipeline.name == "static":
        pipeline.warm_up(evaluates=True)
    batches, first = drawn(config, ranks, 2 * STEPS), 0
    if state is not None:
        load_whole_state(pipeline, state)
        batches, first = batches[STEPS:], STEPS
    prepared: Iterator[Any] = map(pipeline.prepare, batches)

    def steps(begin: int) -> list[float]:
        losses = []
        for iteration in range(begin, begin + STEPS):
            rate = config.optimizer.rate(iteration + 1)
            assert rate is not None
            pipeline.set_learning_rate(rate)
            losses.append(pipeline.train_step(prepared).item())
        return losses

    losses = steps(first)
    after = whole_state(pipeline)
    logits = [of for of, _ in pipeline.evaluate(map(pipeline.prepare, drawn(config, ranks, 3)))]
    later = steps(STEPS) if state is None else []
    with pytest.raises(StopIteration):
        pipeline.train_step(prepared)
    described = pipeline.describe()
    pipeline.close()
    return Trained(losses, after, later, logits, described)


def assert_close(ours: ModelState, theirs: ModelState) -> None:
    for of_ours, of_theirs in ((ours.weights, theirs.weights), (ours.optimizer, theirs.optimizer)):
        assert of_ours.keys() == of_theirs.keys()
        for key, of in of_theirs.items():
            torch.testing.assert_close(of_ours[key], of, rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def train_all(ranks: Ranks, folder: Path) -> dict[str, Trained]:
    stock = train(ranks, small(folder, "torchrec"))
    results = {"stock": stock, "static": train(ranks, small(folder, "static"))}
    results["from stock"] = train(ranks, small(folder, "static"), stock.state)
    results["from static"] = train(ranks, small(folder, "torchrec"), results["static"].state)
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_trains_what_stock_trains(run_ranks: Callable[..., list[Any]], folder: Path, world_size: int) -> None:
    for rank in run_ranks(world_size, train_all, folder):
        stock, static = rank["stock"], rank["static"]
        assert len(set(stock.losses)) > STEPS // 2
        torch.testing.assert_close(torch.tensor(static.losses), torch.tensor(stock.losses), rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.tensor(static.later), torch.tensor(stock.later), rtol=0, atol=1e-5)
        assert_close(static.state, stock.state)
        for ours, theirs in zip(static.logits, stock.logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for name, whole in (("from stock", stock), ("from static", static)):
            torch.testing.assert_close(torch.tensor(rank[name].losses), torch.tensor(whole.later), rtol=0, atol=1e-5)
