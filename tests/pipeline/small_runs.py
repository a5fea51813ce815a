"""Short trainings of a small static pipeline, for tests that look at one thing each."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.dcnv2.config import DataConfig, OptimizerConfig, TableOptimizerName
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.cases import SMALL_MODEL
from tests.pipeline.whole_state import ModelState
from tests.pipelines import run_config

BATCHES = 16
"""Distinct batches of a run."""


def small(
    embedding: TableOptimizerName = "adagrad",
    learning_rate: float = 0.01,
    **changes: Any,
) -> RunConfig:
    changes = {"model": SMALL_MODEL, "precision": "fp32", "local_batch_size": 24} | changes
    return run_config(
        "static",
        preset="test",
        # Uniform: bags that always come together let Adagrad's first steps amplify rounding beyond what tests allow.
        data=DataConfig(source="random", random_batches=BATCHES, random_ids="uniform"),
        optimizer=OptimizerConfig(embedding=embedding, learning_rate=learning_rate),
        iterations=BATCHES,
        warmup_iterations=0,
        **changes,
    )


def batches_of(config: RunConfig, ranks: Ranks, count: int = BATCHES) -> Iterator[Batch]:
    torch.set_float32_matmul_precision("highest")
    dataset = RandomDataset(config.data, config.model, config.seed)
    place = (ranks.rank, ranks.world_size, config.local_batch_size)
    return islice(dataset.train_batches(*place, pin=ranks.device.type == "cuda"), count)


def equal_states(a: ModelState, b: ModelState) -> bool:
    """Whether all weights and optimizer states are the same bits."""
    pairs = ((a.weights, b.weights), (a.optimizer, b.optimizer))
    return all(x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in pairs)
