"""Cross-cutting: bags of none to capacity ids train what plain EmbeddingBags of the true lengths do."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.config import DataConfig, OptimizerConfig
from dlrm_bench.dlrm.data.batch import Batch, feature_blocks
from dlrm_bench.dlrm.dcnv2.data.padding import PADDING
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.state import ModelState, table_key
from tests.cases import PLACES, SMALL_MODEL, WAYS
from tests.pipelines import run_config, static_pipeline
from tests.plain_dlrm import PlainDLRM

STEPS = 60
LEARNING_RATE = 0.004
MODEL = replace(SMALL_MODEL, num_embeddings=(5000, 7, 30, 9000, 600, 400))


def config(way: str, gpu: bool = False) -> RunConfig:
    return run_config(
        "static",
        preset="test",
        model=MODEL,
        data=DataConfig(source="random", random_batches=STEPS, variable_lengths=True),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
        **WAYS[way],
        cuda_graph="iteration" if gpu else "none",
        overlap=gpu,
        local_batch_size=24,
        precision="fp32",
        iterations=STEPS,
    )


def batches_of(rank: int, world_size: int, pin: bool = False) -> list[Batch]:
    dataset = RandomDataset(config("fbgemm").data, MODEL, 0)
    batches = list(islice(dataset.train_batches(rank, world_size, 24, pin=pin), STEPS))
    # One sample of empty bags alone, and one iteration of them.
    for block in feature_blocks(batches[3].ids, MODEL.multi_hot_sizes):
        block[5] = PADDING
    batches[20].ids.fill_(PADDING)
    return batches


def train(ranks: Ranks) -> dict[str, tuple[list[float], ModelState]]:
    gpu, results = ranks.device.type == "cuda", {}
    for way in WAYS:
        pipeline = static_pipeline(config(way, gpu), ranks)
        batches = iter(batches_of(ranks.rank, ranks.world_size, pin=gpu))
        losses = [pipeline.train_step(batches).item() for _ in range(STEPS)]
        results[way] = (losses, pipeline.state_dict())
    return results


class TrueLengths(PlainDLRM):
    def logits(self, dense: Tensor, blocks: list[Tensor]) -> Tensor:
        pooled = []
        for block, table in zip(blocks, self.tables, strict=True):
            lengths = (block != PADDING).sum(1)
            ids = block[block != PADDING].long()
            pooled.append(functional.embedding_bag(ids, table, lengths.cumsum(0) - lengths, mode="sum"))
        return self.dense(dense, torch.cat(pooled, dim=1))


@cache
def plain(world_size: int) -> tuple[list[float], TrueLengths]:
    reference = TrueLengths(config("fbgemm"))
    per_step = zip(*(batches_of(rank, world_size) for rank in range(world_size)), strict=True)
    return [reference.train_step(list(batches)) for batches in per_step], reference


@pytest.fixture(scope="module")
def trained(run_ranks: Callable[..., list[Any]]) -> Callable[[int, bool], list[Any]]:
    return cache(lambda world_size, gpu: run_ranks(world_size, train, gpu=gpu))


def test_batches_have_empty_partial_and_full_bags():
    for size, block in zip(
        MODEL.multi_hot_sizes, feature_blocks(batches_of(0, 1)[0].ids, MODEL.multi_hot_sizes), strict=True
    ):
        lengths = (block != PADDING).sum(1)
        assert {0, size} <= set(lengths.tolist()) or size == 12
        assert torch.equal(block != PADDING, torch.arange(size) < lengths[:, None])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_training_equals_plain_embedding_bags(trained, world_size, gpu, way):
    per_rank = [rank[way] for rank in trained(world_size, gpu)]
    expected, reference = plain(world_size)
    losses = torch.tensor([losses for losses, _ in per_rank], dtype=torch.float64).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)
    state = per_rank[0][1]
    for table, weights in enumerate(reference.tables):
        key, sums = table_key(MODEL, table), reference.optimizer.state[weights]["sum"]
        torch.testing.assert_close(state.optimizer[key], sums, rtol=1e-3, atol=1e-9)
        error = (state.weights[key] - weights.detach()).abs()
        assert error.max() < LEARNING_RATE / 20
        assert error.mean() < LEARNING_RATE / 1e4
