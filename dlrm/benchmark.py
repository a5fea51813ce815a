"""A benchmark as a value: everything that the harness asks of a model, one object beside that model.

The training loop, the clock, the log, ladders, limits and reports know this type and no model. It needs no torch, so
that records are read, compared and reported without; `parts` imports the modules that train.
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
    """A stage of kernels.stages.STAGES, or several in words."""
    flop: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    """Bytes that leave the rank for other GPUs of its node."""
    pcie: float = 0.0
    waits: bool = False
    """Whether the next piece that waits cannot begin before this one has ended: such pieces are a chain, whose times
    add up."""


SampleSizes = Mapping[str, float]
"""Means over samples of what an iteration's work depends on and its configuration does not say, by names of the
benchmark's own: lengths of histories, say. Empty where none were measured."""
UNMEASURED: SampleSizes = MappingProxyType({})


class TableWork(NamedTuple):
    """Bytes and elements that the tables' part of an iteration moves, a rank's share."""

    ids: float
    """Ids that the rank sends to tables' owners."""
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
        """Returns what the tables' part moves for `samples` samples; nothing of it is taken to lie in a cache.

        vector_bytes: of a number of a looked-up vector, or of its gradient."""
        ...

    def flop_per_sample(self, config: TrainingConfig, sizes: SampleSizes = UNMEASURED) -> float:
        """Returns the floating-point operations that training on a sample needs, table lookups left out."""
        ...

    def pieces(
        self, config: TrainingConfig, world_size: int, cache_bytes: float, sizes: SampleSizes = UNMEASURED
    ) -> list[Piece]:
        """Returns the pieces of an iteration on one rank that has its share of everything. cache_bytes: what the GPU's
        cache keeps from one use to the next."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Iterations at which a run to a target evaluates."""

    every: int
    first: int
    """A multiple of `every`: earlier evaluations are left out."""
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
    minutes: float
    """Minutes from run_start to the target."""
    eval_seconds: float | None = None
    """Seconds of one evaluation."""


class SubmissionWords(NamedTuple):
    """Words on a benchmark in the files that a submission needs beside the source code."""

    folder: str
    """The benchmark's folder in dlrm/, with data/preprocess.py, data/dataset.py and network.py."""
    raw: str
    """The data that preprocessing starts from."""
    order: str
    """The order in which a run reads its samples."""
    data_flags: str
    """Flags of `dlrm-bench data` that choose the benchmark, with a space after them; empty for the default one."""


class Ruleset(Protocol):
    """MLPerf's rules for a benchmark: the content of its log, and the values that the closed division fixes."""

    @property
    def version(self) -> str:
        """The ruleset of mlperf_logging's checkers that judges its logs: the newest of `versions`."""
        ...

    @property
    def versions(self) -> tuple[str, ...]:
        """All rulesets that know the benchmark."""
        ...

    @property
    def target_auc(self) -> float:
        """The AUC that a run of the closed division has to reach."""
        ...

    @property
    def train_samples(self) -> int:
        """Training samples of MLPerf's data."""
        ...

    @property
    def counts_samples(self) -> bool:
        """Whether logs count samples and have a block between two evaluations; otherwise the fraction of the epoch, and
        one epoch."""
        ...

    @property
    def reference_names(self) -> tuple[str, ...]:
        """Other names of the same benchmark in published logs."""
        ...

    @property
    def pinned_to_data(self) -> frozenset[str]:
        """Keys of which the open division too allows values of MLPerf's own data alone."""
        ...

    @property
    def published(self) -> tuple[Published, ...]:
        """Published results, computed as bench/mlperf/published_logs.py does."""
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
        """Yields in words what keeps a run out of the closed division. run: the other fields of its configuration,
        and global_batch_size."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticDenseOptions:
    """The options of the static pipeline that its stage 3 depends on."""

    eight_bits: bool
    """Whether the largest products have factors of eight bits (--fp8)."""
    peer_memory: bool
    """Whether ranks exchange gradients and weights through peer memory."""
    may_go_in_parts: bool
    """Whether the embedding stages take the batch in several parts."""


class Parts(Protocol):
    """Data and models of a benchmark; importing it imports torch."""

    def open_data(self, config: TrainingConfig) -> "Dataset":
        """Opens and checks the data; ValueError names the file or flag that is wrong."""
        ...

    def data_content(self, config: TrainingConfig) -> "dict[str, FileContent]":
        """Returns the fingerprints of the files that a run reads, by name; empty where there are none."""
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
        """Returns stage 3 of the static pipeline, where it trains this benchmark. memory: given where options ask for
        peer memory. Collective."""
        ...

    def static_sequences(self, config: TrainingConfig, ranks: "Ranks") -> "StaticSequences":
        """Returns stage 3 of the static pipeline, where it trains this benchmark, whose tables are not pooled.
        Collective."""
        ...

    def torchrec_model(self, config: TrainingConfig, ranks: "Ranks") -> "TorchRecModel":
        """Returns the model for the pipelines over TorchRec's modules, not sharded yet; imports torchrec."""
        ...


DataCommand = Callable[[str, str | None, Sequence[str]], int]
"""Runs a command of `dlrm-bench data`, such as generate, with the preset that is named and all other words; returns the
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
    """The MLPerf division that its runs ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark."""

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
    """None where MLPerf has no rules for it."""
    work: Work | None
    """None where its work is not counted."""
    parts: Callable[[], Parts]
    """Imports what trains it."""
    data_command: DataCommand | None = None
    """Makes and checks its data; None where there are no files."""
    cadence: Callable[[int, int, int], Evaluations] = parts_of_epoch
    """Evaluations of a run to a target, from the training samples of an epoch, the global batch size and
    --evaluations-per-epoch."""
    sample_sizes: "Callable[[Dataset, TrainingConfig, int, range], SampleSizes] | None" = None
    """Measures the sizes of samples on which a world size trains in a range of iterations, counted from 0; None where
    the configuration says all that `work` asks for."""
    table_ids: "Callable[[TrainingConfig, HostBatch], Sequence[NDArray[np.int32]]] | None" = None
    """Returns the ids that a batch of its data names in each table, [any]; None where the model makes ids of what a
    batch holds."""
    check_static: Callable[[TrainingConfig, StaticDenseOptions], None] | None = None
    """Raises ValueError, naming the flag, where the static pipeline's stage 3 cannot train a configuration; None where
    the static pipeline does not train the benchmark."""
    static_parts: Callable[[int, StaticDenseOptions], int] | None = None
    """The number of parts in which the static pipeline takes a local batch of this size from lookup to gradients; None
    where it does not train the benchmark."""

    @property
    def option_types(self) -> dict[str, type]:
        """The dataclass of each block of the configuration that is the benchmark's own, by the block's name."""
        default = next(iter(self.presets.values())).training
        return {block: type(getattr(default, block)) for block in ("model", "data", "optimizer")}

    def restored(self, config: Mapping[str, Any]) -> TrainingConfig:
        """Returns the training configuration of a record's config. What this version does not know is left out."""
        options = {block: _restored(kind, config.get(block, {})) for block, kind in self.option_types.items()}
        known = {name: config[name] for name in ("local_batch_size", "precision", "seed") if name in config}
        return TrainingConfig(**options, **known)


def _restored(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Returns a dataclass from a record's values; lists become tuples."""
    known = kind.__dataclass_fields__
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
    return kind(**given)
