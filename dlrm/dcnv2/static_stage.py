"""DLRM-DCNv2 as stage 3 of the static pipeline: the streams and the order of the dense network's parts.

3 dense forward/backward   if there is room, the top MLP's weight gradients and update beside its later part; with peer
                           memory also those of the cross layers
4 embedding backward       the other weight gradients beside it
5 dense update             beside 3 and 4

StaticSchedule makes the decisions, ExplicitDense has the kernels.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.profiler import record_function

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.data.batch import Batch, BatchLayout
from dlrm_bench.dlrm.dcnv2 import concurrency as on
from dlrm_bench.dlrm.dcnv2.config import DcnTraining
from dlrm_bench.dlrm.dcnv2.explicit_dense import LOSSES_KEPT, ExplicitDense
from dlrm_bench.dlrm.dcnv2.fp8_dense import Fp8Dense
from dlrm_bench.dlrm.dcnv2.state_keys import table_key, torchrec_names
from dlrm_bench.dlrm.dcnv2.static_schedule import static_schedule
from dlrm_bench.dlrm.dense.buckets import Bucket, DenseState
from dlrm_bench.dlrm.dense.static_dense import DenseBackward, DenseContext, EmbeddingForward
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.streams import Branch, Stream
from dlrm_bench.kernels.dense.fp8 import require_products
from dlrm_bench.kernels.peer_tensors import PeerTensors


class DcnStage:
    """See dlrm_bench.dlrm.dense.static_dense.StaticDense."""

    def __init__(
        self, config: DcnTraining, options: StaticDenseOptions, ranks: Ranks, memory: PeerMemory | None
    ) -> None:
        """Collective. memory: given if options.peer_memory. ValueError for --fp8 if the GPU has no 8-bit products."""
        device, self._config, self._memory = ranks.device, config, memory
        if options.eight_bits:
            require_products(device)
        self._schedule = static_schedule(config.local_batch_size, options)
        self.shape = BatchShape(
            samples=config.local_batch_size,
            dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
            parts=self._schedule.parts,
        )
        self.layout = BatchLayout(config.local_batch_size, config.model)
        make = Fp8Dense if options.eight_bits else ExplicitDense
        self.dense: ExplicitDense = make(config.model, config.seed, self.shape, ranks, memory)
        self._layers, dim = range(config.model.cross_layers), config.model.embedding_dim
        # The interaction's input that follows the bottom MLP's output.
        self.inputs, self.gradients = self.dense.x0[:, dim:], self.dense.dx0[:, dim:]

    # Memory

    @property
    def peer_inputs(self) -> tuple[PeerTensors, int] | None:
        """See StaticDense."""
        x0s = self.dense.x0s
        return None if x0s is None else (x0s, self._config.model.embedding_dim)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """See StaticDense."""
        return self.dense.buckets

    @property
    def tallies(self) -> Tallies:
        """See StaticDense."""
        return self.dense.tallies

    def loss(self, step: int) -> Tensor:
        """See StaticDense."""
        return self.dense.mean_losses[step % LOSSES_KEPT]

    def keep_predictions(self) -> Tensor:
        """See StaticDense."""
        self.dense.predictions = torch.zeros(self.shape.samples, device=self.dense.x0.device)
        return self.dense.predictions

    # Training

    def gather_beside(self, context: DenseContext) -> Sequence[Branch]:
        """See StaticDense: the all-gathers of the cross layers' and the top MLP's weights, if there are any; or the
        8-bit copies of both."""
        dense, streams, weights = self.dense, context.streams, list[Branch]()
        if self._memory is None:
            with streams.beside(on.GATHER_CROSS) as cross:
                for bucket in dense.cross.values():
                    bucket.all_gather()
            with streams.beside(on.top_update(0), cross) as top:
                for bucket in dense.top.values():
                    bucket.all_gather()
            weights = [cross, top]
        if dense.in_eight_bits:
            with streams.beside(on.ROUND_WEIGHTS, *weights) as copies:
                dense.copy_weights()
            weights = [copies]
        return weights

    def local_forward(self, batch: Batch) -> None:
        """See StaticDense: the bottom MLP."""
        self.dense.bottom_forward(batch.dense)

    def forward_backward(self, context: DenseContext, batch: Batch, after: EmbeddingForward) -> DenseBackward:
        """See StaticDense."""
        dense, streams, schedule, last = self.dense, context.streams, self._schedule, after.parts[-1]
        for part, rows in enumerate(self.shape.rows):
            with streams.on(after.parts[part]):
                streams.join(after.local, *after.weights[:1])
                for layer in self._layers:
                    dense.cross_forward(layer, part)
                streams.join(*after.weights[1:])
                dense.loss_backward(dense.top_hidden_forward(part), batch.labels[rows], part)
                if part == schedule.parts - 1:
                    with streams.beside(on.GUARD, *after.parts[:part]) as guarded:
                        context.guard.look(dense.losses)
                    backward = DenseBackward(guarded)
                dense.top_backward(part)
                if schedule.top_update_within_chain:
                    self._update_top(context, backward)
                for layer in reversed(self._layers):
                    dense.cross_backward(layer, part)
                    if schedule.cross_updates_within_chain:
                        self._update_cross(context, backward, (layer,))
        if not schedule.top_update_within_chain:
            self._update_top(context, backward, last)
        if not schedule.cross_updates_within_chain:
            for of_bucket in reversed(dense.cross):
                self._update_cross(context, backward, of_bucket, last)
        return backward

    def finish(self, context: DenseContext, backward: DenseBackward, after: Branch) -> None:
        """See StaticDense: the bottom MLP's backward and update."""
        with context.streams.beside(on.BOTTOM, after) as bottom:
            gradients = [bottom]
            self.dense.bottom_backward()
            for layer in range(len(self._config.model.bottom_mlp)):
                with context.streams.beside(on.bottom_gradients(layer)) as branch:
                    self.dense.bottom_weight_gradient(layer)
                gradients.append(branch)
        update = self._update(context, backward, on.BOTTOM_UPDATE, self.dense.bottom, *gradients)
        if self._schedule.tables_after_weight_gradients:
            backward.before_tables += gradients
        if self._schedule.tables_after_bottom_update:
            backward.before_tables.append(update)

    def _update_top(self, context: DenseContext, backward: DenseBackward, *after: Branch) -> None:
        with context.streams.beside(on.TOP_GRADIENTS, *after):
            for layers, bucket in self.dense.top.items():
                self.dense.top_weight_gradients(layers)
                self._update(context, backward, on.top_update(layers[0]), bucket)

    def _update_cross(
        self, context: DenseContext, backward: DenseBackward, layers: tuple[int, ...], *after: Branch
    ) -> None:
        """Computes the layers' weight gradients, in parallel if there is room, and updates their bucket."""
        gradients = []
        for layer in layers:
            stream = on.cross_gradients(layer) if self._schedule.cross_gradients_apart else on.CROSS_GRADIENTS
            with context.streams.beside(stream, *after) as branch:
                self.dense.cross_weight_gradients(layer)
            gradients.append(branch)
        self._update(context, backward, on.cross_update(layers[0]), self.dense.cross[layers], *gradients)
        if self._schedule.tables_after_weight_gradients:
            backward.before_tables += gradients

    def _update(
        self, context: DenseContext, backward: DenseBackward, stream: Stream, bucket: Bucket, *after: Branch
    ) -> Branch:
        with context.streams.beside(stream, backward.guarded, *after) as update, record_function("dense_update"):
            bucket.update(context.learning_rate, self._config.optimizer.eps, context.guard.watch)
        backward.updates.append(update)
        return update

    # Evaluation

    def gather(self) -> None:
        """See StaticDense."""
        for bucket in (*self.dense.cross.values(), *self.dense.top.values()):
            bucket.all_gather()

    def copy_weights(self) -> None:
        """See StaticDense: rounds weights to 8 bits, if products have 8-bit factors."""
        self.dense.copy_weights()

    def logits(self, part: int) -> Tensor:
        """See StaticDense."""
        for layer in self._layers:
            self.dense.cross_forward(layer, part)
        return self.dense.top_forward(part)

    # State

    @cached_property
    def _keys(self) -> dict[str, str]:
        return torchrec_names(self._config.model)

    @property
    def dense_keys(self) -> Sequence[str]:
        """See StaticDense."""
        return list(self._keys.values())

    @property
    def table_keys(self) -> Sequence[str]:
        """See StaticDense."""
        return [table_key(self._config.model, table) for table in range(self._config.model.num_features)]

    def state_dict(self, which: DenseState) -> dict[str, Tensor]:
        """See StaticDense: under the keys of TorchRec's DLRM_DCN."""
        return {self._keys[name]: value for name, value in self.dense.state_dict(which).items()}

    def load_state_dict(self, values: dict[str, Tensor], which: DenseState) -> None:
        """See StaticDense."""
        self.dense.load_state_dict({name: values[key] for name, key in self._keys.items()}, which)
