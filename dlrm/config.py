"""The configuration of any benchmark: frozen dataclasses, one field for each command-line flag.

A field's docstring is its help text. Errors name the flag to change. The configurations of a benchmark's model, data
and optimizer are in its own folder; the protocols here are the harness's requirements on them.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol

from typing_extensions import TypeVar  # of typing only from Python 3.13 on, with a default

from dlrm_bench.dlrm.optimizers import TableOptimizer
from dlrm_bench.dlrm.tables.id_statistics import IdStatistics
from dlrm_bench.dlrm.tables.tables import Tables

Precision = Literal["fp32", "tf32", "bf16"]


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check_learning_rate(value: float) -> None:
    """Raises ValueError unless `value` is a learning rate that every optimizer accepts."""
    require(0 < value < math.inf, "--optimizer.learning-rate must be finite and positive")
    require(
        2**-149 <= value < 2**128,
        f"--optimizer.learning-rate is {value}: it must be representable in float32, the format of the weights",
    )


class ModelOptions(Protocol):
    """A benchmark's model."""

    @property
    def tables(self) -> Tables:
        """The embedding tables as built."""
        ...


class DataOptions(Protocol):
    """A benchmark's data."""

    @property
    def path(self) -> Path | None:
        """Directory of the data's files; None without files."""
        ...

    @property
    def prefetch_batches(self) -> int:
        """Number of batches that the reader threads keep ready in pinned memory."""
        ...

    @property
    def reader_threads(self) -> int:
        """Number of threads of each rank that read files."""
        ...

    @property
    def batches_in_memory(self) -> tuple[int, str]:
        """Number of batches that a rank holds in host memory, and the flag that sets it."""
        ...

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """Names of the fields that determine the samples and their order."""
        ...

    @property
    def steps_depend_on_batch(self) -> bool:
        """Whether the samples of a step depend on the global batch size of earlier steps, as where each of several
        parts of the data leaves out the samples that fill no global batch."""
        ...

    @property
    def is_random(self) -> bool:
        """Whether batches are random, unlimited in number, and kept for no evaluation."""
        ...

    @property
    def id_statistics(self) -> IdStatistics:
        """Statistics of how often the ids of a run's batches name the same rows."""
        ...


class OptimizerOptions(Protocol):
    """A benchmark's optimizers and their learning rate."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of tables and dense weights; with a schedule, the highest one."""
        ...

    @property
    def tables(self) -> TableOptimizer:
        """The optimizer of the tables."""
        ...

    def rate(self, iteration: int) -> float | None:
        """Returns the learning rate of an iteration, counted from 1 over the whole training; always None if
        `learning_rate` is constant."""
        ...


ModelT = TypeVar("ModelT", bound=ModelOptions, default=ModelOptions, covariant=True)
DataT = TypeVar("DataT", bound=DataOptions, default=DataOptions, covariant=True)
OptimizerT = TypeVar("OptimizerT", bound=OptimizerOptions, default=OptimizerOptions, covariant=True)


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingConfig(Generic[ModelT, DataT, OptimizerT]):
    """The complete description of a training: model, data, optimizer, batch, number format and seed."""

    model: ModelT
    data: DataT
    optimizer: OptimizerT
    local_batch_size: int
    """Samples per rank and iteration; the global batch is this times the world size."""
    precision: Precision = "tf32"
    """Matrix products of the dense network: fp32, tf32, or bf16 by autocast. Weights stay fp32. CPU: fp32 or bf16."""
    seed: int = 0
    """Seed of weights and random batches."""

    def __post_init__(self) -> None:
        require(self.local_batch_size > 0, f"--local-batch-size is {self.local_batch_size}: it must be positive")
        require(0 <= self.seed < 2**63, f"--seed is {self.seed}: choose 0 <= seed < 2^63")

    @property
    def pooled_bytes(self) -> int:
        """Bytes of one element of a pooled vector in the static pipeline's all-to-alls."""
        return 2 if self.precision == "bf16" else 4
