"""Cross-cutting: DLRMv4 under stock on two ranks trains as a plain loop over their samples in one process does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from dlrm_bench.dlrm.dlrmv4.batch import Batch, batch_of
from dlrm_bench.dlrm.dlrmv4.config import DataConfig, Dlrmv4Training, ModelConfig, OptimizerConfig
from dlrm_bench.dlrm.dlrmv4.data.item_maps import write_maps
from dlrm_bench.dlrm.dlrmv4.model import build_model, fill_tables, seed_dropout
from dlrm_bench.dlrm.dlrmv4.torchrec import torchrec_model
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.torchrec.model import TorchRecPipeline
from dlrm_bench.pipeline.torchrec.options import TorchRecOptions
from dlrm_bench.pipeline.torchrec.stock import StockPipeline
from tests.cases import PLACES
from tests.dlrm.dlrmv4.cases import SMALL, by_item, made_training, make_samples
from tests.pipeline.whole_state import load_whole_state, whole_state

STEPS = 20
MODEL = replace(SMALL, embedding_dim=8, head_hidden=24)
TRAINING = made_training(
    model=MODEL,
    optimizer=OptimizerConfig(learning_rate=0.02, ramp_steps=8, clip_norm=0.4),
    local_batch_size=4,
    precision="fp32",
    seed=5,
)
LENGTHS = ((3, 0, 9, 1), (5, 17, 0, 2))
"""Of each rank's batches; the longest differ, and so what attention is divided by."""


def batches(rank: int, model: ModelConfig = MODEL) -> list[Batch]:
    return [batch_of(make_samples(model, LENGTHS[rank], seed=100 * rank + step), model) for step in range(STEPS)]


def stock(ranks: Ranks, config: Dlrmv4Training, maps: Path, options: TorchRecOptions | None = None) -> TorchRecPipeline:
    """Returns the harness's own pipeline. maps: a folder for the items' artists and albums, all that it reads."""
    torch.backends.cuda.matmul.allow_tf32 = False
    write_maps(maps / str(ranks.rank), *(np.zeros(config.model.rows[0], dtype=np.int32) for _ in range(2)))
    config = replace(config, data=DataConfig(path=maps / str(ranks.rank)))
    return StockPipeline(config, torchrec_model(config, ranks), options or TorchRecOptions(), ranks)


def train(pipeline: TorchRecPipeline, config: Dlrmv4Training, batches: list[Batch], first: int = 0) -> list[float]:
    """Returns the losses of the steps after the first `first`, trained as the training loop does."""
    losses, stream = [], iter(batches[first:])
    for iteration in range(first + 1, len(batches) + 1):
        rate = config.optimizer.rate(iteration)
        assert rate is not None
        pipeline.set_learning_rate(rate)
        losses.append(float(pipeline.train_step(stream)))
    return losses


