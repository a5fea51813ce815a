"""Small DLRMv4 models and samples, the same in every process, for tests and tests/data/dlrmv4/make_model_reference.py.

Weights come from numpy's RandomState, whose numbers never change, so that no file has to hold them.
"""

import os
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlrm_bench.dlrm.config import Precision, TrainingConfig
from dlrm_bench.dlrm.dlrmv4.batch import batch_of
from dlrm_bench.dlrm.dlrmv4.config import (
    CONTEXT_TABLES,
    CONTEXT_TOKENS,
    EVENT_TABLES,
    DataConfig,
    Dlrmv4Training,
    ModelConfig,
    OptimizerConfig,
)
from dlrm_bench.dlrm.dlrmv4.model import Dlrmv4Train, build_model
from dlrm_bench.dlrm.dlrmv4.reference import reference_names as dense_names
from dlrm_bench.dlrm.dlrmv4.samples import Samples

CHECKOUT = os.environ.get("DLRMV4_REFERENCE")
needs_checkout = pytest.mark.skipif(
    CHECKOUT is None, reason="DLRMV4_REFERENCE does not name the folder recommendation/ of a checkout of the reference"
)
SMALL = ModelConfig(
    event_rows=(61, 17, 29),
    context_rows=(11, 13, 12, 19, 23, 7, 5, 16),
    embedding_dim=12,
    width=16,
    layers=2,
    heads=2,
    head_width=16,
    preprocessor_hidden=20,
    max_history=40,
)
"""What the reference fixes stays as it is: hidden width of the head, columns of actions, buckets."""
STILL = replace(SMALL, input_dropout=0.0, layer_dropout=0.0)
WIDE = ModelConfig(event_rows=SMALL.event_rows, context_rows=SMALL.context_rows)
"""The benchmark's own model, but for its tables' rows."""
LENGTHS = (7, 0, 40, 1, 19, 0)
"""Odd ones, and none; the longest is neither first nor last."""
LAST_SECOND = 26_000_000


def make_samples(config: ModelConfig, lengths: tuple[int, ...], seed: int) -> Samples:
    """Returns samples with histories of `lengths`, whose times span all that Yambda has, ends included."""
    random = np.random.RandomState(seed)
    events, size = sum(lengths), len(lengths)

    def ids(rows: int, count: int) -> torch.Tensor:
        return torch.from_numpy(random.randint(0, rows, count).astype(np.int32))

    times, query = [], []
    for length in lengths:
        last = random.randint(0, LAST_SECOND // 5 + 1)
        # Seconds, minutes and months before the last event, in steps of 5.
        before = np.sort((np.exp(random.uniform(0, np.log(last + 1), length)) - 1).astype(np.int64))[::-1]
        before = before - (before[-1] if length else 0)
        times += list(5 * (last - before))
        query.append(5 * last)
    item, artist, album = config.event_rows
    return Samples(
        lengths=torch.tensor(lengths, dtype=torch.int32),
        item=ids(item, events),
        artist=ids(artist, events),
        album=ids(album, events),
        timestamp=torch.tensor(times, dtype=torch.int32),
        action=torch.from_numpy(random.randint(0, 8, events).astype(np.uint8)),
        candidate_item=ids(item, size),
        candidate_artist=ids(artist, size),
        candidate_album=ids(album, size),
        query_timestamp=torch.tensor(query, dtype=torch.int32),
        context=torch.stack([ids(config.context_rows[i], size) for i in range(CONTEXT_TOKENS)]),
        labels=ids(2, size).float(),
    )


def reference_names(config: ModelConfig) -> dict[str, str]:
    """Returns the reference's name of each weight of ours, tables included."""
    names = {f"dense.{ours}": theirs for ours, theirs in dense_names(config).items()}
    return names | {
        f"embeddings.embeddings.{name}.weight": f"_embedding_collection.embeddings.{name}.weight"
        for name in (*EVENT_TABLES, *CONTEXT_TABLES)
    }


def by_item(samples: Samples) -> Samples:
    """Returns samples whose items have one artist and one album each, as real ones have."""
    return replace(samples, artist=samples.item % 17, album=samples.item % 29)


def set_weights(weights: dict[str, nn.Parameter]) -> None:
    """Fills weights by their (our) names: norms about 1, all others about 0, none of them at its initial value."""
    for name, weight in weights.items():
        random = np.random.RandomState(zlib.crc32(name.encode()))
        drawn = torch.from_numpy(random.uniform(-1, 1, tuple(weight.shape)).astype(np.float32))
        if name.endswith((".swish.weight", "norm.weight", "norm_weight")):
            drawn = 1 + 0.3 * drawn
        elif ".first." in name or ".second." in name or name.endswith(("combine.weight", "qk_weight", "put_weight")):
            drawn *= (3 / weight.shape[-1]) ** 0.5
        weight.data.copy_(drawn)


def made_training(**changes: Any) -> Dlrmv4Training:
    """A training configuration of what `changes` says, and defaults."""
    known = {"data": DataConfig(), "optimizer": OptimizerConfig(), "local_batch_size": 4, "precision": "bf16"}
    return TrainingConfig(**known | changes)


def small_model(config: ModelConfig, precision: Precision = "fp32") -> Dlrmv4Train:
    """Returns our model with the weights that the reference was given."""
    cpu = torch.device("cpu")
    model = build_model(made_training(model=config, precision=precision), cpu, cpu)
    set_weights(dict(model.model.named_parameters()))
    return model


def run(
    model: Dlrmv4Train, config: ModelConfig, samples: Samples, seed: int = 0, distinct: bool = False
) -> dict[str, torch.Tensor]:
    """Returns logits, loss and the gradient of each weight, by name, after one backward pass in training mode."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss, (_, logits, _) = model(batch_of(samples, config, distinct))
    loss.backward()
    grads = {name: weight.grad for name, weight in model.model.named_parameters()}
    return {"logits": logits, "loss": loss.detach(), **{name: grad.clone() for name, grad in grads.items()}}
