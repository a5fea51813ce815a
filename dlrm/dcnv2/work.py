"""The work of an iteration of DLRM-DCNv2, from its configuration alone: see benchmark.Work.

- A table row counts once per batch, and a row of the previous batch only as far as the GPU's cache cannot hold it; so
do
  the update's reads of rows that the lookup has read.
- Activations count as far as the cache cannot hold them; element-wise work that fits around a product does not count.
- Tables of less than 10 MB need no exchange: every rank could have a copy.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dlrm_bench.dlrm.benchmark import UNMEASURED, Piece, SampleSizes, TableWork
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.data.distributions import zipf_ids
from dlrm_bench.dlrm.dcnv2.config import DataConfig, ModelConfig
from dlrm_bench.kernels.stages import STAGES

_COPIED_TO_ALL = 10e6  # maximum bytes of a table of which every rank could have a copy
_OF_TWO = "dense forward/backward or dense update"  # depends on the pipeline


class Rows(NamedTuple):
    """Rows that a batch looks up, over all tables."""

    ids: int
    distinct: float
    """Distinct rows."""
    new: float
    """Distinct rows that the previous batch did not look up."""


def dense_weights(config: TrainingConfig) -> int:
    """Returns the number of weights and biases of the dense network."""
    model = _model(config)
    width = (model.num_features + 1) * model.embedding_dim
    mlps = sum(i * o + o for layers in mlp_widths(model) for i, o in pairwise(layers))
    return mlps + model.cross_layers * (2 * width * model.cross_rank + width)


def products(config: TrainingConfig, samples: int, sizes: SampleSizes = UNMEASURED) -> dict[str, tuple[int, int, int]]:
    """Returns (M, N, K) of every matrix product of an iteration: forward, input gradient and weight gradient of each
    layer."""
    model = _model(config)
    width = (model.num_features + 1) * model.embedding_dim
    layers = []
    for i in range(model.cross_layers):
        layers += [(f"cross {i} V", width, model.cross_rank), (f"cross {i} W", model.cross_rank, width)]
    for mlp, widths in zip(("bottom", "top"), mlp_widths(model), strict=True):
        layers += [(f"{mlp} {i}", *io) for i, io in enumerate(pairwise(widths))]
    shapes = {}
    for name, inputs, outputs in layers:
        shapes[f"GEMM: {name} forward"] = (samples, outputs, inputs)
        if name != "bottom 0":  # the dense features need no gradient
            shapes[f"GEMM: {name} input gradient"] = (samples, inputs, outputs)
        shapes[f"GEMM: {name} weight gradient"] = (outputs, inputs, samples)
    return shapes


def table_work(config: TrainingConfig, samples: int, vector_bytes: int, sizes: SampleSizes = UNMEASURED) -> TableWork:
    """Returns the table work's traffic, see benchmark.Work: a share is 1 / world size of the global batch's work, so it
    is that of one local batch. Ids and fp32 rows are read, pooled vectors written; ids and gradients are read, rows
    and their optimizer state read and written. Assumes that caches hold nothing, which is wrong only for the smallest
    tables."""
    tables = _model(config).tables
    ids, vectors = samples * tables.ids_per_sample, samples * tables.count * tables.columns
    state = config.optimizer.tables.state_columns(tables.columns)
    return TableWork(
        ids=ids,
        vectors=vectors,
        lookup=ids * 4.0 + ids * tables.columns * 4.0 + vectors * vector_bytes,
        update=ids * 4.0 + vectors * vector_bytes + ids * 8.0 * (tables.columns + state),
    )


def flop_per_sample(config: TrainingConfig, sizes: SampleSizes = UNMEASURED) -> float:
    """Returns the floating-point operations of one sample's products in training; a multiply-add counts as two."""
    return float(sum(2 * m * n * k for m, n, k in products(config, 1).values()))


def batch_bytes(config: TrainingConfig) -> int:
    """Returns the bytes of a rank's batch: ids, and dense features and label of four bytes each."""
    tables, features = _model(config).tables, _model(config).dense_in_features
    return config.local_batch_size * (tables.id_bytes * tables.ids_per_sample + 4 * (features + 1))


