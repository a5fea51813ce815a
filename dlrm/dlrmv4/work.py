"""The work of an iteration of DLRMv4, from its configuration and its samples' sizes: see benchmark.Work.

Only necessary work counts, for any --model.last-layer: in the last layer, queries, gates and output products of the
candidates only, as no other output is read; the content of each distinct item once; each distinct row once. The four
actions count as free. Sizes that were not measured are those of Yambda's first windows (2,082 tokens per sample), in
proportion to the longest history.
"""

from dlrm_bench.dlrm.benchmark import UNMEASURED, Piece, SampleSizes, TableWork
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.dlrmv4 import counts
from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TOKENS, EVENT_TABLES, ModelConfig
from dlrm_bench.dlrm.dlrmv4.counts import EARLY, Lengths
from dlrm_bench.kernels.stages import STAGES

TOKENS, TOKENS_SQUARED, EVENTS, ITEMS, ROWS = "tokens", "tokens_squared", "events", "items", "rows"
"""Sample sizes: mean tokens of a sequence, the mean of their squares; and of a rank's batch, over its samples, distinct
events, distinct items, distinct rows of all tables."""
_LONGEST = ModelConfig().max_length
_ASSUMED = {EVENTS: 160.0, ITEMS: 17.0, ROWS: 49.0}
"""Sizes for 1,024 samples: 50,000 distinct rows, 17,000 distinct items, by AMD; events by a guess (1.5 MB packed)."""
_SAMPLE_BYTES, _EVENT_BYTES = 72, 9
"""Bytes of a sample and of an event in a packed batch (data/packed.py)."""
_OF_TWO = "dense forward/backward or dense update"


def lengths_of(model: ModelConfig, sizes: SampleSizes) -> Lengths:
    """Returns the lengths of sequences that were measured, or are assumed."""
    if TOKENS in sizes:
        return Lengths(mean=sizes[TOKENS], mean_square=sizes[TOKENS_SQUARED])
    share = model.max_length / _LONGEST
    return Lengths(mean=EARLY.mean * share, mean_square=EARLY.mean_square * share**2)


def dense_weights(config: TrainingConfig) -> int:
    """Returns the number of weights and biases of the dense network."""
    return counts.dense_weights(_model(config))


def flop_per_sample(config: TrainingConfig, sizes: SampleSizes = UNMEASURED) -> float:
    """Returns the operations of a sample in training: 90.4e9 in the benchmark's first windows."""
    return _flop(config, sizes).total


def products(config: TrainingConfig, samples: int, sizes: SampleSizes = UNMEASURED) -> dict[str, tuple[int, int, int]]:
    """Returns (M, N, K) of the dense network's products with weights, attention's excepted."""
    model = _model(config)
    width, inner, columns, hidden = model.width, model.inner, model.embedding_dim, model.preprocessor_hidden
    tokens = round(samples * lengths_of(model, sizes).mean)
    items = round(samples * _size(sizes, ITEMS))
    layers = [
        ("content item 0", items, columns, hidden),
        ("content item 1", items, hidden, width),
        ("content artist album 0", items, 2 * columns, hidden),
        ("content artist album 1", items, hidden, width),
        *((f"context {i}", samples, columns, width) for i in range(CONTEXT_TOKENS)),
    ]
    for layer in range(model.layers - 1):
        layers += [(f"layer{layer} uvqk", tokens, width, 4 * inner), (f"layer{layer} output", tokens, 3 * inner, width)]
    last = f"layer{model.layers - 1}"
    layers += [(f"{last} keys values", tokens, width, 2 * inner), (f"{last} queries", samples, width, 2 * inner)]
    layers += [
        (f"{last} output", samples, 3 * inner, width),
        ("head users", samples, width + 4, width),
        ("head items 0", samples, len(EVENT_TABLES) * columns, model.head_hidden),
        ("head items 1", samples, model.head_hidden, width),
        ("head 0", samples, width, model.head_hidden),
        ("head 1", samples, model.head_hidden, 1),
    ]
    shapes = {}
    for name, rows, inputs, outputs in layers:
        shapes[f"GEMM: {name} forward"] = (rows, outputs, inputs)
        shapes[f"GEMM: {name} input gradient"] = (rows, inputs, outputs)
        shapes[f"GEMM: {name} weight gradient"] = (outputs, inputs, rows)
    return shapes


