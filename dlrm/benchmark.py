"""A benchmark as a value: one object beside each model, with everything that the harness needs from the model.

The training loop, the clock, the log, ladders, limits and reports know this type and no model. It needs no torch, so
that records can be read, compared and reported without it; `parts` imports the modules that train.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dlrm_bench.dlrm.config import TrainingConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dlrm_bench.dlrm.data.dataset import Dataset, FileContent, HostBatch
    from dlrm_bench.dlrm.dense.static_dense import StaticDense
    from dlrm_bench.dlrm.dense.static_sequences import StaticSequences
    from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
    from dlrm_bench.dlrm.runtime.ranks import Ranks
    from dlrm_bench.dlrm.torchrec_model import TorchRecModel


class Piece(NamedTuple):
    """Work of one iteration on one rank; amounts are FLOP and bytes."""

    name: str
    stage: str
    """A stage of kernels.stages.STAGES, or a description of several."""
    flop: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    """Bytes that leave the rank for other GPUs of its node."""
    pcie: float = 0.0
    waits: bool = False
    """Whether the next piece with `waits` cannot begin before this one has ended: these pieces form a chain, whose
    times add up."""


SampleSizes = Mapping[str, float]
"""Per-sample means of quantities that an iteration's work depends on and its configuration does not determine, such as
history lengths; the benchmark chooses the names. Empty if none were measured."""
UNMEASURED: SampleSizes = MappingProxyType({})


class TableWork(NamedTuple):
    """A rank's share of the bytes and elements that an iteration's table work moves."""

    ids: float
    """Ids that the rank sends to the owners of their tables."""
    vectors: float
    """Numbers that come back, and whose gradients are sent."""
    lookup: float
    """Bytes of device memory read and written by the lookup."""
    update: float
    """Bytes of device memory read and written by the table update."""


class Work(Protocol):
    """The computation and traffic of an iteration, from its configuration and the sizes of its samples."""

    def dense_weights(self, config: TrainingConfig) -> int:
        """Returns the number of weights and biases of the dense network."""
        ...

    def products(
        self, config: TrainingConfig, samples: int, sizes: SampleSizes = UNMEASURED
    ) -> dict[str, tuple[int, int, int]]:
        """Returns (M, N, K) of every matrix product of an iteration on `samples` samples, by name."""
        ...

    def table_work(
        self, config: TrainingConfig, samples: int, vector_bytes: int, sizes: SampleSizes = UNMEASURED
    ) -> TableWork:
        """Returns the table work's traffic for `samples` samples, assuming that caches hold nothing.

        vector_bytes: bytes of one element of a looked-up vector, or of its gradient."""
        ...

    def flop_per_sample(self, config: TrainingConfig, sizes: SampleSizes = UNMEASURED) -> float:
        """Returns the floating-point operations of training on one sample, excluding table lookups."""
        ...

    def pieces(
        self, config: TrainingConfig, world_size: int, cache_bytes: float, sizes: SampleSizes = UNMEASURED
    ) -> list[Piece]:
        """Returns the pieces of an iteration on one rank with an equal share of all work. cache_bytes: bytes that the
        GPU's cache keeps between uses."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Iterations at which a run to a target AUC evaluates."""

    every: int
    first: int
    """A multiple of `every`: earlier evaluations are skipped."""
    at_end: bool
    """Whether a run evaluates after its last iteration, whatever the cadence."""