def pieces(config: TrainingConfig, world_size: int, cache_bytes: float, sizes: SampleSizes = UNMEASURED) -> list[Piece]:
    """Returns the pieces of an iteration on one rank, see benchmark.Work."""
    model, data, batch = _model(config), config.data, config.local_batch_size
    assert isinstance(data, DataConfig)
    size, dim = 2 if config.precision == "bf16" else 4, model.embedding_dim
    input_dist, lookup, dense, backward, update = STAGES
    away = (world_size - 1) / world_size
    exchanged = [rows * dim * 4 >= _COPIED_TO_ALL for rows in model.rows]
    ids = batch * sum(hot for hot, needed in zip(model.multi_hot_sizes, exchanged, strict=True) if needed)
    pooled = batch * sum(exchanged) * dim * size * away
    rows, row = rows_named(model, data, batch * world_size), 4.0 * dim
    state = 4.0 * config.optimizer.tables.state_columns(dim)
    held = cache_bytes / (row + state)
    moved = rows.new / world_size + max(0.0, (rows.distinct - rows.new) / world_size - held)
    weights, saved = dense_weights(config), batch * size * _saved(model)
    gemms = products(config, batch)
    in_chain = sum(2.0 * m * n * k for name, (m, n, k) in gemms.items() if _waits(name))
    beside = sum(2.0 * m * n * k for name, (m, n, k) in gemms.items() if not _waits(name))
    updated = max(0.0, moved * row - cache_bytes) + moved * (row + 2.0 * state)
    return [
        Piece("copy of the batch", input_dist, pcie=float(batch_bytes(config))),
        Piece("exchange of ids", input_dist, links=ids * float(model.tables.id_bytes) * away),
        Piece("lookup", lookup, memory=moved * row, waits=True),
        Piece("exchange of pooled vectors", lookup, links=pooled, waits=True),
        Piece("products", dense, flop=in_chain, waits=True),
        Piece("bottom MLP's products and weight gradients", dense, flop=beside),
        Piece("activations kept for the backward", dense, memory=2.0 * max(0.0, saved - cache_bytes)),
        Piece("exchange of gradients", backward, links=pooled, waits=True),
        Piece("table update", backward, memory=updated, waits=True),
        Piece("exchange of dense gradients and weights", _OF_TWO, links=2.0 * away * weights * size),
        Piece("dense update", update, memory=2.0 * max(0.0, 8.0 * weights / world_size - cache_bytes)),
    ]


def _model(config: TrainingConfig) -> ModelConfig:
    assert isinstance(config.model, ModelConfig)
    return config.model


def _waits(product: str) -> bool:
    """Whether the next lookup waits for a product: not for weight gradients, nor for products of the bottom MLP."""
    return "weight gradient" not in product and "bottom" not in product


def _saved(model: ModelConfig) -> int:
    """Returns the number of values per sample that the backward needs and cannot recompute from other values."""
    width = (model.num_features + 1) * model.embedding_dim
    bottom, top = mlp_widths(model)
    return model.cross_layers * (width + model.cross_rank) + sum(bottom[1:]) + sum(top[1:-1])


def mlp_widths(model: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the widths of the bottom and the top MLP, including their inputs."""
    width = (model.num_features + 1) * model.embedding_dim
    return (model.dense_in_features, *model.bottom_mlp), (width, *model.top_mlp)


def rows_named(model: ModelConfig, data: DataConfig, global_batch_size: int) -> Rows:
    """Returns the rows that a random batch of RandomDataset looks up: first ids sampled, the others by expectation."""
    rng = np.random.default_rng(0)
    distinct = new = 0.0
    for rows, hot in zip(model.rows, model.multi_hot_sizes, strict=True):
        before, now = (np.unique(zipf_ids(rng, rows, data.random_skew, global_batch_size)) for _ in range(2))
        fresh = len(np.setdiff1d(now, before, assume_unique=True))
        if data.random_ids == "expanded":  # a function of the first id: these rows repeat as often as the first id
            draws, fresh_draws = len(now) * (hot - 1), fresh * (hot - 1)
        else:
            draws = fresh_draws = global_batch_size * (hot - 1)
        others = rows * -np.expm1(-draws / rows)
        distinct += min(rows, len(now) + others)
        # A row drawn independently has been looked up by the previous batch with the same probability as any other.
        new += min(rows, fresh + rows * -np.expm1(-fresh_draws / rows)) * float(np.exp(-draws / rows))
    return Rows(global_batch_size * model.ids_per_sample, float(distinct), float(new))
