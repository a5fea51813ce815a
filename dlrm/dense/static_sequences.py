"""Interface of a benchmark for the static pipeline of sequences: embedding rows reach the dense network unpooled.

The numbers of rows and tokens vary from batch to batch. Shapes are fixed nevertheless, by rooms (capacities) for
events, items and tokens, so that a CUDA graph can hold an iteration; padding fills the unused capacity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dlrm_bench.dlrm.dense.static_dense import DenseContext
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.runtime.streams import Branch


class Needs(NamedTuple):
    """The capacities that a batch needs, on one rank or as the maximum over ranks."""

    events: int
    """Distinct events."""
    items: int
    """Items whose rows are looked up: one per event, or fewer if several events share a lookup."""
    rows: int
    """Distinct rows of all tables, or an upper bound."""
    tokens: int
    """Tokens of all sequences together."""


class BatchRoom(NamedTuple):
    """The fixed shape of a batch, except for its tokens."""

    events: int
    items: int


class FixedBatch(Protocol):
    """A batch with a fixed shape, on the host or on the device."""

    storage: Tensor
    """uint8, the single buffer that holds the batch."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A padded batch in host memory, with its needs."""

    batch: FixedBatch
    room: BatchRoom
    """The room to which it is padded."""
    needs: Needs
    """This rank's needs."""


@dataclass(slots=True)
class SequenceBackward:
    """The results of stage 3."""

    gradients: list[Tensor]
    """This rank's gradients of the dense weights."""
    guarded: Branch
    """The guard's look at the loss."""
    loss: Tensor
    """Kept alive until the guard has looked."""


class StaticSequences(Protocol):
    """Each rank's dense network for sequences, and its batches."""

    def id_counts(self, room: BatchRoom) -> tuple[int, ...]:
        """Returns the capacity for ids of each table in a batch of that room."""
        ...

    @property
    def tallies(self) -> Tallies:
        """Counts of this rank's saturated and non-finite numbers."""
        ...

    # Batches

    def prepare(self, batch: Any, room: BatchRoom) -> Prepared:
        """Returns one of the data set's batches padded to `room`, or to a larger room if it needs one; called by reader
        threads."""
        ...

    def padded(self, prepared: Prepared, room: BatchRoom) -> Prepared:
        """Returns a prepared batch padded to exactly that room."""
        ...

    def warm_up_batch(self) -> Any:
        """Returns a batch like the data set's, whose rows are the first of each table."""
        ...

    @property
    def usual_tokens(self) -> int:
        """Expected number of tokens of this rank's batches before any is read, for warm-ups of realistic size."""
        ...

    def on_device(self, room: BatchRoom) -> Any:
        """Returns device memory for a batch of that room, a FixedBatch."""
        ...

    def write_ids(self, batch: Any, ids: Tensor) -> None:
        """Writes to `ids`, int32 [K], the table row of each place of a batch, table after table as in `id_counts`; -1
        in padding."""
        ...

    def labels(self, batch: Any) -> Tensor:
        """Returns the labels of a batch on the device, fp32 [B]."""
        ...

    # Stages 3 and 5

    def forward_backward(
        self, context: DenseContext, batch: Any, tokens: int, rows: Tensor, gradients: Tensor
    ) -> SequenceBackward:
        """Launches forward, loss and backward on the current stream, and the guard's look beside them. Collective.

        tokens: their capacity. rows: fp32 [K, columns], zeros in padding; gradients: like rows, overwritten.
        """
        ...

    def before_step(self, iteration: int) -> None:
        """Seeds the iteration's random numbers; `iteration` counts from 1 over all runs of a training. See
        TorchRecModel."""
        ...

    def update(self, context: DenseContext, backward: SequenceBackward) -> None:
        """Averages the gradients over ranks and updates the dense weights, on the current stream. Collective."""
        ...

    def logits(self, batch: Any, tokens: int, rows: Tensor) -> Tensor:
        """Returns the logits of a batch, fp32 [B], for evaluation."""
        ...

    def loss(self, step: int) -> Tensor:
        """Returns the loss of iteration `step`, counted from 0 over all launched iterations."""
        ...

    def keep_predictions(self) -> Tensor:
        """Returns memory that every `forward_backward` from now on writes this rank's predictions to, the sigmoids of
        its logits, fp32 [B]."""
        ...

    # State

    @property
    def table_keys(self) -> Sequence[str]:
        """The key of each table in checkpoints, in table order."""
        ...

    def memory(self) -> list[Tensor]:
        """Returns all weights and state, and iteration counters: everything that a warm-up must restore."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Returns the dense weights (the trained memory itself) by their keys in checkpoints."""
        ...

    def take_weights(self) -> None:
        """Continues from the values written to `weights`."""
        ...

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """Returns the dense optimizer's state (the trained memory itself) by its keys in checkpoints."""
        ...
