"""Interface of a benchmark for the static pipeline of sequences: tables' rows reach the dense network one by one.

The numbers of rows and tokens vary from batch to batch. Shapes are fixed all the same, by rooms for events, for items
and for tokens, so that a CUDA graph can hold an iteration; padding fills the rooms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dlrm_bench.dlrm.dense.static_dense import DenseContext
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.runtime.streams import Branch


class Needs(NamedTuple):
    """The room that a batch needs, on one rank or the largest on any."""

    events: int
    """Distinct events."""
    items: int
    """Items whose rows are looked up: each event's, or fewer where those of several events are looked up once."""
    rows: int
    """Distinct rows of all tables, or a bound of their number."""
    tokens: int
    """Tokens of all sequences together."""


class BatchRoom(NamedTuple):
    """The fixed shape of a batch, but for its tokens."""

    events: int
    items: int


class FixedBatch(Protocol):
    """A batch in a fixed shape, on the host or on the device."""

    storage: Tensor
    """uint8, the one buffer that holds it."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch in host memory, as it travels."""

    batch: FixedBatch
    room: BatchRoom
    """The room that it is padded to."""
    needs: Needs
    """This rank's."""


@dataclass(slots=True)
class SequenceBackward:
    """The results of stage 3."""

    gradients: list[Tensor]
    """Gradients of the dense weights, of this rank."""
    guarded: Branch
    """The guard's look at the loss."""
    loss: Tensor
    """Kept until the guard has looked."""


class StaticSequences(Protocol):
    """A dense network of sequences, as each rank has it, and its batches."""

    def id_counts(self, room: BatchRoom) -> tuple[int, ...]:
        """Returns the room for ids of each table in a batch of that room."""
        ...

    @property
    def tallies(self) -> Tallies:
        """Counts of this rank's numbers that went wrong."""
        ...

    # Batches

    def prepare(self, batch: Any, room: BatchRoom) -> Prepared:
        """Returns one of the data set's batches padded to `room`, or to more where it has more; reader threads call
        it."""
        ...

    def padded(self, prepared: Prepared, room: BatchRoom) -> Prepared:
        """Returns a prepared batch with just that room."""
        ...

    def warm_up_batch(self) -> Any:
        """Returns a batch as the data set would, whose rows are the first of each table."""
        ...

    @property
    def usual_tokens(self) -> int:
        """Tokens of a batch of this rank as they may be expected before any is read, for warm-ups of realistic size."""
        ...

    def on_device(self, room: BatchRoom) -> Any:
        """Returns device memory for a batch of that room, a FixedBatch."""
        ...

    def write_ids(self, batch: Any, ids: Tensor) -> None:
        """Writes the row of its table that each place of a batch names to `ids`, int32 [K], table after table as
        `id_counts` says; -1 in places of padding."""
        ...

    def labels(self, batch: Any) -> Tensor:
        """Returns the labels of a batch on the device, fp32 [B]."""
        ...

    # Stages 3 and 5

    def forward_backward(
        self, context: DenseContext, batch: Any, tokens: int, rows: Tensor, gradients: Tensor
    ) -> SequenceBackward:
        """Launches forward, loss and backward on the current stream, and the guard's look beside them. Collective.

        tokens: the room for them. rows: fp32 [K, columns], zeros in places of padding; gradients: like rows, written.
        """
        ...

    def before_step(self, iteration: int) -> None:
        """Seeds what the iteration draws at random, counted from 1 over all runs of a training; see TorchRecModel."""
        ...

    def update(self, context: DenseContext, backward: SequenceBackward) -> None:
        """Averages the gradients over ranks and updates the dense weights, on the current stream. Collective."""
        ...

    def logits(self, batch: Any, tokens: int, rows: Tensor) -> Tensor:
        """Returns the logits of a batch, fp32 [B], as evaluations take them."""
        ...

    def loss(self, step: int) -> Tensor:
        """Returns the loss of iteration `step`, counted from 0 over all that were launched."""
        ...

    # State

    @property
    def table_keys(self) -> Sequence[str]:
        """The key of each table in checkpoints, in table order."""
        ...

    def memory(self) -> list[Tensor]:
        """Returns all weights and state, and what counts iterations: what a warm-up must leave as it was."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Returns the dense weights, the memory that is trained, by their keys in checkpoints."""
        ...

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """Returns the dense optimizer's state, the memory that is trained, by its keys in checkpoints."""
        ...
