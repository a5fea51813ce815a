"""The configuration of DLRMv4 and of its optimizers: frozen dataclasses, one field for each command-line flag.

A field's docstring is its help text. Errors name the flag to change. Defaults are the benchmark's: mlcommons/training,
recommendation/, generative_recommenders/dlrm_v4/configs.py (tables, widths) and train/gin/yambda_5b.gin (optimizers).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from dlrm_bench.dlrm.config import TrainingConfig, require
from dlrm_bench.dlrm.optimizers import RowWiseAdagrad, TableOptimizer
from dlrm_bench.dlrm.tables.id_statistics import UNIFORM, IdStatistics
from dlrm_bench.dlrm.tables.tables import Tables

EVENT_TABLES = ("item_id", "artist_id", "album_id")
"""Tables of which each event of a history, and the candidate, names one row."""
CONTEXT_TABLES = (
    "uid",
    "user_x_artist",
    "user_x_album",
    "user_x_hour",
    "item_x_hour",
    "artist_x_hour",
    "user_x_is_organic",
    "user_x_artist_x_hour",
)
"""Tables of which a sample names one row. Each gives a token; these come before the history in this order."""
CONTEXT_TOKENS = len(CONTEXT_TABLES)
ACTION_BITS = (1, 2, 4)
"""Bits of an event's action: listen+, like, skip."""
OWN_TOKENS = CONTEXT_TOKENS + 1
"""Number of tokens of a sample beside those of its history: context and candidate."""

AttentionScale = Literal["longest", "maximum"]
LastLayer = Literal["all", "candidates"]
DropoutSeed = Literal["rank", "same"]
Deal = Literal["stride", "users"]
Kernels = Literal["plain", "fused"]
Content = Literal["events", "items"]
Network = Literal["own", "reference", "reference-as-shipped"]


