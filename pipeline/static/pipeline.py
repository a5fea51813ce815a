"""The five-stage pipeline on the static EBC: every stage of fixed shapes, eager or as one CUDA graph an iteration.

1 input dist               of the next batch, beside stages 2 to 5
2 embedding forward        the bottom MLP beside it, and the all-gather of the last dense update where there is one
3 dense forward/backward   where there is room, the top MLP's weight gradients and update beside its later part; in peer
                           memory those of the cross layers too
4 embedding backward       the other weight gradients beside it
5 dense update             beside 3 and 4

Large batches go through stages 2 to 4 in two halves: what one half moves over the links or through memory hides behind
the other half's GEMMs. Table update and weight gradients are of the whole batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dlrm_bench.dlrm.buckets import Bucket, DenseState
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.embedding.plan import plan_for
from dlrm_bench.dlrm.embedding.pooled_exchange import Peers
from dlrm_bench.dlrm.embedding.static_ebc import DistributedIds, StaticEBC
from dlrm_bench.dlrm.embedding.table_memory import check_tables_fit, device_memory_bytes, table_memory_bytes
from dlrm_bench.dlrm.embedding.torchrec_plan import torchrec_plan
from dlrm_bench.dlrm.explicit_dense import ExplicitDense
from dlrm_bench.dlrm.model import torchrec_names
from dlrm_bench.dlrm.peer_memory import PeerMemory
from dlrm_bench.dlrm.ranks import Ranks
from dlrm_bench.pipeline.interface import check_device
from dlrm_bench.pipeline.state import ModelState, Part, Parts, gather, scatter, table_key
from dlrm_bench.pipeline.static.evaluation import Evaluation
from dlrm_bench.pipeline.static.fetch import BatchFeed
from dlrm_bench.pipeline.static.graphs import Graphs
from dlrm_bench.pipeline.static.memory import memory_gb
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.static.streams import MAX_IN_FLIGHT, IterationStreams
from dlrm_bench.pipeline.static.table_load import embedding_load

# Real iterations that run eagerly before the capture: NCCL and cuBLAS set themselves up in them.
_EAGER_ITERATIONS = 3

# Local batches from here on keep every multiprocessor busy in the dense backward: weight gradients beside it gain
# nothing there, but two halves of the batch do. Below, weight gradients find room, and the top MLP's reduce-scatter can
# start early.
_FILLING_BATCH = 2048
# The streams of the batch's parts from the embedding forward to the embedding backward, and of their lookups.
_PART_STREAMS = ("main", "second half")
_LOOKUP_STREAMS = ("main", "second lookup")

_ALL = slice(None)
_MASTER_AND_STATE: tuple[DenseState, DenseState] = ("master", "state")


@dataclass(slots=True)
class _Slot:
    """What one batch in flight occupies on the device; batch n uses slot n % 2."""

    batch: Batch
    """As it came from the host."""
    ids: DistributedIds


class StaticPipeline:
    """See dlrm_bench.pipeline.interface.Pipeline."""

    def __init__(self, config: TrainingConfig, options: StaticOptions, ranks: Ranks) -> None:
        """Collective over all ranks. ValueError where the options need a GPU and there is none."""
        self._config, self._options, self._ranks, device = config, options, ranks, ranks.device
        check_device(options, device)
        model, batch_size = config.model, config.local_batch_size
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        global_batch_size = batch_size * ranks.world_size
        check_tables_fit(model, config.optimizer, device_memory_bytes(ranks), device)
        self._fills_gpu = batch_size >= _FILLING_BATCH
        parts = 2 if self._fills_gpu and options.presort_ids and batch_size % 2 == 0 else 1
        rows = [slice(i * batch_size // parts, (i + 1) * batch_size // parts) for i in range(parts)]
        self._batch_parts = list(zip(_PART_STREAMS, _LOOKUP_STREAMS, rows, strict=False))
        self._last = self._batch_parts[-1][0]
        if options.plan == "torchrec":
            self._plan = torchrec_plan(config, ranks)
        else:
            self._plan = plan_for(
                config, ranks.world_size, table_memory_bytes(ranks), replicate=not options.peer_memory
            )
        memory = PeerMemory(ranks) if options.peer_memory else None
        self._memory = memory
        self.dense = ExplicitDense(model, config.seed, batch_size, global_batch_size, self._dtype, ranks, parts, memory)
        inputs = self.dense.x0s
        self.ebc = StaticEBC(
            model,
            config.optimizer,
            self._plan,
            ranks,
            batch_size,
            config.seed,
            self._dtype,
            options.presort_ids,
            config.data.variable_lengths,
            parts,
            Peers(memory, inputs) if memory and inputs else None,
        )
        self._rate = config.optimizer.learning_rate
        self._slots = [self._new_slot() for _ in range(2)]
        self._streams = IterationStreams(device, options.overlap)
        self._feed = BatchFeed(device, MAX_IN_FLIGHT)
        make_graphs = None
        if options.cuda_graph != "none":
            fallback = options.cuda_graph == "try"
            make_graphs = partial(Graphs, ranks=ranks, stream=self._streams.main, fallback=fallback)
        iterations = [partial(self._iteration, self._slots[i], self._slots[1 - i]) for i in range(2)]
        self._graphs = make_graphs("iteration", iterations) if make_graphs else None
        self._eval = Evaluation([self._new_slot(sorts=False) for _ in range(2)], self._forward, ranks, make_graphs)
        self._step = 0
        self._named = 0

    def prepare(self, batch: Batch) -> Batch:
        """The batch itself: its one buffer in pinned memory is all that travels."""
        return batch

    def train_step(self, batches: Iterator[Batch]) -> Tensor:
        """One iteration; reads one batch ahead of the one it trains on. ValueError for batches behind the end: what
        ran ahead then had none to go on with."""
        if self._named == 0:
            self._prime(batches)
        if self._step == self._named:
            if self._step > 0 and next(batches, None) is not None:
                raise ValueError("the batches of this static pipeline have ended: give one iterator over all of them")
            raise StopIteration
        now, ahead = self._slots[self._step % 2], self._slots[(self._step + 1) % 2]
        self._streams.limit_run_ahead()
        self._name(next(batches, None))
        if self._graphs is not None and self._step >= _EAGER_ITERATIONS:
            self._graphs.run(self._step % 2)
        else:
            self._iteration(now, ahead)
        self._streams.end_iteration()
        self._step += 1
        return self.dense.loss.clone()

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Forward only; the batches of the training in flight keep their slots."""
        for bucket in (*self.dense.cross.values(), *self.dense.top.values()):
            bucket.all_gather()
        yield from self._eval.run(batches)

    def set_learning_rate(self, value: float) -> None:
        """The learning rate of all weights from the next step on; all ranks give the same. ValueError names a bad one.

        Nearly everything reads it from the device. FBGEMM's update, without presort_ids, has it built into the captured
        iteration, which is then captured anew; rank 0 says so.
        """
        replace(self._config.optimizer, learning_rate=value)  # its checks
        if value == self._rate:
            return
        self._rate = value
        self.ebc.set_learning_rate(value)
        if self._graphs is not None and not self._options.presort_ids:
            self._graphs.forget(f"learning rate {value}")

    def describe(self) -> dict[str, Any]:
        """The plan; each rank's embedding time, predicted and measured, and GB of memory; the graphs. Collective."""
        names, graphs = self._config.model.feature_names, {"iteration": self._graphs, "evaluation": self._eval.graphs}
        memory = memory_gb(
            self._ranks,
            {
                "tables": [part.weights for part in self.ebc.tables()],
                "optimizer_state": [part.state for part in self.ebc.tables()],
                "batches": [*self._slots, *self._eval.slots],
                "dense_weights": [bucket.tensors() for bucket in self.dense.buckets],
                # Beside other things what of batches and dense weights other ranks write.
                **({"peer_memory": self._memory.own} if self._memory is not None else {}),
            },
        )
        return {
            "plan": [
                [{"table": names[s.table], "column": s.column, "columns": s.columns} for s in self._plan.of_rank(rank)]
                for rank in range(self._ranks.world_size)
            ],
            **embedding_load(self._config, self.ebc, [slot.ids for slot in self._slots], self._ranks),
            "cuda_graphs": {name: graph.describe() for name, graph in graphs.items() if graph is not None},
            "memory_gb": memory,
        }

    def close(self) -> None:
        """Destroys the graphs."""
        for graphs in (self._graphs, self._eval.graphs):
            if graphs is not None:
                graphs.close()

    # State

    def state_dict(self) -> ModelState:
        """Weights and optimizer state after the last step, whole, on rank 0. Collective; see pipeline/state.py."""
        weights, optimizer = (self._parts(which, self.dense.state_dict(which)) for which in _MASTER_AND_STATE)
        return gather(weights, optimizer, self._ranks)

    def load_state_dict(self, state: ModelState) -> None:
        """Continues from rank 0's `state`, of any pipeline; batches in flight stay. Collective; see pipeline/state.py.

        ValueError where it is of another model.
        """
        dense = [self.dense.state_dict(which) for which in _MASTER_AND_STATE]
        weights, optimizer = map(self._parts, _MASTER_AND_STATE, dense)
        scatter(state, weights, optimizer, self._ranks)
        for which, values in zip(_MASTER_AND_STATE, dense, strict=True):
            self.dense.load_state_dict(values, which)

    def _parts(self, which: DenseState, dense: dict[str, Tensor]) -> Parts:
        """Weights or optimizer state of the tables, as they lie, and of the dense network, from whole copies."""
        model, names = self._config.model, torchrec_names(self._config.model)
        held = {part.shard: part.weights if which == "master" else part.state for part in self.ebc.tables()}
        parts = {names[name]: [Part.whole(value)] for name, value in dense.items()}
        state_columns = self._config.optimizer.state_columns
        for s in self._plan.shards:
            columns = s.columns if which == "master" else state_columns(s.columns)
            if columns == 0:
                continue
            part = Part(s.rank, (0, s.column), (model.rows[s.table], columns), held.get(s))
            parts.setdefault(table_key(model, s.table), []).append(part)
        for shard, tensor in held.items():
            if shard.table in self._plan.replicated:
                parts[table_key(model, shard.table)] = [Part.whole(tensor)]
        return parts

    # The five stages

    def _iteration(self, now: _Slot, ahead: _Slot) -> None:
        """Trains on the batch of `now`, and brings the next one to `ahead`."""
        with self._streams.beside("input_dist"):
            self._input_dist(ahead)
        with record_function("embedding_forward"):
            pooled = self._embedding_forward(now)
        with record_function("dense_forward_backward"), torch.no_grad():
            gradients = self._dense_forward_backward(now)
        with record_function("dense_update"):
            gradients += self._dense_update(now)
        with record_function("embedding_backward"):
            self._embedding_backward(now, pooled, gradients)
        self._streams.join_all()

    def _embedding_forward(self, now: _Slot) -> Tensor | None:
        """What a part's lookup gives, for the embedding backward."""
        dense, streams = self.dense, self._streams
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
                pooled.append(self.ebc.lookup(now.ids, part))
        for part, (stream, lookup, rows) in enumerate(self._batch_parts):
            with streams.on(stream):
                streams.join(lookup)
                self.ebc.output_dist(pooled[part], self._interaction_input(rows), part)
        return pooled[0]

    def _dense_forward_backward(self, now: _Slot) -> list[str]:
        """The streams of the weight gradients of cross layers."""
        dense, streams, layers = self.dense, self._streams, range(self._config.model.cross_layers)
        gradients: list[str] = []
        # A layer in a bucket of its own has its exchange behind what follows.
        each_layer = self._memory is not None and not self._fills_gpu
        for part, (stream, _, rows) in enumerate(self._batch_parts):
            with streams.on(stream):
                streams.join("local")
                streams.join("cross")
                for layer in layers:
                    dense.cross_forward(layer, part)
                streams.join("top 0")
                dense.loss_backward(dense.top_hidden_forward(part), now.batch.labels[rows], part)
                dense.top_backward(part)
                if not self._fills_gpu:
                    self._update_top()
                for layer in reversed(layers):
                    dense.cross_backward(layer, part)
                    if each_layer:
                        gradients += self._update_cross((layer,))
        # Beside the all-to-all and the table update: beside the chain above they would delay it by as much.
        if self._fills_gpu:
            self._update_top(self._last)
        if not each_layer:
            for of_bucket in reversed(dense.cross):
                gradients += self._update_cross(of_bucket, self._last)
        return gradients

    def _dense_update(self, now: _Slot) -> list[str]:
        """Of what is left: the bottom MLP and the replicated tables. The streams of the weight gradients."""
        gradients = self._bottom_gradients(self._last)
        with self._streams.beside("bottom update", *gradients):
            self._update(self.dense.bottom)
        with self._streams.beside("replicated", self._last):
            self.ebc.update_replicated(now.ids, self._interaction_gradient())
        return gradients

    def _embedding_backward(self, now: _Slot, pooled: Tensor | None, gradients: list[str]) -> None:
        """gradients: the streams of weight gradients."""
        for part, (stream, _, rows) in enumerate(self._batch_parts):
            with self._streams.on(stream):
                self.ebc.gradient_dist(self._interaction_gradient(rows), part)
        # The update's many small blocks leave no room for GEMMs: where the weight gradients take no longer than the
        # all-to-all, they go first. So does the reduce-scatter behind them, which NCCL launches before the last
        # all-reduce; the kernels of peer memory get along with few multiprocessors.
        first = [] if self._fills_gpu else gradients
        if first and self._memory is None:
            first = [*first, "bottom update"]
        with self._streams.beside("tables", self._last, *first):
            self.ebc.update(now.ids, pooled)

    def _update_top(self, *after: str) -> None:
        with self._streams.beside("top gradients", *after):
            for layers, bucket in self.dense.top.items():
                self.dense.top_weight_gradients(layers)
                with self._streams.beside(f"top {layers[0]}"), record_function("dense_update"):
                    self._update(bucket)

    def _update_cross(self, layers: tuple[int, ...], *after: str) -> list[str]:
        """Weight gradients on the streams of these names, beside one another where there is room, and the update of
        the layers' bucket."""
        names = ["cross gradients" if self._fills_gpu else f"cross {layer} gradients" for layer in layers]
        for layer, name in zip(layers, names, strict=True):
            with self._streams.beside(name, *after):
                self.dense.cross_weight_gradients(layer)
        with self._streams.beside(f"cross {layers[0]}", *names), record_function("dense_update"):
            self._update(self.dense.cross[layers])
        return names

    def _bottom_gradients(self, after: str) -> list[str]:
        """On the streams of these names."""
        names = ["bottom"]
        with self._streams.beside("bottom", after):
            self.dense.bottom_backward()
            for layer in range(len(self._config.model.bottom_mlp)):
                names.append(f"bottom {layer} gradients")
                with self._streams.beside(names[-1]):
                    self.dense.bottom_weight_gradient(layer)
        return names

    def _update(self, bucket: Bucket) -> None:
        bucket.update(self.ebc.learning_rate, self._config.optimizer.eps)

    def _local_forward(self, slot: _Slot) -> None:
        """What needs no other rank: the replicated tables and the bottom MLP."""
        self.ebc.lookup_replicated(slot.ids, self._interaction_input())
        self.dense.bottom_forward(slot.batch.dense)

    def _input_dist(self, slot: _Slot) -> None:
        """Of the next batch, which `slot` then holds."""
        with record_function("input_dist"):
            self._feed.fetch(slot.batch)
            self.ebc.input_dist(slot.batch.ids, slot.ids)

    def _forward(self, slot: _Slot) -> Tensor:
        """Logits of `slot`'s batch, by weights that were gathered before."""
        with record_function("input_dist"):
            self.ebc.input_dist(slot.batch.ids, slot.ids)
        self._local_forward(slot)
        logits = []
        for part, (_, _, rows) in enumerate(self._batch_parts):
            self.ebc.output_dist(self.ebc.lookup(slot.ids, part), self._interaction_input(rows), part)
            for layer in range(self._config.model.cross_layers):
                self.dense.cross_forward(layer, part)
            logits.append(self.dense.top_forward(part))
        if self._memory is not None:  # the next lookups overwrite what this one reads
            self._memory.barrier("evaluated")
        return torch.cat(logits)

    def _interaction_input(self, rows: slice = _ALL) -> Tensor:
        return self.dense.x0[rows, self._config.model.embedding_dim :]

    def _interaction_gradient(self, rows: slice = _ALL) -> Tensor:
        return self.dense.dx0[rows, self._config.model.embedding_dim :]

    # Batches in flight

    def _new_slot(self, sorts: bool = True) -> _Slot:
        """sorts: whether its ids are sorted where those of the training are."""
        size, model = self._config.local_batch_size, self._config.model
        batch = Batch.over(Batch.empty(size, model).storage.zero_().to(self._ranks.device), size, model)
        ids = self.ebc.empty_ids()
        if not sorts:
            ids = replace(ids, sorted_ids=None, sorted_bags=None)
        return _Slot(batch, ids)

    def _prime(self, batches: Iterator[Batch]) -> None:
        first = next(batches, None)
        if first is not None:
            self._name(first)
            self._input_dist(self._slots[0])

    def _name(self, batch: Batch | None) -> None:
        """For the next input dist."""
        self._feed.name(batch)
        self._named += batch is not None