def train_by_torchrec(ranks: Ranks, config: Dlrmv4Training, maps: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Returns this rank's loss of each step, and its dense weights and its rows of tables at the end."""
    pipeline = stock(ranks, config, maps)
    losses = train(pipeline, config, batches(ranks.rank, config.model))
    ahead = pipeline._train._pipelined_modules
    assert ahead == [pipeline.model.module.model.embeddings], "the input dist must run ahead"
    for name, plan in pipeline.describe()["sharding_plan"].items():
        assert (plan["sharding_type"], plan["ranks"]) == ("row_wise", list(range(ranks.world_size))), name
    return losses, {name: whole(value) for name, value in pipeline.model.state_dict().items()}


def whole(value: Tensor | ShardedTensor) -> Tensor:
    """A weight's memory; of a sharded table all of it, zero where another rank has it."""
    if not isinstance(value, ShardedTensor):
        return value.detach().cpu().clone()
    table = torch.zeros(*value.size())
    for local in value.local_shards():
        (row, column), (rows, columns) = local.metadata.shard_offsets, local.metadata.shard_sizes
        table[row : row + rows, column : column + columns] = local.tensor.detach().cpu()
    return table


def train_plainly(
    config: Dlrmv4Training, world_size: int
) -> tuple[dict[str, Tensor], list[list[float]], dict[str, Tensor], int]:
    """The whole training in one process, every update written out: initial weights, losses of each rank, weights at the
    end, and how many steps were clipped."""
    cpu = torch.device("cpu")
    model, optimizer = build_model(config, cpu, cpu), config.optimizer
    fill_tables(model, config.model, config.seed)
    weights = dict(model.named_parameters())
    initial = {name: weight.detach().clone() for name, weight in weights.items()}
    dense = [weight for name, weight in weights.items() if "embeddings." not in name]
    rows = [weight for name, weight in weights.items() if "embeddings." in name]
    sums = [torch.zeros(len(weight)) for weight in rows]
    means, squares = ([torch.zeros_like(weight) for weight in dense] for _ in range(2))
    stream = [batches(rank, config.model) for rank in range(world_size)]
    losses: list[list[float]] = [[] for _ in range(world_size)]
    clipped = 0
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(world_size):
            seed_dropout(config, rank, step + 1)
            loss, _ = model(stream[rank][step])
            (loss / world_size).backward()
            losses[rank].append(loss.item())
        rate = optimizer.learning_rate * min(1, step / optimizer.ramp_steps)
        with torch.no_grad():
            for weight, total in zip(rows, sums, strict=True):
                assert weight.grad is not None
                total += weight.grad.square().mean(dim=1)
                weight -= rate * weight.grad / (total.sqrt() + optimizer.adagrad_eps)[:, None]
            norm = torch.stack([weight.grad.square().sum() for weight in dense]).sum().sqrt()  # type: ignore[union-attr]
            clipped += int(norm > optimizer.clip_norm)
            for weight, mean, square in zip(dense, means, squares, strict=True):
                assert weight.grad is not None
                gradient = weight.grad * min(1.0, optimizer.clip_norm / (float(norm) + 1e-6))
                first, second = optimizer.adam_betas
                mean.lerp_(gradient, 1 - first)
                square.lerp_(gradient.square(), 1 - second)
                unbiased = square / (1 - second ** (step + 1))
                weight -= rate / (1 - first ** (step + 1)) * mean / (unbiased.sqrt() + optimizer.adam_eps)
    return initial, losses, {name: weight.detach() for name, weight in weights.items()}, clipped


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_the_stock_pipeline_trains_as_a_plain_loop(run_ranks: Any, tmp_path: Path, world_size: int, gpu: bool) -> None:
    """On GPUs without dropout, whose masks are other ones there."""
    still = replace(MODEL, input_dropout=0.0, layer_dropout=0.0)
    config = replace(TRAINING, model=still) if gpu else TRAINING
    initial, losses, weights, clipped = train_plainly(config, world_size)
    assert 0 < clipped < STEPS, "some steps must be clipped and some not"
    results = run_ranks(world_size, train_by_torchrec, config, tmp_path, gpu=gpu)
    for rank, (of_rank, _) in enumerate(results):
        torch.testing.assert_close(torch.tensor(of_rank), torch.tensor(losses[rank]), rtol=1e-5, atol=1e-7)
    for name, weight in weights.items():
        of_ranks = [state[name] for _, state in results]
        got = sum(of_ranks) if "embeddings." in name else of_ranks[0]
        # Adam divides by the size of a gradient: where that is mere rounding, single elements differ.
        apart, way = (got - weight).norm(), (weight - initial[name]).norm()
        assert way > 0, name
        assert apart < (1e-3 if gpu else 1e-4) * way, (name, float(apart / way))
        assert "embeddings." in name or all(torch.equal(of, of_ranks[0]) for of in of_ranks), name


def losses_of_ways(ranks: Ranks, config: Dlrmv4Training, maps: Path) -> dict[str, list[float]]:
    """Returns the first losses of trainings on the same samples, each item of which has one artist and one album."""
    samples = [by_item(make_samples(config.model, LENGTHS[ranks.rank], seed)) for seed in range(10)]
    every, once = ([batch_of(of, config.model, distinct) for of in samples] for distinct in (False, True))
    few_bits = stock(ranks, config, maps, TorchRecOptions(quantized_comms="fp16"))
    still = replace(config, model=replace(config.model, input_dropout=0.0, layer_dropout=0.0))
    return {
        "every": train(stock(ranks, config, maps), config, every),
        "once": train(stock(ranks, config, maps), config, once),
        "few bits": train(few_bits, config, every),
        "one batch": train(stock(ranks, still, maps), still, every[:1] * 3),
    }


def test_ways_to_train_the_same(run_ranks: Any, tmp_path: Path) -> None:
    """Distinct events train as all events; an exchange in fewer bits changes losses slightly; and a ramp's first step,
    whose rate is 0, changes nothing: the second step's loss is that of the initial weights."""
    for found in run_ranks(2, losses_of_ways, TRAINING, tmp_path):
        every, once, few_bits = (torch.tensor(found[way]) for way in ("every", "once", "few bits"))
        torch.testing.assert_close(once, every, rtol=1e-5, atol=1e-7)
        assert 1e-5 < (few_bits / every - 1).abs().max() < 0.02
        first, second, third = found["one batch"]
        assert first == second != third


def resumed_losses(ranks: Ranks, config: Dlrmv4Training, maps: Path) -> tuple[list[float], list[float]]:
    """Returns the losses after the tenth step of a training, and of one that goes on from its state then."""
    stream, half = batches(ranks.rank, config.model), STEPS // 2
    straight = stock(ranks, config, maps)
    train(straight, config, stream[:half])
    saved = {name: whole(value) for name, value in straight.model.state_dict().items()}
    later = stock(ranks, config, maps)
    load_whole_state(later, whole_state(straight))
    later.go_on_after(half, {})
    assert all(torch.equal(whole(value), saved[name]) for name, value in later.model.state_dict().items())
    return train(straight, config, stream, half), train(later, config, stream, half)


def test_a_training_that_goes_on_draws_the_same_masks(run_ranks: Any, tmp_path: Path) -> None:
    for straight, later in run_ranks(2, resumed_losses, TRAINING, tmp_path):
        assert straight == later
