"""Cross-cutting: histories of no event, of one and of the most that the benchmark has, in batches of one sample and of
two, through the static pipeline: it trains what stock does, whatever the other rank has."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_bench.bench.config import PIPELINES, RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dlrmv4.data.builder import BatchBuilder
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache
from dlrm_bench.dlrm.dlrmv4.data.cache_writer import CacheWriter, Events
from dlrm_bench.dlrm.dlrmv4.data.dataset import WindowBatch
from dlrm_bench.dlrm.dlrmv4.data.item_maps import ItemMaps, write_maps
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits, Rows
from dlrm_bench.dlrm.dlrmv4.data.packed import LENGTH
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.pipeline.whole_state import ModelState, whole_state

LIMITS = Limits(min_history=0)
NONE, ONE, MOST = 0, 1, LIMITS.history
ITEMS = 60
HISTORIES = {
    1: (((NONE,), (MOST,), (ONE,)), ((ONE,), (NONE,), (NONE,))),
    2: (((NONE, NONE), (ONE, MOST)), ((NONE, ONE), (NONE, NONE))),
}
"""By samples of a batch: of each rank, events of the histories of each step's samples."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One user, of listens, skips and likes in turn."""
    folder = tmp_path_factory.mktemp("days")
    count = 3 * LIMITS.pool + 100
    random, kind = np.random.default_rng(0), np.arange(count) % 3
    with CacheWriter(folder / LIMITS.cache_name, LIMITS) as writer:
        writer.append(
            Events(
                uid=np.full(count, 5),
                item=random.integers(1, ITEMS, count),
                timestamp=np.sort(random.integers(0, 20_000, count)) * 5,
                event_type=(kind == 2).astype(np.int64),
                is_organic=np.zeros(count, dtype=np.int8),
                played_ratio=np.where(kind == 0, 80, 10).astype(np.float32),
            )
        )
    write_maps(folder, *(np.append(0, random.integers(0, 9, ITEMS - 1)).astype(np.int32) for _ in range(2)))
    return folder


def small(folder: Path, pipeline: str, samples: int) -> RunConfig:
    """Narrow, with the benchmark's longest history, without dropout."""
    config = preset("smoke-dlrmv4")
    narrow = {"embedding_dim": 16, "width": 16, "heads": 1, "max_history": MOST, "position_buckets": 8192}
    kernels = "fused" if pipeline == "static" else "plain"
    return replace(
        config,
        model=replace(config.model, input_dropout=0.0, layer_dropout=0.0, kernels=kernels, **narrow),
        data=replace(config.data, path=folder),
        local_batch_size=samples,
        pipeline=PIPELINES[pipeline](),
    )


def _anchor(cache: Cache, length: int) -> int:
    """Returns the number of an anchor whose history has this length; the user's events are all of a pool."""
    return len(cache.positions) - 1 if length == MOST else int(np.flatnonzero(cache.positions == length)[0])


def batches(folder: Path, config: RunConfig, rank: int) -> list[WindowBatch]:
    cache, size = Cache.open(folder / LIMITS.cache_name), config.local_batch_size
    builder = BatchBuilder(cache, ItemMaps.open(folder), Rows(*config.model.rows))
    found = []
    for lengths in HISTORIES[size][rank]:
        packed = builder.build(np.array([_anchor(cache, of) for of in lengths]))
        assert tuple(packed.samples[LENGTH].tolist()) == lengths
        found.append(WindowBatch(packed, size))
    return found


def train(ranks: Ranks, folder: Path, pipeline: str, samples: int) -> tuple[Tensor, Tensor, ModelState, Any]:
    """Returns losses, logits of the first two batches afterwards, the whole state and what describes the pipeline."""
    torch.set_float32_matmul_precision("highest")
    config = small(folder, pipeline, samples)
    built: Any = build_pipeline(config, config.pipeline, ranks)
    given = batches(folder, config, ranks.rank)
    prepared = map(built.prepare, given)
    losses = [built.train_step(prepared).item() for _ in given]
    logits = torch.stack([of for of, _ in built.evaluate(map(built.prepare, given[:2]))])
    state, described = whole_state(built), built.describe()
    built.close()
    return torch.tensor(losses), logits, state, described


def train_both(ranks: Ranks, folder: Path, samples: int) -> list[Any]:
    return [train(ranks, folder, pipeline, samples) for pipeline in ("torchrec", "static")]


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 2])
def test_odd_histories_train_as_in_stock(run_ranks: Callable[..., list[Any]], folder: Path, samples: int) -> None:
    for (losses, logits, state, _), (ours, of_ours, of_state, described) in run_ranks(2, train_both, folder, samples):
        assert bool(losses.isfinite().all())
        torch.testing.assert_close(ours, losses, rtol=0, atol=1e-5)
        torch.testing.assert_close(of_ours, logits, rtol=0, atol=1e-4)
        for key, weight in state.weights.items():
            torch.testing.assert_close(of_state.weights[key], weight, rtol=0, atol=1e-5, msg=key)
        rooms = described["rooms"]["iteration"]
        assert rooms["larger_rooms"] > 0, "the long histories have no room among the short ones"
        assert rooms["room_for_events"] >= MOST
