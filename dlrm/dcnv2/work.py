"""What an iteration has to compute and move, from the model's sizes alone: products, weights, rows of tables."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dlrm_bench.dlrm.config import DataConfig, ModelConfig
from dlrm_bench.dlrm.data.distributions import zipf_ids


class Rows(NamedTuple):
    """Rows of tables that a batch names, over all tables."""

    ids: int
    distinct: float
    """Each row once."""
    new: float
    """Those of them that the batch before did not name."""


def dense_weights(model: ModelConfig) -> int:
    """Weights and biases of the dense network."""
    width = (model.num_features + 1) * model.embedding_dim
    mlps = sum(i * o + o for layers in mlp_widths(model) for i, o in pairwise(layers))
    return mlps + model.cross_layers * (2 * width * model.cross_rank + width)


def gemm_shapes(model: ModelConfig, batch: int) -> dict[str, tuple[int, int, int]]:
    """(M, N, K) of every matrix product of an iteration: forward, input gradient and weight gradient of each layer."""
    width = (model.num_features + 1) * model.embedding_dim
    layers = []
    for i in range(model.cross_layers):
        layers += [(f"cross {i} V", width, model.cross_rank), (f"cross {i} W", model.cross_rank, width)]
    for mlp, sizes in zip(("bottom", "top"), mlp_widths(model), strict=True):
        layers += [(f"{mlp} {i}", *io) for i, io in enumerate(pairwise(sizes))]
    shapes = {}
    for name, inputs, outputs in layers:
        shapes[f"GEMM: {name} forward"] = (batch, outputs, inputs)
        if name != "bottom 0":  # the dense features need no gradient
            shapes[f"GEMM: {name} input gradient"] = (batch, inputs, outputs)
        shapes[f"GEMM: {name} weight gradient"] = (outputs, inputs, batch)
    return shapes


def flop_per_sample(model: ModelConfig) -> float:
    """Floating-point operations of a sample's GEMMs in training, an addition and a multiplication counted as two."""
    return float(sum(2 * m * n * k for m, n, k in gemm_shapes(model, 1).values()))


def mlp_widths(model: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths of the bottom and the top MLP, each from its input on."""
    width = (model.num_features + 1) * model.embedding_dim
    return (model.dense_in_features, *model.bottom_mlp), (width, *model.top_mlp)


def rows_named(model: ModelConfig, data: DataConfig, global_batch_size: int) -> Rows:
    """Rows that a random batch names, as RandomDataset draws them: first ids sampled, the others by expectation."""
    rng = np.random.default_rng(0)
    distinct = new = 0.0
    for rows, hot in zip(model.rows, model.multi_hot_sizes, strict=True):
        before, now = (np.unique(zipf_ids(rng, rows, data.random_skew, global_batch_size)) for _ in range(2))
        fresh = len(np.setdiff1d(now, before, assume_unique=True))
        if data.random_ids == "expanded":  # a function of the first id: rows repeat as often as that does
            draws, fresh_draws = len(now) * (hot - 1), fresh * (hot - 1)
        else:
            draws = fresh_draws = global_batch_size * (hot - 1)
        others = rows * -np.expm1(-draws / rows)
        distinct += min(rows, len(now) + others)
        # Of a row that is drawn anew, the batch before has named another row's share already.
        new += min(rows, fresh + rows * -np.expm1(-fresh_draws / rows)) * float(np.exp(-draws / rows))
    return Rows(global_batch_size * model.ids_per_sample, float(distinct), float(new))
