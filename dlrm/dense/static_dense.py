"""The static pipeline's interface to a benchmark's dense network: stage 3, and the dense update of stage 5.

The pipeline writes pooled vectors to `inputs` and reads their gradients from `gradients`; in between, a benchmark
launches its own work on streams that the pipeline provides, in the same order on all ranks and in every iteration. All
memory is allocated once and all shapes are fixed, so that an iteration can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.data.batch import Batch, BatchLayout
from dlrm_bench.dlrm.dense.buckets import Bucket, DenseState
from dlrm_bench.dlrm.dense.loss_guard import LossGuard
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.runtime.streams import Branch, Streams
from dlrm_bench.kernels.peer_tensors import PeerTensors


@dataclass(frozen=True, slots=True)
class DenseContext:
    """The pipeline's objects that the dense network uses in its iterations."""

    streams: Streams
    learning_rate: Tensor
    """fp32 [1] on the device; every update reads it."""
    guard: LossGuard
    """Must look at the losses before any update of an iteration; every update takes its watch."""


@dataclass(frozen=True, slots=True)
class EmbeddingForward:
    """The branches that stage 3 continues or waits for."""

    parts: Sequence[Branch]
    """The chain of each part of the batch; it ends when its pooled vectors are available, and stage 3 continues it."""
    local: Branch
    """`local_forward` and the lookup of replicated tables."""
    weights: Sequence[Branch]
    """The result of `gather_beside`."""


@dataclass(slots=True)
class DenseBackward:
    """The branches that later work of the iteration waits for."""

    guarded: Branch
    """The guard's look at the losses."""
    before_tables: list[Branch] = field(default_factory=list)
    """Work that the table update waits for in addition to its gradients, because running both at once is slower."""
    updates: list[Branch] = field(default_factory=list)
    """The updates of all buckets."""


class StaticDense(Protocol):
    """A dense network with one fixed local batch size, on each rank."""

    @property
    def shape(self) -> BatchShape:
        """Local batch size, format, and number of parts in which the batch passes through stages 2 to 4."""
        ...

    @property
    def layout(self) -> BatchLayout:
        """The layout of a rank's batch."""
        ...

    @property
    def inputs(self) -> Tensor:
        """Memory for the pooled vectors of the local batch, [samples, tables * columns], with any row stride."""
        ...

    @property
    def gradients(self) -> Tensor:
        """The gradient of `inputs`, of the same shape."""
        ...

    @property
    def peer_inputs(self) -> tuple[PeerTensors, int] | None:
        """The memory behind `inputs` on all ranks, and the column where pooled vectors begin, if it is peer memory
        that all ranks can access."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All weights, their gradients and optimizer state."""
        ...

    @property
    def tallies(self) -> Tallies:
        """Counts of this rank's saturated and non-finite numbers."""
        ...

    def loss(self, step: int) -> Tensor:
        """Returns the mean loss of the local batch of iteration `step`, counted from 0 over all launched iterations."""
        ...

    def keep_predictions(self) -> Tensor:
        """Returns memory that every iteration launched from now on writes the local batch's predictions to, the
        sigmoids of its logits, fp32 [samples]; valid after the guard's look at the losses."""
        ...

    # Training, in this order

    def gather_beside(self, context: DenseContext) -> Sequence[Branch]:
        """Launches the distribution of updated weights to this rank, if the update has not done it. Collective."""
        ...

    def local_forward(self, batch: Batch) -> None:
        """Launches, on the current stream, the part of the forward pass that needs no pooled vectors."""
        ...

    def forward_backward(self, context: DenseContext, batch: Batch, after: EmbeddingForward) -> DenseBackward:
        """Launches forward and backward of each part on the part's chain, up to its `gradients`, and parallel work.
        Collective."""
        ...

    def finish(self, context: DenseContext, backward: DenseBackward, after: Branch) -> None:
        """Launches the rest of backward and update after the whole batch's `gradients` are complete, on branches after
        `after`; adds these to `backward`. Collective."""
        ...

    # Evaluation

    def gather(self) -> None:
        """Gathers all weights on this rank, before evaluations. Collective."""
        ...

    def copy_weights(self) -> None:
        """Makes the weight copies that a forward pass reads, after `local_forward`."""
        ...

    def logits(self, part: int) -> Tensor:
        """Returns the logits of a part, [its samples], after its pooled vectors are available."""
        ...

    # State, under the keys of the benchmark's checkpoints

    @property
    def dense_keys(self) -> Sequence[str]:
        """The keys of all dense weights."""
        ...

    @property
    def table_keys(self) -> Sequence[str]:
        """The key of each table, in table order."""
        ...

    def state_dict(self, which: DenseState) -> dict[str, Tensor]:
        """Returns full fp32 copies of weights or optimizer state. Collective."""
        ...

    def load_state_dict(self, values: dict[str, Tensor], which: DenseState) -> None:
        """Loads the result of `state_dict(which)`, the same on every rank."""
        ...
