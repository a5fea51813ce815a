"""The configuration of DLRM-DCNv2: its model, its data and its optimizer.

A field's docstring is its help text. Errors name the flag to change.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlrm_bench.dlrm.config import TrainingConfig, check_learning_rate, require
from dlrm_bench.dlrm.data.batch_fields import Field
from dlrm_bench.dlrm.optimizers import SGD, Adagrad, RowWiseAdagrad, TableOptimizer
from dlrm_bench.dlrm.tables.id_statistics import IdStatistics
from dlrm_bench.dlrm.tables.tables import Tables

DataSource = Literal["random", "multi_hot", "one_hot"]
RandomIds = Literal["expanded", "uniform"]
TableOptimizerName = Literal["adagrad", "rowwise_adagrad", "sgd"]


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig:
    """DLRM-DCNv2: one embedding table per categorical feature, a bottom MLP, a low-rank cross network, a top MLP."""

    num_embeddings: tuple[int, ...]
    """Rows of each embedding table, before table_scale; with raw_ids, the expected number of distinct ids, which bounds
    nothing: it determines the range of initial weights and the plan."""
    multi_hot_sizes: tuple[int, ...]
    """Ids per sample of each categorical feature (fixed: MLPerf's multi-hot sizes)."""
    table_scale: float = 1.0
    """Factor on every table's number of rows, rounded up to at least one; values below 1 fit the tables on smaller
    GPUs, values above 1 make larger tables, of fewer than 2^31 rows each."""
    raw_ids: bool = False
    """Ids are 64-bit numbers of any value, such as hashes of strings, instead of row numbers of tables of a declared
    size: a row is created when its id is first named. Needs --pipeline static with --dynamic-rows, and data with int64
    ids."""
    embedding_dim: int = 128
    """Columns of every embedding table."""
    dense_in_features: int = 13
    """Dense features per sample."""
    bottom_mlp: tuple[int, ...] = (512, 256, 128)
    """Layer widths of the bottom MLP; the last one must equal embedding_dim."""
    cross_layers: int = 3
    """Layers of the cross network."""
    cross_rank: int = 512
    """Rank of each cross layer's two factors."""
    top_mlp: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    """Layer widths of the top MLP; the last one must be 1, the logit."""

    def __post_init__(self) -> None:
        require(len(self.num_embeddings) > 0, "--model.num-embeddings: at least one table is needed")
        require(
            len(self.num_embeddings) == len(self.multi_hot_sizes),
            f"--model.num-embeddings has {len(self.num_embeddings)} tables and --model.multi-hot-sizes "
            f"{len(self.multi_hot_sizes)}: give one size for each table",
        )
        for flag in ("num_embeddings", "multi_hot_sizes", "bottom_mlp", "top_mlp"):
            values = getattr(self, flag)
            require(
                len(values) > 0 and min(values) > 0, f"--model.{flag.replace('_', '-')}: every number must be positive"
            )
        for flag in ("embedding_dim", "dense_in_features", "cross_layers", "cross_rank"):
            require(getattr(self, flag) > 0, f"--model.{flag.replace('_', '-')} must be positive")
        require(
            self.embedding_dim % 4 == 0,
            f"--model.embedding-dim is {self.embedding_dim}: FBGEMM's kernels need a multiple of 4",
        )
        require(0 < self.table_scale < 2**31, f"--model.table-scale is {self.table_scale}: choose 0 < scale < 2^31")
        require(
            max(self.rows) < 2**31,
            f"--model.num-embeddings with --model.table-scale {self.table_scale:g} makes a table of {max(self.rows)} "
            "rows: they are counted with 32 bits, so choose fewer than 2^31",
        )
        require(
            self.bottom_mlp[-1] == self.embedding_dim,
            f"--model.bottom-mlp ends in {self.bottom_mlp[-1]}: its last width must be "
            f"--model.embedding-dim ({self.embedding_dim})",
        )
        require(self.top_mlp[-1] == 1, f"--model.top-mlp ends in {self.top_mlp[-1]}: its last width must be 1")

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each table as built, after table_scale."""
        return tuple(max(1, math.ceil(rows * self.table_scale)) for rows in self.num_embeddings)

    @property
    def tables(self) -> Tables:
        """The embedding tables as built."""
        return Tables(
            names=self.feature_names,
            rows=self.rows,
            columns=self.embedding_dim,
            hot=self.multi_hot_sizes,
            scale=self.table_scale,
            raw_ids=self.raw_ids,
        )

    @property
    def batch_fields(self) -> tuple[Field, ...]:
        """The fields of a batch, in their order in its buffer."""
        return (
            Field("dense", "float32", self.dense_in_features),
            Field("labels", "float32", 1),
            Field("ids", "int64" if self.raw_ids else "int32", self.ids_per_sample),
        )

    @property
    def num_features(self) -> int:
        """Number of categorical features, which is the number of tables."""
        return len(self.num_embeddings)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """KJT keys in table order, with the MLPerf reference's names."""
        return tuple(f"cat_{feature}" for feature in range(self.num_features))

    @property
    def ids_per_sample(self) -> int:
        """Number of ids per sample over all features (214 in the MLPerf model)."""
        return sum(self.multi_hot_sizes)


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig:
    """The source of the samples."""

    source: DataSource = "random"
    """random: in-memory batches for latency runs. multi_hot: MLPerf's day files; with --model.raw-ids, the same with
    int64 ids. one_hot: day files with one id per feature, expanded by MLPerf's seeded tables."""
    path: Path | None = None
    """Directory of the day files; required unless source is random."""
    train_days: int = 23
    """Days 0 to train_days - 1 train; the first half of day train_days evaluates (MLPerf: 23)."""
    prefetch_batches: int = 16
    """Batches that the reader threads keep ready in pinned memory, ahead of the GPU."""
    reader_threads: int = 2
    """Threads of each rank that read day files; a thread is idle while enough batches are ready."""
    random_batches: int = 32
    """Number of distinct batches of source random; they are drawn before the run and reused in turn."""
    random_skew: float = 1.05
    """Zipf exponent of a feature's first id under source random; random_ids sets the other ids."""
    random_ids: RandomIds = "expanded"
    """Ids of a feature after the first, under source random. expanded: a fixed function of the first id, as in MLPerf's
    files, so that they repeat as often as the first id. uniform: drawn independently for each sample, which gives about
    twice as many distinct rows (MLPerf's model, 55296 samples of skew 1.05: 8.5 instead of 4.2 million)."""

    def __post_init__(self) -> None:
        if self.source != "random":
            require(
                self.path is not None,
                f"--data.path is missing: --data.source {self.source} reads day files from a directory",
            )
        for flag in ("train_days", "prefetch_batches", "reader_threads", "random_batches"):
            require(getattr(self, flag) > 0, f"--data.{flag.replace('_', '-')} must be positive")
        require(0 <= self.random_skew < math.inf, "--data.random-skew must be finite and not negative")

    @property
    def batches_in_memory(self) -> tuple[int, str]:
        """Number of batches that a rank holds in host memory, and the flag that sets it."""
        if self.source == "random":
            return self.random_batches, "--data.random-batches"
        return self.prefetch_batches, "--data.prefetch-batches"

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """Names of the fields that determine the samples and their order."""
        return ("source", "train_days", "random_batches", "random_skew", "random_ids")

    @property
    def steps_depend_on_batch(self) -> bool:
        """False: samples follow one another."""
        return False

    @property
    def is_random(self) -> bool:
        """Whether batches are random, unlimited in number, and have labels that no model can learn."""
        return self.source == "random"

    @property
    def id_statistics(self) -> IdStatistics:
        """Statistics of how often the ids of a run's batches name the same rows. Files are assumed to be distributed
        like random batches: expanded ids of skewed first ids."""
        expanded = self.source != "random" or self.random_ids == "expanded"
        return IdStatistics(skew=self.random_skew, expanded=expanded)


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerConfig:
    """Element-wise Adagrad on dense weights and, for MLPerf, on tables; MLPerf fixes all but the learning rate."""

    embedding: TableOptimizerName = "adagrad"
    """Optimizer of the tables. adagrad: element-wise, MLPerf's. rowwise_adagrad: one state per row, from the mean of
    its squared gradients. sgd: no state."""
    learning_rate: float = 0.004
    """Constant learning rate of tables and dense weights."""
    eps: float = 1e-8
    """Adagrad's epsilon."""

    def __post_init__(self) -> None:
        check_learning_rate(self.learning_rate)
        require(0 < self.eps < math.inf, "--optimizer.eps must be finite and positive")
        # 0 divided by a smaller eps is NaN in float32; by a subnormal eps, it is NaN on some GPUs' fast paths.
        require(
            2**-126 <= self.eps < 2**128,
            f"--optimizer.eps is {self.eps}: it must be a normal float32 number, 1.2e-38 to 3.4e38, because gradients "
            "of 0 are divided by it",
        )

    def rate(self, iteration: int) -> None:
        """Returns None: the learning rate is constant, as MLPerf's is."""

    @property
    def tables(self) -> TableOptimizer:
        """The optimizer of the tables, as a value."""
        if self.embedding == "sgd":
            return SGD()
        return Adagrad(self.eps) if self.embedding == "adagrad" else RowWiseAdagrad(self.eps)


DcnTraining = TrainingConfig[ModelConfig, DataConfig, OptimizerConfig]
"""The training configuration of DLRM-DCNv2."""
