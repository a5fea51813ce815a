"""The samples of each rank, in their order: the interface between a benchmark's data and the training loop."""

from collections.abc import Iterable
from typing import Any, NotRequired, Protocol, TypedDict


class FileContent(TypedDict):
    """The fingerprint of a data file, which distinguishes it from other files of the same name."""

    sample: str
    """Checksum.sample of dlrm/data/checksums.py."""
    blake2b: str | None
    """Checksum.blake2b, if a manifest has it."""
    added: NotRequired[bool]
    """Whether checkpoints of earlier versions lack the file."""


class HostBatch(Protocol):
    """One rank's samples of one iteration, in host memory."""

    num_valid: int
    """The first num_valid samples are real; the others pad the last evaluation batch."""


class Dataset(Protocol):
    """A source of batches. Global batch i holds samples [i * GBS, (i + 1) * GBS) with GBS = world_size * B; rank r
    reads [i * GBS + r * B, i * GBS + (r + 1) * B).

    Batches are a Sequence if any thread can read each of them independently, else an iterator.
    """

    train_samples: int | None
    """Number of samples of one epoch; None if unlimited."""
    eval_samples: int
    """Number of samples of one evaluation."""
    best_auc: float | None
    """The AUC of the true probabilities on the evaluation samples, if a generator knows it."""

    def train_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> Iterable[Any]:
        """Returns one epoch of this rank's batches, each sample once; the last partial global batch is dropped."""
        ...

    def eval_batches(self, rank: int, world_size: int, local_batch_size: int, pin: bool = False) -> Iterable[Any]:
        """Returns one evaluation. Every rank gets the same number of batches; in the last ones only the first num_valid
        samples, possibly none, are real, and the others have id 0, dense 0 and label 0."""
        ...