def table_work(config: TrainingConfig, samples: int, vector_bytes: int, sizes: SampleSizes = UNMEASURED) -> TableWork:
    """Returns a rank's share of the tables' work, each distinct row of its batch once; fp32 rows, one number of state a
    row."""
    model = _model(config)
    rows = samples * _size(sizes, ROWS)
    vectors = rows * model.embedding_dim
    update = counts.table_bytes(model, rows).update - 4.0 * vectors + vectors * vector_bytes
    return TableWork(ids=rows, vectors=vectors, lookup=vectors * (4.0 + vector_bytes), update=update)


def pieces(config: TrainingConfig, world_size: int, cache_bytes: float, sizes: SampleSizes = UNMEASURED) -> list[Piece]:
    """Returns the pieces of an iteration on one rank, see benchmark.Work.

    An owner reads and updates a row once, however many ranks name it: ranks get neighbouring samples and name the same
    rows. Activations are the inputs of all layers but the first, whose input follows from distinct rows; they count as
    written and read once more, unless the cache can hold them.
    """
    model, batch = _model(config), config.local_batch_size
    size = 2 if config.precision == "bf16" else 4
    input_dist, lookup, dense, backward, update = STAGES
    away = (world_size - 1) / world_size
    rows, row, state = batch * _size(sizes, ROWS), 4.0 * model.embedding_dim, 4.0
    own, exchanged = rows / world_size, rows * away * model.embedding_dim * size
    weights = dense_weights(config)
    flop = _flop(config, sizes)
    with_weights = batch * (flop.total - flop.attention)
    saved = batch * lengths_of(model, sizes).mean * model.width * size * (model.layers - 1)
    written = max(0.0, own * row - cache_bytes) + own * (row + 2 * state)
    packed = batch * (_SAMPLE_BYTES + _EVENT_BYTES * _size(sizes, EVENTS))
    return [
        Piece("copy of the batch", input_dist, pcie=packed),
        Piece("exchange of ids", input_dist, links=rows * 4.0 * away),
        Piece("lookup", lookup, memory=own * row, waits=True),
        Piece("exchange of rows", lookup, links=exchanged, waits=True),
        Piece("products", dense, flop=with_weights * 2 / 3, waits=True),
        Piece("attention", dense, flop=batch * flop.attention, waits=True),
        Piece("weight gradients", dense, flop=with_weights / 3),
        Piece("activations kept for the backward", dense, memory=2.0 * max(0.0, saved - cache_bytes)),
        Piece("exchange of gradients", backward, links=exchanged, waits=True),
        Piece("table update", backward, memory=written, waits=True),
        Piece("exchange of dense gradients and weights", _OF_TWO, links=2.0 * away * weights * size),
        Piece("dense update", update, memory=2.0 * max(0.0, 12.0 * weights / world_size - cache_bytes)),
    ]


def activation_bytes(config: TrainingConfig) -> dict[str, float]:
    """Returns what benchmark.Benchmark.activation_bytes does, for fused layers."""
    model = _model(config)
    mean, size = lengths_of(model, UNMEASURED).mean, 2 if config.precision == "bf16" else 4
    return {
        f"with --model.kernels fused{flag} ({mean:,.0f} tokens a sample)": counts.activation_bytes(
            model, config.local_batch_size * mean, recompute=bool(flag), number_bytes=size
        )
        for flag in ("", " --model.recompute-layers")
    }


def _flop(config: TrainingConfig, sizes: SampleSizes) -> counts.Flop:
    model = _model(config)
    return counts.flop_per_sample(
        model, lengths_of(model, sizes), last_layer_candidates=True, content_rows=_size(sizes, ITEMS)
    )


def _size(sizes: SampleSizes, name: str) -> float:
    return sizes.get(name, _ASSUMED[name])


def _model(config: TrainingConfig) -> ModelConfig:
    assert isinstance(config.model, ModelConfig)
    return config.model
