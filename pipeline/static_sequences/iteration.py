"""One iteration over rows that are looked up one by one: five stages of fixed shapes.

1 input dist               of the next batch, beside stages 2 to 4
2 embedding forward        of distinct rows
3 dense forward/backward   the benchmark's, see dlrm/dense/static_sequences.py
4 embedding backward       sums of distinct rows' gradients, and their update
5 dense update             one all-reduce and Adam, beside 4

A non-finite loss stops every update of its iteration and of all later iterations, on all ranks; a non-finite gradient
stops the updates of all later iterations: see LossGuard. pipeline/static/CONCURRENCY.md describes streams and their
safety; its three rules hold here. Rows, gradients and dense weights are used by one iteration at a time; ids and
batches have two buffers, used in turn. tests/pipeline/static_sequences/test_order.py checks the waits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dlrm_bench.dlrm.dense.static_dense import DenseContext
from dlrm_bench.dlrm.dense.static_sequences import StaticSequences
from dlrm_bench.dlrm.runtime.streams import Priority, Stream
from dlrm_bench.dlrm.tables.sequence.sequence_tables import DistributedRows, SequenceTables
from dlrm_bench.pipeline.interface import StepMetrics
from dlrm_bench.pipeline.static.concurrency import METRICS
from dlrm_bench.pipeline.static.fetch import BatchFetcher
from dlrm_bench.pipeline.static.streams import IterationStreams

INPUT_DIST = Stream(
    name="input_dist",
    priority=Priority.FILL,
    carries="the next batch: its copy to the device, its distinct rows, their exchange",
)
DENSE_UPDATE = Stream(name="dense update", carries="the all-reduce of dense gradients, clipping and Adam")


@dataclass(slots=True)
class Slot:
    """The memory of one batch in flight on the device."""

    batch: Any
    """The batch as it came from the host, a FixedBatch."""
    ids: Tensor
    """int32 [K]."""
    rows: DistributedRows


@dataclass(slots=True)
class Space:
    """The memory of iterations with one id capacity: batch n is in slot n % 2."""

    tables: SequenceTables
    slots: tuple[Slot, Slot]
    rows: Tensor
    """fp32 [K, columns]."""
    gradients: Tensor | None
    """The gradient of `rows`, of the same shape; None for evaluation."""


class Iteration:
    """Launches the stages of a training iteration, and of an evaluation's."""

    def __init__(
        self, fetcher: BatchFetcher, dense: StaticSequences, streams: IterationStreams, context: DenseContext
    ) -> None:
        """context: of `streams`."""
        self._fetcher, self._dense, self._streams, self._context = fetcher, dense, streams, context
        self.metrics: StepMetrics | None = None
        """Metrics that training iterations add to."""

    def measure(self, metrics: StepMetrics) -> None:
        """Adds the batch of every training iteration launched from now on to `metrics`."""
        self.metrics, self._predictions = metrics, self._dense.keep_predictions()

    def train(self, space: Space, parity: int, tokens: int) -> None:
        """Trains on the batch in slot `parity`, with room for `tokens`; fetches the next batch to the other slot."""
        dense, streams, context = self._dense, self._streams, self._context
        now, ahead = space.slots[parity], space.slots[1 - parity]
        assert space.gradients is not None, "of a space for training"
        with torch.no_grad(), streams.iteration():
            with streams.beside(INPUT_DIST):
                self.input_dist(space, ahead)
            with record_function("embedding_forward"):
                space.tables.forward(now.rows, space.rows)
            with record_function("dense_forward_backward"):
                backward = dense.forward_backward(context, now.batch, tokens, space.rows, space.gradients)
            if self.metrics is not None:
                with streams.beside(METRICS):
                    self.metrics.update(self._predictions, dense.labels(now.batch))
            streams.join(backward.guarded)
            with streams.beside(DENSE_UPDATE):
                dense.update(context, backward)
            with record_function("embedding_backward"):
                space.tables.backward(now.rows, space.gradients, context.guard.watch)

    def input_dist(self, space: Space, slot: Slot) -> None:
        """Fetches the next batch into `slot` and distributes its ids."""
        with torch.no_grad(), record_function("input_dist"):
            self._fetcher.fetch(slot.batch)
            self._dense.write_ids(slot.batch, slot.ids)
            space.tables.input_dist(slot.ids, slot.rows, self._fetcher.is_new)

    def evaluate(self, space: Space, parity: int, tokens: int, logits: Tensor, labels: Tensor) -> None:
        """Writes logits and labels, fp32 [B], of the batch in slot `parity`, and fetches the next batch to the other
        slot."""
        now, ahead = space.slots[parity], space.slots[1 - parity]
        with torch.no_grad(), self._streams.iteration():
            with self._streams.beside(INPUT_DIST):
                self.input_dist(space, ahead)
            with record_function("embedding_forward"):
                space.tables.forward(now.rows, space.rows)
            with record_function("dense_forward_backward"):
                logits.copy_(self._dense.logits(now.batch, tokens, space.rows))
                labels.copy_(self._dense.labels(now.batch))
