"""One iteration on the static EBC: five stages of fixed shapes on several streams.

1 input dist               of the next batch, beside stages 2 to 5
2 embedding forward        the bottom MLP beside it, and the all-gather of the last dense update where there is one
3 dense forward/backward   where there is room, the top MLP's weight gradients and update beside its later part; in peer
                           memory those of the cross layers too
4 embedding backward       the other weight gradients beside it
5 dense update             beside 3 and 4

Large batches go through stages 2 to 4 in two halves: what one half moves over the links or through memory hides behind
the other half's GEMMs. Table update and weight gradients are of the whole batch. BatchSchedule has the decisions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from dlrm_bench.dlrm.buckets import Bucket
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.embedding.static_ebc import DistributedIds, StaticEBC
from dlrm_bench.dlrm.explicit_dense import ExplicitDense
from dlrm_bench.dlrm.peer_memory import PeerMemory
from dlrm_bench.pipeline.static.batch_schedule import BatchSchedule
from dlrm_bench.pipeline.static.fetch import BatchFeed
from dlrm_bench.pipeline.static.streams import IterationStreams

# The streams of the batch's parts from the embedding forward to the embedding backward, and of their lookups.
_PART_STREAMS = ("main", "second half")
_LOOKUP_STREAMS = ("main", "second lookup")

_ALL = slice(None)


@dataclass(slots=True)
class Slot:
    """What one batch in flight occupies on the device."""

    batch: Batch
    """As it came from the host."""
    ids: DistributedIds


class Iteration:
    """Launches the five stages of a training iteration, and the forward pass of an evaluation."""

    def __init__(
        self,
        config: TrainingConfig,
        schedule: BatchSchedule,
        dense: ExplicitDense,
        ebc: StaticEBC,
        memory: PeerMemory | None,
        streams: IterationStreams,
        feed: BatchFeed,
    ) -> None:
        """memory: what `dense` and `ebc` exchange through, where that is peer memory."""
        self._config, self._schedule, self._memory = config, schedule, memory
        self._dense, self._ebc, self._streams, self._feed = dense, ebc, streams, feed
        self._batch_parts = list(zip(_PART_STREAMS, _LOOKUP_STREAMS, schedule.rows, strict=False))
        self._last = self._batch_parts[-1][0]

    def train(self, now: Slot, ahead: Slot) -> None:
        """Trains on the batch of `now`, and brings the next one to `ahead`."""
        with self._streams.beside("input_dist"):
            self.input_dist(ahead)
        with record_function("embedding_forward"):
            pooled = self._embedding_forward(now)
        with record_function("dense_forward_backward"), torch.no_grad():
            gradients = self._dense_forward_backward(now)
        with record_function("dense_update"):
            gradients += self._dense_update(now)
        with record_function("embedding_backward"):
            self._embedding_backward(now, pooled, gradients)
        self._streams.join_all()

    def _embedding_forward(self, now: Slot) -> Tensor | None:
        """What a part's lookup gives, for the embedding backward."""
        dense, streams = self._dense, self._streams
        if self._memory is None:
            with streams.beside("cross"):
                for bucket in dense.cross.values():
                    bucket.all_gather()
            with streams.beside("top 0", "cross"):
                for bucket in dense.top.values():
                    bucket.all_gather()
        with streams.beside("local"):
            self._local_forward(now)
        pooled = []
        for part, (stream, lookup, _) in enumerate(self._batch_parts):
            with streams.beside(stream), streams.beside(lookup):
                pooled.append(self._ebc.lookup(now.ids, part))
        for part, (stream, lookup, rows) in enumerate(self._batch_parts):
            with streams.on(stream):
                streams.join(lookup)
                self._ebc.output_dist(pooled[part], self._interaction_input(rows), part)
        return pooled[0]

    def _dense_forward_backward(self, now: Slot) -> list[str]:
        """The streams of the weight gradients of cross layers."""
        dense, streams, layers = self._dense, self._streams, range(self._config.model.cross_layers)
        gradients: list[str] = []
        for part, (stream, _, rows) in enumerate(self._batch_parts):
            with streams.on(stream):
                streams.join("local")
                streams.join("cross")
                for layer in layers:
                    dense.cross_forward(layer, part)
                streams.join("top 0")
                dense.loss_backward(dense.top_hidden_forward(part), now.batch.labels[rows], part)
                dense.top_backward(part)
                if self._schedule.top_update_within_chain:
                    self._update_top()
                for layer in reversed(layers):
                    dense.cross_backward(layer, part)
                    if self._schedule.cross_updates_within_chain:
                        gradients += self._update_cross((layer,))
        if not self._schedule.top_update_within_chain:
            self._update_top(self._last)
        if not self._schedule.cross_updates_within_chain:
            for of_bucket in reversed(dense.cross):
                gradients += self._update_cross(of_bucket, self._last)
        return gradients

    def _dense_update(self, now: Slot) -> list[str]:
        """Of what is left: the bottom MLP and the replicated tables. The streams of the weight gradients."""
        gradients = self._bottom_gradients(self._last)
        with self._streams.beside("bottom update", *gradients):
            self._update(self._dense.bottom)
        with self._streams.beside("replicated", self._last):
            self._ebc.update_replicated(now.ids, self._interaction_gradient())
        return gradients

    def _embedding_backward(self, now: Slot, pooled: Tensor | None, gradients: list[str]) -> None:
        """gradients: the streams of weight gradients."""
        for part, (stream, _, rows) in enumerate(self._batch_parts):
            with self._streams.on(stream):
                self._ebc.gradient_dist(self._interaction_gradient(rows), part)
        first = gradients if self._schedule.tables_after_weight_gradients else []
        if self._schedule.tables_after_bottom_update:
            first = [*first, "bottom update"]
        with self._streams.beside("tables", self._last, *first):
            self._ebc.update(now.ids, pooled)

    def _update_top(self, *after: str) -> None:
        with self._streams.beside("top gradients", *after):
            for layers, bucket in self._dense.top.items():
                self._dense.top_weight_gradients(layers)
                with self._streams.beside(f"top {layers[0]}"), record_function("dense_update"):
                    self._update(bucket)

    def _update_cross(self, layers: tuple[int, ...], *after: str) -> list[str]:
        """Weight gradients on the streams of these names, beside one another where there is room, and the update of
        the layers' bucket."""
        apart = self._schedule.cross_gradients_apart
        names = [f"cross {layer} gradients" if apart else "cross gradients" for layer in layers]
        for layer, name in zip(layers, names, strict=True):
            with self._streams.beside(name, *after):
                self._dense.cross_weight_gradients(layer)
        with self._streams.beside(f"cross {layers[0]}", *names), record_function("dense_update"):
            self._update(self._dense.cross[layers])
        return names

    def _bottom_gradients(self, after: str) -> list[str]:
        """On the streams of these names."""
        names = ["bottom"]
        with self._streams.beside("bottom", after):
            self._dense.bottom_backward()
            for layer in range(len(self._config.model.bottom_mlp)):
                names.append(f"bottom {layer} gradients")
                with self._streams.beside(names[-1]):
                    self._dense.bottom_weight_gradient(layer)
        return names

    def _update(self, bucket: Bucket) -> None:
        bucket.update(self._ebc.learning_rate, self._config.optimizer.eps)

    def _local_forward(self, slot: Slot) -> None:
        """What needs no other rank: the replicated tables and the bottom MLP."""
        self._ebc.lookup_replicated(slot.ids, self._interaction_input())
        self._dense.bottom_forward(slot.batch.dense)

    def input_dist(self, slot: Slot) -> None:
        """Of the next batch, which `slot` then holds."""
        with record_function("input_dist"):
            self._feed.fetch(slot.batch)
            self._ebc.input_dist(slot.batch.ids, slot.ids)

    def evaluate(self, slot: Slot) -> Tensor:
        """Logits of `slot`'s batch, by weights that were gathered before."""
        with record_function("input_dist"):
            self._ebc.input_dist(slot.batch.ids, slot.ids)
        self._local_forward(slot)
        logits = []
        for part, (_, _, rows) in enumerate(self._batch_parts):
            self._ebc.output_dist(self._ebc.lookup(slot.ids, part), self._interaction_input(rows), part)
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
