"""One iteration on the static EBC: five stages of fixed shapes on several streams.

1 input dist               of the next batch, beside stages 2 to 5; the sort of its ids beside the table update
2 embedding forward        the bottom MLP beside it, and the all-gather of the last dense update where there is one
3 dense forward/backward   where there is room, the top MLP's weight gradients and update beside its later part; in peer
                           memory those of the cross layers too
4 embedding backward       the other weight gradients beside it
5 dense update             beside 3 and 4

A loss that is not finite stops every update of its iteration and of all later ones, on all ranks, a gradient that is
not finite those of all later ones: see LossGuard.

Large batches go through stages 2 to 4 in two halves: what one half moves over the links or through memory hides under
the other half's GEMMs. Table update and weight gradients take the whole batch. BatchSchedule has the decisions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.dcnv2.config import DcnTraining
from dlrm_bench.dlrm.dcnv2.explicit_dense import ExplicitDense
from dlrm_bench.dlrm.dense.buckets import Bucket
from dlrm_bench.dlrm.dense.loss_guard import LossGuard
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.tables.pooled.static_ebc import DistributedIds, StaticEBC
from dlrm_bench.pipeline.static.batch_schedule import BatchSchedule
from dlrm_bench.pipeline.static.fetch import BatchFetcher
from dlrm_bench.pipeline.static.streams import MAIN, Branch, IterationStreams, Priority

# The streams of the batch's parts from the embedding forward to the embedding backward, and of their lookups.
_PART_STREAMS = (MAIN, "second half")
_LOOKUP_STREAMS = ((MAIN, Priority.CHAIN), ("second lookup", Priority.FILL))

_ALL = slice(None)


@dataclass(slots=True)
class Slot:
    """The memory of one batch in flight on the device."""

    batch: Batch
    """The batch as it came from the host."""
    ids: DistributedIds


@dataclass(frozen=True, slots=True)
class _EmbeddingForward:
    """Everything that the embedding forward leaves to the stages after it."""

    pooled: Tensor | None
    """The result of the first part's lookup, for the table update."""
    parts: list[Branch]
    """The chain of each part, from its output dist on."""
    local: Branch
    """The replicated tables' lookup and the bottom MLP."""
    weights: list[Branch]
    """The all-gathers of the cross layers' and of the top MLP's weights, where there are any; or the copies in eight
    bits of both."""


