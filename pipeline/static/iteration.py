"""One iteration on the static EBC: five stages of fixed shapes on several streams.

1 input dist               of the next batch, beside stages 2 to 5; the sort of its ids beside the table update
2 embedding forward        beside it the lookup of replicated tables, and the part of stage 3 without pooled vectors
3 dense forward/backward   the benchmark's, see dlrm/dense/static_dense.py
4 embedding backward       beside the weight gradients that stage 3 has left
5 dense update             the benchmark's, beside 3 and 4

A non-finite loss stops every update of its iteration and of all later iterations, on all ranks; a non-finite gradient
stops the updates of all later iterations: see LossGuard.

If stage 3 processes the batch in two halves, these pass through stages 2 to 4 one after the other: one half's exchanges
and memory traffic hide under the other half's GEMMs. Table update and weight gradients process the whole batch.
CONCURRENCY.md describes the streams and barriers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.dense.static_dense import DenseBackward, DenseContext, EmbeddingForward, StaticDense
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.streams import Branch
from dlrm_bench.dlrm.tables.pooled.distributed_ids import DistributedIds
from dlrm_bench.dlrm.tables.pooled.static_ebc import StaticEBC
from dlrm_bench.pipeline.interface import StepMetrics
from dlrm_bench.pipeline.static import concurrency as on
from dlrm_bench.pipeline.static.fetch import BatchFetcher
from dlrm_bench.pipeline.static.streams import IterationStreams


@dataclass(slots=True)
class Slot:
    """The memory of one batch in flight on the device."""

    batch: Batch
    """The batch as received from the host."""
    ids: DistributedIds


@dataclass(frozen=True, slots=True)
class Stages:
    """The objects whose work an iteration launches."""

    fetcher: BatchFetcher
    ebc: StaticEBC
    """Stages 1, 2 and 4."""
    dense: StaticDense
    """Stages 3 and 5."""
    memory: PeerMemory | None
    """Peer memory, if both exchange through it; else None."""


class Iteration:
    """Launches the five stages of a training iteration, and the forward pass of an evaluation."""

    def __init__(self, stages: Stages, streams: IterationStreams, context: DenseContext) -> None:
        """context: its streams are `streams`."""
        self._fetcher, self._ebc, self._dense, self._memory = stages.fetcher, stages.ebc, stages.dense, stages.memory
        self._streams, self._context, self._guard = streams, context, context.guard
        self.metrics: StepMetrics | None = None
        """Metrics that training iterations add to."""
        parts = self._dense.shape.parts
        self._parts = list(zip(on.CHAINS[:parts], on.LOOKUPS[:parts], strict=True))

    def measure(self, metrics: StepMetrics) -> None:
        """Adds the batch of every training iteration launched from now on to `metrics`."""
        self.metrics, self._predictions = metrics, self._dense.keep_predictions()

    def train(self, now: Slot, ahead: Slot) -> None:
        """Trains on the batch in `now`, and fetches the next batch to `ahead`."""
        dense, streams, context = self._dense, self._streams, self._context
        with streams.iteration():
            in_tiers = self._ebc.in_tiers  # exchanges over the host link take long, so they start first
            with streams.beside(on.TIERS if in_tiers else on.INPUT_DIST) as incoming:
                self._exchange_ids(ahead)
                if in_tiers:
                    self._sort_ids(ahead)
                self._bring_rows(ahead)
            if self._ebc.agrees:
                with streams.beside(on.AGREEMENT, incoming):
                    self._agree(ahead)
            with record_function("embedding_forward"):
                pooled, forward = self._embedding_forward(now)
            last = forward.parts[-1]
            with record_function("dense_forward_backward"), torch.no_grad():
                backward = dense.forward_backward(context, now.batch, forward)
            if self.metrics is not None:
                with streams.beside(on.METRICS, backward.guarded):
                    self.metrics.update(self._predictions, now.batch.labels)
            with record_function("dense_update"):
                dense.finish(context, backward, last)
                with streams.beside(on.REPLICATED, last, backward.guarded):
                    self._ebc.update_replicated(now.ids, dense.gradients, self._guard.watch)
            with record_function("embedding_backward"):
                tables = self._embedding_backward(now, pooled, forward, backward)
            if in_tiers:
                with streams.on(tables):
                    streams.join(incoming)
                    self._ebc.bring_late_rows(ahead.ids)
            if not in_tiers:
                # Sorts and GEMMs need whole multiprocessors; the table update waits for memory, in small blocks.
                with streams.beside(on.SORT, incoming, last):
                    self._sort_ids(ahead)
            if self._memory is not None:
                with streams.beside(on.WEIGHTS_SEEN, *backward.updates):
                    self._memory.barrier(on.WEIGHTS)

    def _embedding_forward(self, now: Slot) -> tuple[Tensor | None, EmbeddingForward]:
        """Returns the first part's lookup, for the table update, and the branches that stage 3 waits for."""
        streams = self._streams
        weights = self._dense.gather_beside(self._context)
        with streams.beside(on.LOCAL) as local:
            self._local_forward(now)
        chains, lookups, pooled = [], [], []
        for part, (chain, lookup) in enumerate(self._parts):
            with streams.beside(chain) as of_chain, streams.beside(lookup) as of_lookup:
                pooled.append(self._ebc.lookup(now.ids, part))
            chains.append(of_chain)
            lookups.append(of_lookup)
        for part, rows in enumerate(self._dense.shape.rows):
            with streams.on(chains[part]):
                streams.join(lookups[part])
                self._ebc.output_dist(pooled[part], self._dense.inputs[rows], part)
        return pooled[0], EmbeddingForward(chains, local, weights)

    def _embedding_backward(
        self, now: Slot, pooled: Tensor | None, forward: EmbeddingForward, backward: DenseBackward
    ) -> Branch:
        """Returns the branch of the table update."""
        parts = forward.parts
        for part, rows in enumerate(self._dense.shape.rows):
            with self._streams.on(parts[part]):
                if part == len(parts) - 1:  # before the last barrier ahead of the table update
                    self._streams.join(backward.guarded)
                self._ebc.gradient_dist(self._dense.gradients[rows], part)
        with self._streams.beside(on.TABLES, parts[-1], *backward.before_tables) as tables:
            self._ebc.update(now.ids, pooled, self._guard.watch)
        return tables

    def _local_forward(self, slot: Slot) -> None:
        """Runs the work that needs no other rank: the replicated tables, and the beginning of stage 3."""
        self._ebc.lookup_replicated(slot.ids, self._dense.inputs)
        self._dense.local_forward(slot.batch)

    def input_dist(self, slot: Slot) -> None:
        """Fetches the next batch into `slot`, distributes its ids, sorts them, and moves its rows to their places, or
        creates them there."""
        self._exchange_ids(slot)
        if self._ebc.in_tiers:
            self._sort_ids(slot)
        self._bring_rows(slot)
        if not self._ebc.in_tiers:
            self._sort_ids(slot)
        self._agree(slot)
        self._ebc.bring_late_rows(slot.ids)

    def _exchange_ids(self, slot: Slot) -> None:
        with record_function("input_dist"):
            self._fetcher.fetch(slot.batch)
            self._ebc.input_dist(slot.batch.ids, slot.ids)

    def _agree(self, slot: Slot) -> None:
        with record_function("input_dist"):
            self._ebc.agree(slot.ids)

    def _sort_ids(self, slot: Slot) -> None:
        with record_function("input_dist"):
            self._ebc.sort(slot.ids)

    def _bring_rows(self, slot: Slot) -> None:
        with record_function("input_dist"):
            self._ebc.bring_rows(slot.ids, self._fetcher.is_new)

    def evaluate(self, now: Slot, ahead: Slot) -> Tensor:
        """Returns the logits of `now`'s batch, with weights gathered before, and fetches the next batch to `ahead`."""
        logits = []
        with self._streams.iteration():
            with self._streams.beside(on.INPUT_DIST):
                self.input_dist(ahead)
            self._local_forward(now)
            self._dense.copy_weights()
            self._ebc.place_unnamed(now.ids)
            for part, rows in enumerate(self._dense.shape.rows):
                self._ebc.output_dist(self._ebc.lookup(now.ids, part), self._dense.inputs[rows], part)
                logits.append(self._dense.logits(part))
            if self._memory is not None:
                self._memory.barrier(on.EVALUATED)
        return torch.cat(logits)
