"""Operations and bytes of an iteration of DLRMv4, from the model's sizes and the lengths of its histories alone.

An addition and a multiplication count as two floating-point operations. The backward pass of a product has two further
products; attention's backward has five products, its forward two. Causal attention counts the pairs of tokens that see
each other, half of all pairs. Norms, gates and dropout are not counted: they are bound by memory, not arithmetic. These
conventions are the reference's (modules/dlrm_hstu.py, _hstu_layer_flops), which counts layers only, for comparison.
"""

from dataclasses import dataclass

from dlrm_bench.dlrm.dlrmv4.config import (
    ACTION_BITS,
    CONTEXT_TOKENS,
    EVENT_TABLES,
    OWN_TOKENS,
    ModelConfig,
    tables,
)

_TRAINED = 3
"""Number of products of a linear layer in training: the forward product, and the gradients of input and weights."""
_ATTENTION_FORWARD = 2
"""Number of products in attention's forward pass: queries with keys, and weights with values."""
_ATTENTION_TRAINED = 7
"""Number of products in both passes: backward recomputes the weights and computes four gradients."""
_ADAGRAD_STATE = 4  # bytes of a row's state
_FP32 = 4


@dataclass(kw_only=True, slots=True, frozen=True)
class Lengths:
    """Tokens of a sequence, context and candidate included: their mean, and the mean of their squares."""

    mean: float
    mean_square: float

    @staticmethod
    def of(histories: list[int]) -> "Lengths":
        """Returns the lengths of sequences with these numbers of events in their histories."""
        tokens = [events + OWN_TOKENS for events in histories]
        return Lengths(mean=sum(tokens) / len(tokens), mean_square=sum(n * n for n in tokens) / len(tokens))


EARLY = Lengths(mean=2082, mean_square=2302**2)
"""Lengths in Yambda's first windows, derived from the share of padding in the reference's logs."""
LATER = Lengths(mean=2663, mean_square=2944**2)
"""Lengths in the windows in which runs reach the target."""
LONGEST = Lengths(mean=4096, mean_square=4096**2)
"""Lengths that the reference's README assumes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Flop:
    """Operations of one sample, by part."""

    preprocessor: float
    """MLPs of item, artist and album, action; weights of the context."""
    linear: float
    """Products of the layers with their weights."""
    attention: float
    head: float
    """Postprocessor, the candidate's MLP and the head."""

    @property
    def total(self) -> float:
        return self.preprocessor + self.linear + self.attention + self.head


def flop_per_sample(
    model: ModelConfig,
    lengths: Lengths,
    *,
    trained: bool = True,
    last_layer_candidates: bool = False,
    content_rows: float | None = None,
) -> Flop:
    """Returns the operations of one sample.

    trained: forward and backward pass; otherwise forward only. last_layer_candidates: the last layer computes keys and
    values for all tokens, and everything else only for the candidates, whose outputs are the only ones read.
    content_rows: rows per sample of the preprocessor's MLPs, if each distinct row is computed once; by default the
    events of a history and its candidate.
    """
    width, inner, columns = model.width, model.inner, model.embedding_dim
    hidden = model.preprocessor_hidden
    times = _TRAINED if trained else 1
    attention_times = _ATTENTION_TRAINED if trained else _ATTENTION_FORWARD
    rows = lengths.mean - CONTEXT_TOKENS if content_rows is None else content_rows
    inputs = columns + len(EVENT_TABLES[1:]) * columns + len(ACTION_BITS) * model.action_dim
    content = rows * (inputs * hidden + 3 * hidden * width)  # three MLPs
    uvqk, output = width * 4 * inner, 3 * inner * width
    pairs = lengths.mean_square / 2
    linear, seen = model.layers * lengths.mean * (uvqk + output), model.layers * pairs
    if last_layer_candidates:
        linear -= lengths.mean * (uvqk + output) - (lengths.mean * width * 2 * inner + width * 2 * inner + output)
        seen -= pairs - lengths.mean
    item = len(EVENT_TABLES) * columns * model.head_hidden + model.head_hidden * width
    head = (width + 4) * width + item + width * model.head_hidden + model.head_hidden
    return Flop(
        preprocessor=2.0 * times * (content + CONTEXT_TOKENS * columns * width),
        linear=2.0 * times * linear,
        attention=2.0 * attention_times * inner * seen,
        head=2.0 * times * head,
    )


def dense_weights(model: ModelConfig) -> int:
    """Returns the number of weights of the dense network (15.2 million in the benchmark)."""

    def mlp(inputs: int, hidden: int, outputs: int) -> int:
        return inputs * hidden + 3 * hidden + hidden * outputs + 3 * outputs

    width, inner, columns = model.width, model.inner, model.embedding_dim
    hidden, actions = model.preprocessor_hidden, len(ACTION_BITS) * model.action_dim
    preprocessor = mlp(columns, hidden, width) + mlp(2 * columns, hidden, width) + mlp(actions, hidden, width)
    preprocessor += 2 * actions + CONTEXT_TOKENS * (columns + 1) * width
    buckets = (model.position_buckets + model.time_buckets + 1) * width
    layer = 2 * width + (width + 1) * 4 * inner + 2 * inner + 3 * inner * width
    postprocessor = (width + 4) * width + 3 * width
    item = mlp(len(EVENT_TABLES) * columns, model.head_hidden, width)
    head = mlp(width, model.head_hidden, 1) - 2  # no norm at its end
    return preprocessor + buckets + model.layers * layer + postprocessor + item + head


def lookups_per_sample(model: ModelConfig, lengths: Lengths) -> float:
    """Returns the number of rows of tables that a sample names, with repetitions."""
    return len(EVENT_TABLES) * (lengths.mean - CONTEXT_TOKENS) + CONTEXT_TOKENS


@dataclass(kw_only=True, slots=True, frozen=True)
class TableBytes:
    """Bytes that the tables' part of an iteration moves, on one GPU and over its links."""

    lookup: float
    """Device memory: rows read and written as embeddings."""
    update: float
    """Device memory: gradients read; rows and their states read and written."""
    exchange: float
    """Links: rows to their users and gradients back, if no row is used on its own rank."""


def table_bytes(model: ModelConfig, rows: float) -> TableBytes:
    """Returns the bytes of `rows` fp32 rows: one row per lookup (lookups_per_sample), or each distinct row once."""
    row = _FP32 * model.embedding_dim
    return TableBytes(
        lookup=2 * rows * row,
        update=rows * (row + 2 * (row + _ADAGRAD_STATE)),
        exchange=2 * rows * row,
    )


def activation_bytes(model: ModelConfig, tokens: float, *, recompute: bool, number_bytes: int = 2) -> float:
    """Returns the bytes that fused layers (fused_stu.py) keep for the backward pass of a batch of this many tokens.

    Each layer keeps its input and its attention, and its projection unless recompute; a last layer for candidates keeps
    its input, and keys and values unless recompute. number_bytes: of an activation.
    """
    numbers = model.layers * (model.width + model.inner + (0 if recompute else 4 * model.inner))
    if model.last_layer == "candidates":
        numbers -= model.inner + (0 if recompute else 2 * model.inner)
    return numbers * tokens * number_bytes


def memory_bytes(model: ModelConfig) -> dict[str, int]:
    """Returns the bytes of weights and optimizer states over all ranks' tables, and of one rank's dense network: fp32
    weights and gradients, two states of Adam."""
    rows = sum(table.rows for table in tables(model))
    return {
        "tables": model.table_bytes,
        "table_states": rows * _ADAGRAD_STATE,
        "dense": 4 * _FP32 * dense_weights(model),
    }