class Table(NamedTuple):
    """An embedding table, and the features of a KeyedJaggedTensor that name its rows."""

    name: str
    rows: int
    columns: int
    features: tuple[str, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig:
    """DLRMv4: eleven tables, tokens of context, history and candidate, layers of causal SiLU attention, one logit.

    Two things may differ from the reference on purpose. attention_scale sets the divisor of attention. Dropout masks
    come from torch's generator, in the order of the reference's PyTorch operators, so that equal seeds give equal masks
    with these operators (last_layer all); the reference's Triton kernels draw other masks.
    """

    event_rows: tuple[int, int, int] = (9_390_624, 1_293_395, 3_367_692)
    """Rows of the tables of an event: item, artist, album. Their ids are used as they are, without hashing."""
    context_rows: tuple[int, ...] = (
        1_000_001,
        100_000_000,
        40_000_000,
        24_000_000,
        40_000_000,
        32_000_000,
        2_000_000,
        40_000_000,
    )
    """Rows of the eight tables of context: uid (an id as it is) and seven crosses (hashes modulo the rows)."""
    embedding_dim: int = 512
    """Columns of every table."""
    width: int = 512
    """Width of a token."""
    layers: int = 3
    """STU layers."""
    heads: int = 4
    """Attention heads of a layer."""
    head_width: int = 128
    """Width of queries, keys, values and gates of one head; a power of two from 16 on."""
    preprocessor_hidden: int = 256
    """Hidden width of the three MLPs that make a token: of item, of artist and album, of action."""
    action_dim: int = 8
    """Number of columns of the embedding of one action bit."""
    head_hidden: int = 512
    """Hidden width of the candidate's MLP and of the head."""
    max_history: int = 4086
    """Events in the longest history."""
    position_buckets: int = 8192
    """Rows of the position embedding; positions count from the end of the history."""
    time_buckets: int = 2048
    """Number of buckets of the time embedding, which has one row more: bucket = sqrt(minutes before the query)."""
    input_dropout: float = 0.2
    """Dropout of tokens before the first layer."""
    layer_dropout: float = 0.1
    """Dropout of the input of each layer's output product."""
    loss_weight: float = 0.2
    """Factor of the mean binary cross-entropy."""
    attention_scale: AttentionScale = "longest"
    """Divisor of attention weights. longest: the number of tokens of the longest sequence in this rank's batch, as in
    the reference, so that moving a sample to another rank changes results slightly. maximum: the largest number of
    tokens that --model.max-history allows, the same for every batch and every number of ranks."""
    last_layer: LastLayer = "all"
    """Tokens for which the last layer computes an output. all: every token, as in the reference unless its
    HSTU_LAST_LAYER_TARGETS_ONLY is set. candidates: only the candidates, as no other output is read; keys and values
    are computed for every token. The results are the same, except for dropout masks."""
    dropout_seed: DropoutSeed = "rank"
    """Seeds of dropout. rank: a different seed on each rank. same: one seed on all ranks, so that samples at the same
    position of equally long batches lose the same elements, as in the reference (its DECORRELATE_DROPOUT is 0)."""
    recompute_layers: bool = False
    """Keep only the input of each layer for its backward pass and recompute the rest (torch.utils.checkpoint). Fused
    kernels keep the input and attention, and recompute the projection."""
    kernels: Kernels = "plain"
    """Code that computes tokens, norms, gates and dropout. plain: PyTorch's operators. fused: one forward and one
    backward kernel for each of these, with gradients equal from run to run. Results are the same except for dropout
    masks, which come from a counter whose seed torch's generator draws for each batch. Widths must be powers of two."""
    content: Content = "events"
    """Rows that tables are read for, and that the content of tokens is computed for. events: each distinct event of a
    rank's batch once, even if several samples share it. items: each distinct item of these events once; reader threads
    find the items by a sort, and a token adds its action afterwards. Results are the same up to the order of sums."""
    network: Network = "own"
    """Code that computes the dense network. own: this project's. reference: the modules of MLPerf's reference, with
    Triton kernels tuned on this GPU when they first run. reference-as-shipped: the same modules with the kernel
    settings that the reference ships, for an MI350X. A baseline for the torchrec pipeline; needs --model.reference."""
    reference: Path | None = None
    """Folder recommendation/ of a checkout of mlcommons/training, for --model.network reference."""

    def __post_init__(self) -> None:
        for flag, count in (("event_rows", len(EVENT_TABLES)), ("context_rows", CONTEXT_TOKENS)):
            rows = getattr(self, flag)
            name = f"--model.{flag.replace('_', '-')}"
            require(len(rows) == count, f"{name} has {len(rows)} numbers: give one for each of the {count} tables")
            require(min(rows) > 0, f"{name}: every number must be positive")
            require(
                max(rows) < 2**31, f"{name} has a table of {max(rows)} rows: ids are 32 bits wide, keep it below 2^31"
            )
        for flag in (
            "embedding_dim",
            "width",
            "layers",
            "heads",
            "head_width",
            "preprocessor_hidden",
            "action_dim",
            "head_hidden",
            "max_history",
            "position_buckets",
            "time_buckets",
        ):
            require(getattr(self, flag) > 0, f"--model.{flag.replace('_', '-')} must be positive")
        require(
            self.embedding_dim % 4 == 0,
            f"--model.embedding-dim is {self.embedding_dim}: FBGEMM's kernels need a multiple of 4",
        )
        require(
            self.head_width >= 16 and self.head_width & (self.head_width - 1) == 0,
            f"--model.head-width is {self.head_width}: it must be a power of two from 16 on",
        )
        require(
            self.position_buckets > self.max_history + CONTEXT_TOKENS,
            f"--model.position-buckets is {self.position_buckets}: a history of --model.max-history "
            f"({self.max_history}) events needs more than {self.max_history + CONTEXT_TOKENS}",
        )
        for flag in ("input_dropout", "layer_dropout"):
            rate = getattr(self, flag)
            require(0 <= rate < 1, f"--model.{flag.replace('_', '-')} is {rate}: choose 0 <= rate < 1")
        require(0 < self.loss_weight < math.inf, "--model.loss-weight must be finite and positive")
        require(
            self.attention_scale in ("longest", "maximum"),
            f"--model.attention-scale is {self.attention_scale!r}: choose longest or maximum",
        )
        require(
            self.last_layer in ("all", "candidates"),
            f"--model.last-layer is {self.last_layer!r}: choose all or candidates",
        )
        require(
            self.dropout_seed in ("rank", "same"),
            f"--model.dropout-seed is {self.dropout_seed!r}: choose rank or same",
        )
        require(self.content in ("events", "items"), f"--model.content is {self.content!r}: choose events or items")
        self._check_kernels()
        self._check_network()

    def _check_network(self) -> None:
        networks = ("own", "reference", "reference-as-shipped")
        require(self.network in networks, f"--model.network is {self.network!r}: choose one of {', '.join(networks)}")
        if self.network == "own":
            return
        require(
            self.reference is not None,
            f"--model.network {self.network} needs --model.reference: name the folder recommendation/ of a checkout of "
            "mlcommons/training",
        )
        require(
            self.content == "events",
            f"--model.content {self.content}: the reference makes content of every token; choose events",
        )
        require(
            self.last_layer == "all",
            f"--model.last-layer {self.last_layer}: the reference computes all tokens of its last layer; choose all",
        )

    def _check_kernels(self) -> None:
        require(self.kernels in ("plain", "fused"), f"--model.kernels is {self.kernels!r}: choose plain or fused")
        widths = {
            "width": self.width,
            "heads times --model.head-width": self.inner,
            "preprocessor-hidden": self.preprocessor_hidden,
            "head-hidden": self.head_hidden,
        }
        for flags, width in widths.items():
            require(
                self.kernels == "plain" or (width >= 16 and width & (width - 1) == 0),
                f"--model.kernels fused: --model.{flags} is {width}: its kernels need a power of two from 16 on, or "
                "choose --model.kernels plain",
            )

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence: context, history, candidate (4,095 in the benchmark)."""
        return self.max_history + OWN_TOKENS

    @property
    def inner(self) -> int:
        """Width of queries, keys, values and gates over all heads."""
        return self.heads * self.head_width

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each table, in the order of `tables`."""
        return (*self.event_rows, *self.context_rows)

    @property
    def tables(self) -> Tables:
        """The embedding tables as built. The number of ids per sample is an estimate of the mean: half of the longest
        history, about the mean in Yambda's first windows."""
        events, context = len(EVENT_TABLES), len(CONTEXT_TABLES)
        return Tables(
            names=(*EVENT_TABLES, *CONTEXT_TABLES),
            rows=self.rows,
            columns=self.embedding_dim,
            hot=(self.max_history // 2 + 1,) * events + (1,) * context,
            advice="choose --preset dlrmv4-two-gpus or dlrmv4-one-gpu, or fewer rows (--model.event-rows, "
            "--model.context-rows)",
            pooled=False,
        )

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables in fp32, without optimizer state."""
        return sum(self.rows) * self.embedding_dim * 4


def tables(config: ModelConfig) -> list[Table]:
    """Returns the eleven tables, named as in the reference, those of an event first."""
    names = (*EVENT_TABLES, *CONTEXT_TABLES)
    features: list[tuple[str, ...]] = [(name, f"item_candidate_{name.removeprefix('item_')}") for name in EVENT_TABLES]
    features += [(name,) for name in CONTEXT_TABLES]
    return [
        Table(name, rows, config.embedding_dim, of) for name, rows, of in zip(names, config.rows, features, strict=True)
    ]


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerConfig:
    """Adam on dense weights, row-wise Adagrad on tables, one rate for both; MLPerf fixes all but the rate."""

    learning_rate: float = 1e-6
    """Rate after the ramp. MLPerf's rate is 1e-6 for a global batch of 8,192, proportional to the global batch; 0.5 to
    1.5 times this rate is allowed."""
    ramp_steps: int = 24_000
    """Number of iterations over which the rate rises from 0 in the first iteration; 0 for a constant rate."""
    adam_betas: tuple[float, float] = (0.95, 0.999)
    """Adam's decay of the mean and of the mean square of gradients."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    adagrad_eps: float = 1e-8
    """Row-wise Adagrad's epsilon."""
    clip_norm: float = 1.0
    """Maximum norm of the dense gradient (mean over ranks, all dense weights together); 0 for no limit."""

    def __post_init__(self) -> None:
        require(
            2**-149 <= self.learning_rate < 2**128,
            f"--optimizer.learning-rate is {self.learning_rate}: it must be positive and a number that float32 holds",
        )
        require(self.ramp_steps >= 0, f"--optimizer.ramp-steps is {self.ramp_steps}: it must not be negative")
        require(
            len(self.adam_betas) == 2 and all(0 <= beta < 1 for beta in self.adam_betas),
            f"--optimizer.adam-betas is {self.adam_betas}: give two numbers, 0 <= beta < 1",
        )
        for flag in ("adam_eps", "adagrad_eps"):
            require(0 < getattr(self, flag) < math.inf, f"--optimizer.{flag.replace('_', '-')} must be positive")
        require(
            0 <= self.clip_norm < math.inf,
            f"--optimizer.clip-norm is {self.clip_norm}: it must be finite and not negative",
        )

    @property
    def tables(self) -> TableOptimizer:
        """The optimizer of the tables, as a value."""
        return RowWiseAdagrad(self.adagrad_eps)

    def rate(self, iteration: int) -> float | None:
        """Returns the rate of an iteration, counted from 1: 0 in the first, as the reference counts from 0; None where
        it is constant."""
        return self.rate_after(iteration - 1) if self.ramp_steps else None

    def rate_after(self, trained: int) -> float:
        """Returns the rate of the iteration that comes after `trained` others."""
        if trained >= self.ramp_steps:
            return self.learning_rate
        return self.learning_rate * trained / self.ramp_steps


def mlperf_learning_rate(global_batch_size: int) -> float:
    """Returns the base rate of the reference's convergence points: 1e-6 at 8,192 samples, linear in the batch."""
    return 1e-6 * global_batch_size / 8192


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig:
    """The source of the samples: a folder of events, Yambda's or generated, and its training windows."""

    path: Path = Path("data/yambda")
    """Folder with processed_5b/hstu_cache_L*/ and shared_metadata/: MLCommons' download, the output of `dlrm-bench data
    preprocess`, or that of `data generate`. The last window evaluates."""
    train_windows: int | None = None
    """Number of training windows, from the first one on; by default all but the last."""
    deal: Deal = "stride"
    """Assignment of a global batch's samples to the ranks. stride: rank r gets every world_size-th sample from the r-th
    on, as in the reference. users: each rank gets neighbouring samples of few users, so that it reads fewer rows; its
    sums of tokens and of their squares exceed the mean by 3 % at most, if possible. Steps keep their samples."""
    drop_last_evaluation: bool = True
    """Drop the last samples of an evaluation that do not fill a global batch, as the reference does: with a global
    batch of 4,096, 2,012 of the 2,058,204 samples that it logs. Otherwise every sample counts."""
    prefetch_batches: int = 4
    """Batches that the reader threads keep ready in pinned memory, ahead of the GPU."""
    reader_threads: int = 2
    """Threads of each rank that build batches; a thread is idle while enough batches are ready."""

    def __post_init__(self) -> None:
        for flag in ("prefetch_batches", "reader_threads"):
            require(getattr(self, flag) > 0, f"--data.{flag.replace('_', '-')} must be positive")
        require(self.deal in ("stride", "users"), f"--data.deal is {self.deal!r}: choose stride or users")
        require(
            self.train_windows is None or self.train_windows > 0,
            f"--data.train-windows is {self.train_windows}: it must be positive",
        )

    @property
    def batches_in_memory(self) -> tuple[int, str]:
        """Number of batches that a rank holds in host memory, and the flag that sets it."""
        return self.prefetch_batches, "--data.prefetch-batches"

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """Names of the fields that determine the samples and their order."""
        return ("train_windows",)

    @property
    def steps_depend_on_batch(self) -> bool:
        """True: each window leaves out the samples that fill no global batch."""
        return True

    @property
    def is_random(self) -> bool:
        """Whether batches are drawn at random: never."""
        return False

    @property
    def id_statistics(self) -> IdStatistics:
        """Ids as if drawn anew from all rows. Neighbouring samples of a user share nearly all of theirs, so the true
        number of distinct rows is far smaller."""
        return UNIFORM


Dlrmv4Training = TrainingConfig[ModelConfig, DataConfig, OptimizerConfig]
"""The training configuration of DLRMv4. Precision: the number format of tokens and of the products that make and
transform them, bf16 in MLPerf's; weights, tables, the candidate's MLP and the head are always fp32."""
