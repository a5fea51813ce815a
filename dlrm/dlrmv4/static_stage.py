"""DLRMv4 as stages 3 and 5 of the static pipeline: the network of dlrm/dlrmv4/network.py over padded tokens, autograd's
backward, and Adam over one flat buffer; all of it launched without a wait, so that a CUDA graph can hold it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.profiler import record_function

from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.data.batch import ALIGNMENT
from dlrm_bench.dlrm.dense.adam_bucket import AdamBucket
from dlrm_bench.dlrm.dense.copy_together import copy_together
from dlrm_bench.dlrm.dense.static_dense import DenseContext
from dlrm_bench.dlrm.dense.static_sequences import BatchRoom, Needs, Prepared, SequenceBackward
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.dlrmv4.config import CONTEXT_TABLES, EVENT_TABLES, OWN_TOKENS, Dlrmv4Training, tables
from dlrm_bench.dlrm.dlrmv4.data.dataset import WindowBatch
from dlrm_bench.dlrm.dlrmv4.data.packed import CANDIDATE, LABEL, Packed, by_items
from dlrm_bench.dlrm.dlrmv4.embedded import Embedded
from dlrm_bench.dlrm.dlrmv4.fp8_stu import LayerTallies
from dlrm_bench.dlrm.dlrmv4.model import seed_dropout
from dlrm_bench.dlrm.dlrmv4.network import DenseNetwork, loss_of
from dlrm_bench.dlrm.dlrmv4.static_batch import (
    NO_ROW,
    IdShape,
    dense_batch,
    has_factor,
    on_device,
    padded,
    with_no_item,
    write_ids,
)
from dlrm_bench.dlrm.dlrmv4.torchrec import empty_histories, item_maps
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.streams import Stream
from dlrm_bench.kernels.dense.flat_adam import AdamOptions
from dlrm_bench.kernels.dense.fp8 import require_products

GUARD = Stream(name="guard", carries="the guard's look at the loss, before any update")
LOSSES_KEPT = 1_000_000
"""Iterations after which the place of a loss is used again; 4 MB."""


class Dlrmv4Stage:
    """See dlrm_bench.dlrm.dense.static_sequences.StaticSequences."""

    def __init__(self, config: Dlrmv4Training, options: StaticDenseOptions, ranks: Ranks) -> None:
        """Collective. Draws the initial weights of the seed. ValueError for --fp8 on GPUs without 8-bit products."""
        if options.eight_bits:
            require_products(ranks.device)
        self._model, self._ranks, self._config = config.model, ranks, config
        self._samples = config.local_batch_size
        self._pin = ranks.device.type == "cuda"
        network = DenseNetwork(config.model, config.precision)
        network.init_weights(config.seed)
        self.network = network.to(ranks.device)
        self.tallies = Tallies(LayerTallies.names(config.model.layers) if options.eight_bits else (), ranks.device)
        if options.eight_bits:
            self.network.round_products(self.tallies)
        optimizer = config.optimizer
        adam = AdamOptions(optimizer.adam_betas, optimizer.adam_eps, optimizer.clip_norm)
        rounded = network.rounded_weights(factors=has_factor(config.model)) if config.precision == "bf16" else ()
        self.bucket = AdamBucket(self.network, adam, ranks, rounded)
        self._artist, self._album = map(with_no_item, item_maps(config.data, config.model, ranks.device))
        self._losses = torch.zeros(LOSSES_KEPT, device=ranks.device)
        self._launched = torch.zeros(1, dtype=torch.int64, device=ranks.device)
        self._predictions: Tensor | None = None

    def id_counts(self, room: BatchRoom) -> tuple[int, ...]:
        """See StaticSequences."""
        return self._shape(room).of_tables

    def _shape(self, room: BatchRoom) -> IdShape:
        return IdShape(self._samples, room.events, room.items if self._model.content == "items" else None)

    # Batches

    def prepare(self, batch: WindowBatch, room: BatchRoom) -> Prepared:
        """See StaticSequences."""
        packed = batch.packed
        assert packed.layout.samples == self._samples, "batches of the local batch size"
        if self._model.content == "items":
            packed = by_items(packed, pin=False)
        layout, tokens = packed.layout, packed.tokens + OWN_TOKENS * self._samples
        needs = Needs(layout.events, layout.named, _distinct_rows(packed), tokens)
        own = (-(-count // ALIGNMENT) * ALIGNMENT for count in (needs.events, needs.items))
        room = BatchRoom(*map(max, room, own))
        return Prepared(padded(packed, self._shape(room).layout, self._pin), room, needs)

    def padded(self, prepared: Prepared, room: BatchRoom) -> Prepared:
        """See StaticSequences."""
        needs = prepared.needs
        assert all(need <= of for need, of in zip(needs, room, strict=False)), "room for all events and items"
        batch = padded(cast(Packed, prepared.batch), self._shape(room).layout, self._pin)
        return replace(prepared, batch=batch, room=room)

    def warm_up_batch(self) -> WindowBatch:
        """See StaticSequences. Its event has no item, as item 0 may have any artist and album."""
        batch = empty_histories(self._samples, pin=False)
        batch.packed.item.fill_(NO_ROW)
        return batch

    @property
    def usual_tokens(self) -> int:
        """See StaticSequences: histories of half the longest, as MLPerf's first ones are on average (2,082 tokens of
        4,095)."""
        return self._samples * (self._model.max_history // 2 + OWN_TOKENS)

    def on_device(self, room: BatchRoom) -> Packed:
        """See StaticSequences."""
        return on_device(self._shape(room), self._ranks.device)

    def write_ids(self, batch: Packed, ids: Tensor) -> None:
        """See StaticSequences."""
        write_ids(batch, self._artist, self._album, ids)

    def labels(self, batch: Packed) -> Tensor:
        """See StaticSequences."""
        return batch.samples[LABEL].float()

    # Stages 3 and 5

    def forward_backward(
        self, context: DenseContext, batch: Packed, tokens: int, rows: Tensor, gradients: Tensor
    ) -> SequenceBackward:
        """See StaticSequences."""
        with torch.enable_grad():
            # Separate leaves: the gradient of a slice would be a tensor of all rows.
            leaves = Embedded.in_order(rows, self._samples, self.network.dtype).leaves()
            dense = dense_batch(batch, tokens, self._model)
            logits = self.network.scores(leaves, dense)
            loss = loss_of(logits, dense.labels, self._model)
        if self._predictions is not None:
            torch.sigmoid(logits.detach(), out=self._predictions)
        losses = loss.detach().view(1)
        self._losses.index_copy_(0, self._launched % LOSSES_KEPT, losses)
        self._launched += 1
        with context.streams.beside(GUARD) as guarded:
            context.guard.look(losses)
        weights = list(self.bucket.parameters.values())
        of_all = torch.autograd.grad(loss, [*weights, *leaves.flat()])
        of_rows = Embedded.of(of_all[len(weights) :])
        into = Embedded.in_order(gradients, self._samples, gradients.dtype)
        copy_together([*into.tokens, into.context], [*of_rows.tokens, of_rows.context])
        torch._foreach_add_(list(into.candidates), list(of_rows.candidates))
        return SequenceBackward(list(of_all[: len(weights)]), guarded, losses)

    def before_step(self, iteration: int) -> None:
        """See StaticSequences."""
        seed_dropout(self._config, self._ranks.rank, iteration)

    def update(self, context: DenseContext, backward: SequenceBackward) -> None:
        """See StaticSequences."""
        with record_function("dense_update"):
            self.bucket.update(backward.gradients, context.learning_rate, context.guard.watch)

    def logits(self, batch: Packed, tokens: int, rows: Tensor) -> Tensor:
        """See StaticSequences."""
        self.network.eval()
        try:
            embedded = Embedded.in_order(rows, self._samples, self.network.dtype)
            return self.network.scores(embedded, dense_batch(batch, tokens, self._model))
        finally:
            self.network.train()

    def loss(self, step: int) -> Tensor:
        """See StaticSequences."""
        return self._losses[step % LOSSES_KEPT]

    def keep_predictions(self) -> Tensor:
        """See StaticSequences."""
        self._predictions = torch.zeros(self._samples, device=self._ranks.device)
        return self._predictions

    # State

    @property
    def table_keys(self) -> Sequence[str]:
        """See StaticSequences: the keys of TorchRec's EmbeddingCollection."""
        return [f"embeddings.embeddings.{table.name}.weight" for table in tables(self._model)]

    def memory(self) -> list[Tensor]:
        """See StaticSequences."""
        return [*self.bucket.memory(), self._launched, self.tallies.counts]

    def weights(self) -> Mapping[str, Tensor]:
        """See StaticSequences."""
        return {f"dense.{name}": weight for name, weight in self.bucket.views.items()}

    def take_weights(self) -> None:
        """See StaticSequences."""
        self.bucket.round_weights()

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """See StaticSequences: the names of torch.optim.Adam's state after the weight's key."""
        return {
            f"dense.{name}.{kind}": value
            for name, of_weight in self.bucket.state_views().items()
            for kind, value in of_weight.items()
        }


def _distinct_rows(packed: Packed) -> int:
    """Returns the largest number of rows of all tables that a packed batch can name: an item has one artist and one
    album."""
    items = torch.cat([packed.item, packed.samples[CANDIDATE]]).unique()
    return len(EVENT_TABLES) * len(items) + len(CONTEXT_TABLES) * packed.layout.samples
