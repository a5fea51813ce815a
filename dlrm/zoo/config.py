"""Configurations of the TorchRec models: their sizes, their random data, their optimizers.

A field's docstring is its help text. Errors name the flag to change.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlrm_bench.dlrm.config import require
from dlrm_bench.dlrm.optimizers import SGD, Adagrad, RowWiseAdagrad, TableOptimizer
from dlrm_bench.dlrm.tables.id_statistics import UNIFORM, IdStatistics
from dlrm_bench.dlrm.tables.tables import Tables


@dataclass(kw_only=True, slots=True, frozen=True)
class BagsModel:
    """A model with two kinds of categorical features, of users and of items, each with its own table, and with dense
    features."""

    rows: int = 100_000
    """Number of rows of each embedding table, before table_scale."""
    table_scale: float = 1.0
    """Factor on every table's number of rows, rounded up to at least one."""
    embedding_dim: int = 64
    """Number of columns of every embedding table."""
    user_features: int = 8
    """Number of categorical features of a user."""
    item_features: int = 8
    """Number of categorical features of an item."""
    multi_hot_size: int = 2
    """Number of ids per sample of each categorical feature."""
    dense_in_features: int = 13
    """Number of dense features per sample."""

    def __post_init__(self) -> None:
        _require_positive(self, "rows", "user_features", "item_features", "multi_hot_size", "dense_in_features")
        require(self.rows < 2**31, f"--model.rows is {self.rows}: keep it below 2^31")
        require(
            self.embedding_dim > 0 and self.embedding_dim % 4 == 0,
            f"--model.embedding-dim is {self.embedding_dim}: FBGEMM's kernels need a multiple of 4",
        )
        require(0 < self.table_scale <= 1, f"--model.table-scale is {self.table_scale}: choose 0 < scale <= 1")

    @property
    def rows_built(self) -> int:
        """Number of rows of each table as built, after table_scale."""
        return max(1, math.ceil(self.rows * self.table_scale))

    @property
    def user_names(self) -> tuple[str, ...]:
        """Names of the users' features."""
        return tuple(f"u{i}" for i in range(self.user_features))

    @property
    def item_names(self) -> tuple[str, ...]:
        """Names of the items' features."""
        return tuple(f"i{i}" for i in range(self.item_features))

    @property
    def bag_names(self) -> tuple[str, ...]:
        """Names of the pooled features, in batch order."""
        return (*self.user_names, *self.item_names)

    @property
    def longest_history(self) -> int:
        """Number of ids of the longest history; 0 for a model without histories."""
        return 0

    @property
    def shortest_history(self) -> int:
        """Number of ids of the shortest history: a fifth of the longest."""
        return self.longest_history // 5

    @property
    def tables(self) -> Tables:
        """The embedding tables as built."""
        return self._tables(self.bag_names, ())

    def _tables(self, bags: tuple[str, ...], sequences: tuple[str, ...]) -> Tables:
        return Tables(
            names=(*sequences, *bags),
            rows=(self.rows_built,) * (len(bags) + len(sequences)),
            columns=self.embedding_dim,
            hot=(self.longest_history,) * len(sequences) + (self.multi_hot_size,) * len(bags),
            scale=self.table_scale,
            whole=True,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class DlrmModel(BagsModel):
    """torchrec.models.dlrm.DLRM: dot products of all pairs of vectors."""

    dense_hidden: tuple[int, ...] = (256,)
    """Widths of the bottom MLP's hidden layers; its last layer is as wide as the tables."""
    over_hidden: tuple[int, ...] = (256, 128)
    """Widths of the top MLP's hidden layers; its last layer outputs the logit."""

    def __post_init__(self) -> None:
        BagsModel.__post_init__(self)
        for flag in ("dense_hidden", "over_hidden"):
            positive = all(width > 0 for width in getattr(self, flag))
            require(positive, f"--model.{flag.replace('_', '-')}: every number must be positive")
        require(len(self.over_hidden) > 0, "--model.over-hidden is empty: TorchRec's top MLP needs a hidden layer")


@dataclass(kw_only=True, slots=True, frozen=True)
class DlrmDcnModel(DlrmModel):
    """torchrec.models.dlrm.DLRM_DCN: a low-rank cross network."""

    cross_layers: int = 3
    """Number of layers of the cross network."""
    cross_rank: int = 128
    """Rank of each cross layer's two factors."""

    def __post_init__(self) -> None:
        DlrmModel.__post_init__(self)
        _require_positive(self, "cross_layers", "cross_rank")


@dataclass(kw_only=True, slots=True, frozen=True)
class DlrmProjectionModel(DlrmModel):
    """torchrec.models.dlrm.DLRM_Projection: dot products of two projections."""

    projected: int = 4
    """Number of vectors of each projection."""

    def __post_init__(self) -> None:
        DlrmModel.__post_init__(self)
        _require_positive(self, "projected")


@dataclass(kw_only=True, slots=True, frozen=True)
class DeepFmModel(BagsModel):
    """torchrec.models.deepfm.SimpleDeepFMNN: a factorisation machine beside an MLP."""

    hidden: int = 256
    """Width of the bottom MLP's hidden layer."""

    def __post_init__(self) -> None:
        BagsModel.__post_init__(self)
        _require_positive(self, "hidden")


@dataclass(kw_only=True, slots=True, frozen=True)
class TwoTowersModel(BagsModel):
    """Two EmbeddingBagCollections, each with an MLP, and the dot product of the MLPs' outputs."""

    hidden: int = 256
    """Width of each MLP's hidden layer."""

    def __post_init__(self) -> None:
        BagsModel.__post_init__(self)
        _require_positive(self, "hidden")


@dataclass(kw_only=True, slots=True, frozen=True)
class SequenceModel(BagsModel):
    """Layers of causal attention over a history (an EmbeddingCollection), as in SASRec (Kang and McAuley 2018, arXiv
    1808.09781), and a tower over the item's features (an EmbeddingBagCollection)."""

    hidden: int = 256
    """Width of the tower's hidden layer."""
    layers: int = 2
    """Number of layers of attention."""
    heads: int = 2
    """Number of heads of each layer; a divisor of embedding_dim."""
    longest: int = 50
    """Number of items in the longest history."""

    def __post_init__(self) -> None:
        BagsModel.__post_init__(self)
        _require_positive(self, "hidden", "layers", "longest")
        require(
            self.heads > 0 and self.embedding_dim % self.heads == 0,
            f"--model.heads is {self.heads}: it must divide --model.embedding-dim, which is {self.embedding_dim}",
        )

    @property
    def longest_history(self) -> int:
        """Number of ids of the longest history."""
        return self.longest

    @property
    def bag_names(self) -> tuple[str, ...]:
        """Names of the items' features only."""
        return self.item_names

    @property
    def tables(self) -> Tables:
        """The embedding tables as built, the histories' table first."""
        return self._tables(self.bag_names, ("history",))


@dataclass(kw_only=True, slots=True, frozen=True)
class RandomData:
    """Random batches, drawn before the run and reused in turn."""

    random_batches: int = 8
    """Number of distinct batches of each rank."""
    prefetch_batches: int = 16
    """Number of batches that the reader thread keeps ready in pinned memory, ahead of the GPU."""
    reader_threads: int = 1
    """Number of threads of each rank that deliver batches."""

    def __post_init__(self) -> None:
        for flag in ("random_batches", "prefetch_batches", "reader_threads"):
            require(getattr(self, flag) > 0, f"--data.{flag.replace('_', '-')} must be positive")

    @property
    def path(self) -> Path | None:
        """None: there are no files."""
        return None

    @property
    def batches_in_memory(self) -> tuple[int, str]:
        """Number of batches that a rank holds in host memory, and the flag that sets it."""
        return self.random_batches, "--data.random-batches"

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """Names of the fields that determine the samples and their order."""
        return ("random_batches",)

    @property
    def steps_depend_on_batch(self) -> bool:
        """False: samples follow one another."""
        return False

    @property
    def is_random(self) -> bool:
        """True: batches have no end, and no samples are kept for an evaluation."""
        return True

    @property
    def id_statistics(self) -> IdStatistics:
        """Statistics of how often the ids of a run's batches name the same rows."""
        return UNIFORM


@dataclass(kw_only=True, slots=True, frozen=True)
class SequenceData(RandomData):
    """Histories drawn at random."""

    full: bool = False
    """Draw only histories of the longest length, so that their input dist can be trimmed; otherwise lengths are uniform
    from a fifth of the longest up to it."""
    padded: bool = False
    """Pad the histories of a batch to one number of ids, for graphs and a trimmed input dist, without effect on the
    training: 16 % of the ids are padding at 64 samples, 2.4 % at 4,096. Not needed for histories of one length."""

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """Names of the fields that determine the samples and their order."""
        return ("random_batches", "full")


@dataclass(kw_only=True, slots=True, frozen=True)
class ZooOptimizer:
    """Adagrad, row-wise Adagrad or SGD on tables, Adam on dense weights."""

    embedding: Literal["adagrad", "rowwise_adagrad", "sgd"] = "adagrad"
    """Optimizer of the tables. adagrad: element-wise. rowwise_adagrad: one state per row, from the mean of its
    squared gradients. sgd: no state."""
    learning_rate: float = 0.02
    """Constant learning rate of the tables."""
    eps: float = 1e-8
    """Epsilon of the tables' Adagrad, and of Adam."""
    dense_learning_rate: float = 1e-3
    """Constant learning rate of Adam."""

    def __post_init__(self) -> None:
        for flag in ("learning_rate", "eps", "dense_learning_rate"):
            value = getattr(self, flag)
            require(
                2**-126 <= value < 2**128,
                f"--optimizer.{flag.replace('_', '-')} is {value}: it must be a positive normal float32 number",
            )

    @property
    def tables(self) -> TableOptimizer:
        """The optimizer of the tables, as a value."""
        if self.embedding == "sgd":
            return SGD()
        return Adagrad(self.eps) if self.embedding == "adagrad" else RowWiseAdagrad(self.eps)

    def rate(self, iteration: int) -> None:
        """Returns None: both rates are constant."""


def _require_positive(model: BagsModel, *flags: str) -> None:
    for flag in flags:
        require(getattr(model, flag) > 0, f"--model.{flag.replace('_', '-')} must be positive")