def parts_of_epoch(train_samples: int, global_batch_size: int, evaluations: int) -> Evaluations:
    """Returns MLPerf's cadence up to v6.0: every floor(train samples / (evaluations * global batch)) iterations."""
    every = max(1, train_samples // (evaluations * global_batch_size))
    return Evaluations(every=every, first=every, at_end=True)


class Published(NamedTuple):
    """A published MLPerf result, from its logs."""

    system: str
    source: str
    global_batch_size: int
    ms_per_iteration: float
    """Milliseconds an iteration, without evaluation."""
    minutes: float | None
    """Minutes from run_start to the target; None if no whole run is published."""
    eval_seconds: float | None = None
    """Seconds of one evaluation."""


class ToTarget(NamedTuple):
    """A run to the target at one global batch size: the mean of the reference's runs, and the rules' evaluations."""

    samples: float
    """Samples that it trains on."""
    evaluations: float
    """Evaluations that the rules ask for."""
    skipped: int
    """Earlier points of the grid of evaluations, at which the rules ask for none."""


class ManyRanks(NamedTuple):
    """A training on many ranks, beside one on few ranks whose samples were measured."""

    rows: float
    """Distinct rows that a rank's batch names, over those that were measured."""
    imbalance: float
    """Share by which the operations of the most loaded rank exceed the mean of all ranks."""
    of_run: float
    """Operations of a sample, mean over a run to the target, over those of a sample that was measured."""
    of_evaluation: float
    """Operations of an evaluated sample, over those of training on a sample that was measured."""
    evaluated: int
    """Samples of an evaluation."""
    to_target: ToTarget | None
    """None if the reference's convergence at this global batch is unknown."""
    assumed: str
    """Assumptions and known errors of these figures, in words."""


class SubmissionWords(NamedTuple):
    """A benchmark's wording for the files that a submission needs besides the source code."""

    folder: str
    """The benchmark's folder in dlrm/, with data/preprocess.py, data/dataset.py and network.py."""
    raw: str
    """The data that preprocessing starts from."""
    order: str
    """The order in which a run reads its samples."""
    data_flags: str
    """Flags of `dlrm-bench data` that select the benchmark, followed by a space; empty for the default one."""


class Ruleset(Protocol):
    """MLPerf's rules for a benchmark: the content of its log, and the values that the closed division fixes."""

    @property
    def version(self) -> str:
        """The ruleset of mlperf_logging's checkers for this benchmark's logs: the newest of `versions`."""
        ...

    @property
    def versions(self) -> tuple[str, ...]:
        """All rulesets that include the benchmark."""
        ...

    @property
    def target_auc(self) -> float:
        """The AUC that a run of the closed division must reach."""
        ...

    @property
    def train_samples(self) -> int:
        """Number of training samples in MLPerf's data."""
        ...

    @property
    def counts_samples(self) -> bool:
        """Whether logs count samples and have one block between evaluations; otherwise they give the fraction of the
        epoch, and one epoch."""
        ...

    @property
    def reference_names(self) -> tuple[str, ...]:
        """Other names of the same benchmark in published logs."""
        ...

    @property
    def pinned_to_data(self) -> frozenset[str]:
        """Keys whose values must be those of MLPerf's own data, in the open division too."""
        ...

    @property
    def published(self) -> tuple[Published, ...]:
        """Published results, computed as bench/mlperf/published_logs.py does."""
        ...

    @property
    def published_caveats(self) -> tuple[str, ...]:
        """Reasons why other runs do not compare with published results, in sentences for a page."""
        ...

    @property
    def submission_words(self) -> SubmissionWords:
        """Words for the files of a submission."""
        ...

    def hyperparameters(
        self, config: TrainingConfig, global_batch_size: int, train_samples: int, eval_samples: int
    ) -> list[tuple[str, Any]]:
        """Returns the keys and values to log before init_stop, in their order."""
        ...

    def obstacles(self, config: TrainingConfig, run: Mapping[str, Any], data: "Dataset") -> Iterator[str]:
        """Yields the reasons, in words, why a run is not valid in the closed division. run: the other fields of its
        configuration, and global_batch_size."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticDenseOptions:
    """The options of the static pipeline that its stage 3 depends on."""

    eight_bits: bool
    """Whether the largest products have 8-bit factors (--fp8)."""
    peer_memory: bool
    """Whether ranks exchange gradients and weights through peer memory."""
    may_go_in_parts: bool
    """Whether the embedding stages can process the batch in several parts."""


class Parts(Protocol):
    """Data and models of a benchmark; importing it imports torch."""

    def open_data(self, config: TrainingConfig) -> "Dataset":
        """Opens and checks the data; ValueError names the bad file or flag."""
        ...

    def data_content(self, config: TrainingConfig) -> "dict[str, FileContent]":
        """Returns the fingerprints of the files that a run reads, by name; empty without files."""
        ...

    def batch_bytes(self, config: TrainingConfig) -> int:
        """Returns the bytes of a rank's batch in host memory."""
        ...

    def empty_batch(self, config: TrainingConfig, pin: bool) -> "HostBatch":
        """Returns a batch of uninitialised host memory. pin: page-locked."""
        ...

    def static_dense(
        self, config: TrainingConfig, options: StaticDenseOptions, ranks: "Ranks", memory: "PeerMemory | None"
    ) -> "StaticDense":
        """Returns stage 3 of the static pipeline, if that trains this benchmark. memory: given if the options request
        peer memory. Collective."""
        ...

    def static_sequences(
        self, config: TrainingConfig, options: StaticDenseOptions, ranks: "Ranks"
    ) -> "StaticSequences":
        """Returns stage 3 of the static pipeline, if that trains this benchmark and its tables are not pooled.
        Collective."""
        ...

    def torchrec_model(self, config: TrainingConfig, ranks: "Ranks") -> "TorchRecModel":
        """Returns the unsharded model for the pipelines over TorchRec's modules; imports torchrec."""
        ...


DataCommand = Callable[[str, str | None, Sequence[str]], int]
"""Runs a command of `dlrm-bench data`, such as generate, with the given preset and the remaining words; returns the
exit status."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One variant of a ladder: its name, its flags of launch/dlrm.py, and its change, in a sentence."""

    name: str
    flags: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named complete configuration."""

    training: TrainingConfig
    text: str
    """Its purpose, in a sentence."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Fields of bench.config.RunConfig that differ from their defaults."""
    division: str = "open"
    """The MLPerf division that its runs request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A model with its data, presets, ladders, rules and work."""

    name: str
    """Its name in records, and in MLPerf's logs if it is one of MLPerf's."""
    title: str
    """Its name in pages and tables."""
    presets: Mapping[str, Preset]
    ladders: Mapping[str, tuple[Rung, ...]]
    """Built-in ladders by name, the first rung first."""
    pipelines: tuple[str, ...]
    """Names of the pipelines that train it, as --pipeline takes them."""
    ruleset: Ruleset | None
    """None if MLPerf has no rules for it."""
    work: Work | None
    """None if its work is not counted."""
    parts: Callable[[], Parts]
    """Imports the modules that train it."""
    data_command: DataCommand | None = None
    """Generates and checks its data; None if it uses no files."""
    cadence: Callable[[int, int, int], Evaluations] = parts_of_epoch
    """Evaluations of a run to a target, from the training samples of an epoch, the global batch size and
    --evaluations-per-epoch."""
    sample_sizes: "Callable[[Dataset, TrainingConfig, int, range], SampleSizes] | None" = None
    """Measures the sizes of the samples that a world size trains on in a range of iterations, counted from 0; None if
    the configuration determines everything that `work` needs."""
    many_ranks: Callable[[TrainingConfig, SampleSizes, int, int], ManyRanks] | None = None
    """Returns the figures of a configuration on many ranks, for tables that are not pooled: from the configuration, the
    sizes of samples that were measured, the number of ranks they were measured on, and the number of ranks. ValueError
    for a configuration whose runs to the target are unknown. None if `dlrm-bench scale` does not need it or does not
    know the benchmark."""
    activation_bytes: Callable[[TrainingConfig], Mapping[str, float]] | None = None
    """Returns the bytes of a rank's activations that are kept for the backward pass, by the flags that decide on them,
    in words; None if they are not counted."""
    table_ids: "Callable[[TrainingConfig, HostBatch], Sequence[NDArray[np.int32]]] | None" = None
    """Returns the ids that a batch looks up in each table, [any]; None if the model derives ids from the batch."""
    check_static: Callable[[TrainingConfig, StaticDenseOptions], None] | None = None
    """Raises ValueError, naming the flag, if the static pipeline's stage 3 cannot train a configuration; None if the
    static pipeline does not train the benchmark."""
    static_parts: Callable[[int, StaticDenseOptions], int] | None = None
    """The number of parts in which the static pipeline processes a local batch of this size from lookup to gradients;
    None if it does not train the benchmark."""

    @property
    def option_types(self) -> dict[str, type]:
        """The dataclass of each benchmark-specific block of the configuration, by the block's name."""
        default = next(iter(self.presets.values())).training
        return {block: type(getattr(default, block)) for block in ("model", "data", "optimizer")}

    def restored(self, config: Mapping[str, Any]) -> TrainingConfig:
        """Returns the training configuration of a record's config, ignoring fields that this version does not know."""
        options = {block: _restored(kind, config.get(block, {})) for block, kind in self.option_types.items()}
        known = {name: config[name] for name in ("local_batch_size", "precision", "seed") if name in config}
        return TrainingConfig(**options, **known)


def _restored(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Returns a dataclass from a record's values; lists become tuples."""
    known = kind.__dataclass_fields__
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
    return kind(**given)