class Iteration:
    """Launches the five stages of a training iteration, and the forward pass of an evaluation."""

    def __init__(
        self,
        config: DcnTraining,
        schedule: BatchSchedule,
        learning_rate: Tensor,
        dense: ExplicitDense,
        ebc: StaticEBC,
        memory: PeerMemory | None,
        guard: LossGuard,
        streams: IterationStreams,
        fetcher: BatchFetcher,
    ) -> None:
        """learning_rate: fp32 [1] on the device, of the dense weights. memory: where `dense` and `ebc` exchange through
        peer memory. guard: through the same.
        """
        self._rate = learning_rate
        self._config, self._schedule, self._memory, self._guard = config, schedule, memory, guard
        self._dense, self._ebc, self._streams, self._fetcher = dense, ebc, streams, fetcher
        self._stream_names = list(zip(_PART_STREAMS, _LOOKUP_STREAMS, strict=True))[: schedule.parts]
        self._updates: list[Branch] = []
        """The dense updates of the iteration that is being launched."""

    def train(self, now: Slot, ahead: Slot) -> None:
        """Trains on the batch of `now`, and brings the next one to `ahead`."""
        self._updates.clear()
        with self._streams.iteration():
            with self._streams.beside("input_dist", priority=Priority.FILL) as incoming:
                self._exchange_ids(ahead)
            if self._ebc.splits_rows:
                with self._streams.beside("agreement", incoming, priority=Priority.FILL):  # no sort waits for it
                    self._agree(ahead)
            with record_function("embedding_forward"):
                forward = self._embedding_forward(now)
            with record_function("dense_forward_backward"), torch.no_grad():
                gradients, guarded = self._dense_forward_backward(now, forward)
            with record_function("dense_update"):
                last = forward.parts[-1]
                bottom, bottom_update = self._update_bottom(guarded, last)
                with self._streams.beside("replicated", last, guarded):
                    self._ebc.update_replicated(now.ids, self._interaction_gradient(), self._guard.watch)
            with record_function("embedding_backward"):
                self._embedding_backward(now, forward, guarded, [*gradients, *bottom], bottom_update)
            # Sorts and GEMMs want whole multiprocessors; the table update waits for memory, and its blocks are small.
            with self._streams.beside("sort", incoming, forward.parts[-1], priority=Priority.FILL):
                self._sort_ids(ahead)
            if self._memory is not None:
                with self._streams.beside("weights", *self._updates):
                    self._memory.barrier("weights")

    def _embedding_forward(self, now: Slot) -> _EmbeddingForward:
        dense, streams, weights = self._dense, self._streams, []
        if self._memory is None:
            with streams.beside("cross") as cross:
                for bucket in dense.cross.values():
                    bucket.all_gather()
            with streams.beside("top 0", cross) as top:
                for bucket in dense.top.values():
                    bucket.all_gather()
            weights = [cross, top]
        if dense.in_eight_bits:
            with streams.beside("eight bits", *weights) as copies:
                dense.copy_weights()
            weights = [copies]
        with streams.beside("local") as local:
            self._local_forward(now)
        parts, lookups, pooled = [], [], []
        for part, (name, (lookup_name, priority)) in enumerate(self._stream_names):
            with streams.beside(name) as stream, streams.beside(lookup_name, priority=priority) as lookup:
                pooled.append(self._ebc.lookup(now.ids, part))
            parts.append(stream)
            lookups.append(lookup)
        for part, rows in enumerate(self._dense.shape.rows):
            with streams.on(parts[part]):
                streams.join(lookups[part])
                self._ebc.output_dist(pooled[part], self._interaction_input(rows), part)
        return _EmbeddingForward(pooled[0], parts, local, weights)

    def _dense_forward_backward(self, now: Slot, forward: _EmbeddingForward) -> tuple[list[Branch], Branch]:
        """Gives the weight gradients of the cross layers, and the guard's look at the losses."""
        dense, streams, layers = self._dense, self._streams, range(self._config.model.cross_layers)
        schedule, gradients, last = self._schedule, [], forward.parts[-1]
        for part, rows in enumerate(dense.shape.rows):
            with streams.on(forward.parts[part]):
                streams.join(forward.local, *forward.weights[:1])
                for layer in layers:
                    dense.cross_forward(layer, part)
                streams.join(*forward.weights[1:])
                dense.loss_backward(dense.top_hidden_forward(part), now.batch.labels[rows], part)
                if part == schedule.parts - 1:
                    with streams.beside("guard", *forward.parts[:part]) as guarded:
                        self._guard.look(dense.losses)
                dense.top_backward(part)
                if schedule.top_update_within_chain:
                    self._update_top(guarded)
                for layer in reversed(layers):
                    dense.cross_backward(layer, part)
                    if schedule.cross_updates_within_chain:
                        gradients += self._update_cross((layer,), guarded)
        if not schedule.top_update_within_chain:
            self._update_top(guarded, last)
        if not schedule.cross_updates_within_chain:
            for of_bucket in reversed(dense.cross):
                gradients += self._update_cross(of_bucket, guarded, last)
        return gradients, guarded

    def _embedding_backward(
        self,
        now: Slot,
        forward: _EmbeddingForward,
        guarded: Branch,
        gradients: list[Branch],
        bottom_update: Branch,
    ) -> None:
        """gradients: the weight gradients of the cross layers and the bottom MLP."""
        for part, rows in enumerate(self._dense.shape.rows):
            with self._streams.on(forward.parts[part]):
                if part == self._schedule.parts - 1:  # before the last barrier ahead of the table update
                    self._streams.join(guarded)
                self._ebc.gradient_dist(self._interaction_gradient(rows), part)
        first = [forward.parts[-1]]
        if self._schedule.tables_after_weight_gradients:
            first += gradients
        if self._schedule.tables_after_bottom_update:
            first.append(bottom_update)
        with self._streams.beside("tables", *first, priority=Priority.FILL):
            self._ebc.update(now.ids, forward.pooled, self._guard.watch)

    def _update_top(self, guarded: Branch, *after: Branch) -> None:
        with self._streams.beside("top gradients", *after, priority=Priority.WEIGHT_GRADIENTS):
            for layers, bucket in self._dense.top.items():
                self._dense.top_weight_gradients(layers)
                self._update(f"top {layers[0]}", bucket, guarded)

    def _update_cross(self, layers: tuple[int, ...], guarded: Branch, *after: Branch) -> list[Branch]:
        """Computes the layers' weight gradients, beside one another where there is room, and updates their bucket.
        Gives the weight gradients."""
        apart, gradients = self._schedule.cross_gradients_apart, []
        for layer in layers:
            name = f"cross {layer} gradients" if apart else "cross gradients"
            with self._streams.beside(name, *after, priority=Priority.WEIGHT_GRADIENTS) as branch:
                self._dense.cross_weight_gradients(layer)
            gradients.append(branch)
        self._update(f"cross {layers[0]}", self._dense.cross[layers], guarded, *gradients)
        return gradients

    def _update_bottom(self, guarded: Branch, after: Branch) -> tuple[list[Branch], Branch]:
        """Gives the bottom MLP's weight gradients, with the backward before them, and its update."""
        with self._streams.beside("bottom", after) as backward:
            gradients = [backward]
            self._dense.bottom_backward()
            for layer in range(len(self._config.model.bottom_mlp)):
                name = f"bottom {layer} gradients"
                with self._streams.beside(name, priority=Priority.WEIGHT_GRADIENTS) as branch:
                    self._dense.bottom_weight_gradient(layer)
                gradients.append(branch)
        return gradients, self._update("bottom update", self._dense.bottom, guarded, *gradients)

    def _update(self, name: str, bucket: Bucket, *after: Branch) -> Branch:
        with self._streams.beside(name, *after) as update, record_function("dense_update"):
            bucket.update(self._rate, self._config.optimizer.eps, self._guard.watch)
        self._updates.append(update)
        return update

    def _local_forward(self, slot: Slot) -> None:
        """Runs what needs no other rank: the replicated tables and the bottom MLP."""
        self._ebc.lookup_replicated(slot.ids, self._interaction_input())
        self._dense.bottom_forward(slot.batch.dense)

    def input_dist(self, slot: Slot) -> None:
        """Fetches the next batch into `slot`, distributes its ids and sorts them."""
        self._exchange_ids(slot)
        self._agree(slot)
        self._sort_ids(slot)

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

    def evaluate(self, now: Slot, ahead: Slot) -> Tensor:
        """Returns the logits of `now`'s batch, by weights that were gathered before, and brings the next batch to
        `ahead`."""
        logits = []
        with self._streams.iteration():
            with self._streams.beside("input_dist", priority=Priority.FILL):
                self.input_dist(ahead)
            self._local_forward(now)
            self._dense.copy_weights()
            for part, rows in enumerate(self._dense.shape.rows):
                self._ebc.output_dist(self._ebc.lookup(now.ids, part), self._interaction_input(rows), part)
                for layer in range(self._config.model.cross_layers):
                    self._dense.cross_forward(layer, part)
                logits.append(self._dense.top_forward(part))
            if self._memory is not None:  # the next lookups overwrite what this one reads
                self._memory.barrier("evaluated")
        return torch.cat(logits)

    def _interaction_input(self, rows: slice = _ALL) -> Tensor:
        return self._dense.x0[rows, self._config.model.embedding_dim :]

    def _interaction_gradient(self, rows: slice = _ALL) -> Tensor:
        return self._dense.dx0[rows, self._config.model.embedding_dim :]
