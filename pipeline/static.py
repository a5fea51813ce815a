"""The five-stage pipeline on the static EBC: every stage of fixed shapes, eager or as one CUDA graph an iteration.

1 input dist               of the next batch, beside stages 2 to 5
2 embedding forward        the bottom MLP and the all-gather of the last dense update beside it
3 dense forward/backward   where there is room, the top MLP's weight gradients and update beside its later part
4 embedding backward       the other weight gradients beside it
5 dense update             beside 3 and 4
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dlrm.config import RunConfig
from dlrm.data.batch import Batch
from dlrm.embedding.capacity import check_tables_fit, device_memory_bytes
from dlrm.embedding.plan import make_plan
from dlrm.embedding.static_ebc import DistributedIds, StaticEBC
from dlrm.embedding.torchrec_plan import torchrec_plan
from dlrm.explicit_dense import Bucket, DenseState, ExplicitDense
from dlrm.model import torchrec_names
from dlrm.ranks import Ranks
from pipeline.evaluation import Evaluation
from pipeline.graphs import Graphs
from pipeline.memory import memory_gb
from pipeline.state import ModelState, Part, Parts, gather, scatter, table_key
from pipeline.table_load import embedding_load

# Real iterations that run eagerly before the capture: NCCL and cuBLAS set themselves up in them.
_EAGER_ITERATIONS = 3

# CUDA priorities of the streams, lower first. What everything waits for goes before what fills gaps. The table update
# is bound by memory and shares the multiprocessors with weight gradients; small kernels must not queue behind it.
_PRIORITY = {
    "main": -2,
    "local": -2,
    "top_weights": -2,
    "cross_weights": -2,
    "weights": -1,
    "input_dist": 0,
    "tables": 0,
}
# Local batches from here on keep every multiprocessor busy in the dense backward: weight gradients beside it gain
# nothing there. Below, they find room, and the top MLP's reduce-scatter can start early.
_FILLING_BATCH = 2048

_MASTER_AND_STATE: tuple[DenseState, DenseState] = ("master", "state")


@dataclass(slots=True)
class _Slot:
    """What one batch in flight occupies on the device; batch n uses slot n % 2."""

    staging: Batch
    """The batch as it came from the host."""
    ids: DistributedIds
    dense: Tensor
    labels: Tensor


class StaticPipeline:
    """See pipeline.interface.Pipeline."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        """Collective over all ranks."""
        self._config, self._ranks, device = config, ranks, ranks.device
        model, batch_size = config.model, config.local_batch_size
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        global_batch_size = batch_size * ranks.world_size
        check_tables_fit(model, config.optimizer, device_memory_bytes(ranks), device)
        if config.plan == "torchrec":
            self._plan = torchrec_plan(config, ranks)
        else:
            self._plan = make_plan(
                model, ranks.world_size, global_batch_size, config.pooled_bytes, config.optimizer.embedding
            )
        self.ebc = StaticEBC(
            model,
            config.optimizer,
            self._plan,
            ranks,
            batch_size,
            config.seed,
            self._dtype,
            config.presort_ids,
            config.data.variable_lengths,
        )
        self.dense = ExplicitDense(model, config.seed, batch_size, global_batch_size, self._dtype, ranks)
        self._rate = config.optimizer.learning_rate
        self._learning_rate = torch.tensor([config.optimizer.learning_rate], device=device)
        self._loss = torch.zeros((), device=device)
        self._slots = [self._new_slot() for _ in range(2)]
        self._streams = _Streams(device, config.overlap)
        make_graphs = None
        if config.cuda_graph == "iteration":
            make_graphs = partial(Graphs, ranks=ranks, stream=self._streams.main, fallback=config.cuda_graph_fallback)
        iterations = [partial(self._iteration, self._slots[i], self._slots[1 - i]) for i in range(2)]
        self._graphs = make_graphs("iteration", iterations) if make_graphs else None
        self._eval = Evaluation([self._new_slot(sorts=False) for _ in range(2)], self._forward, ranks, make_graphs)
        self._fills_gpu = batch_size >= _FILLING_BATCH
        self._step = 0
        self._fetched = 0

    def prepare(self, batch: Batch) -> Batch:
        """The batch itself: its one buffer in pinned memory is all that travels."""
        return batch

    def train_step(self, batches: Iterator[Batch]) -> Tensor:
        """One iteration; reads two batches ahead of the one it trains on."""
        if self._fetched == 0:
            self._prime(batches)
        if self._step == self._fetched:
            raise StopIteration
        now, ahead = self._slots[self._step % 2], self._slots[(self._step + 1) % 2]
        self._streams.wait_for_copy()
        if self._graphs is not None and self._step >= _EAGER_ITERATIONS:
            self._graphs.run(self._step % 2)
        else:
            self._iteration(now, ahead)
        self._streams.end_iteration()
        self._step += 1
        self._fetch(batches)
        return self._loss.clone()

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Forward only; the batches of the training in flight keep their slots."""
        self.dense.cross.all_gather()
        self.dense.top.all_gather()
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
        self._learning_rate.fill_(value)
        self.ebc.set_learning_rate(value)
        if self._graphs is not None and not self._config.presort_ids:
            self._graphs.forget(f"learning rate {value}")

    def describe(self) -> dict[str, Any]:
        """The plan; each rank's embedding time, predicted and measured, and GB of memory; the graphs. Collective."""
        names, graphs = self._config.model.feature_names, {"iteration": self._graphs, "evaluation": self._eval.graphs}
        memory = memory_gb(
            self._ranks,
            {
                "tables": [part.weights for part in self.ebc.tables()],
                "optimizer_state": [part.state for part in self.ebc.tables()],
                "ids_and_staging": [*self._slots, *self._eval.slots],
                "dense_weights": [bucket.tensors() for bucket in self.dense.buckets],
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

    # State

    def state_dict(self) -> ModelState:
        """Weights and optimizer state after the last step, whole, on rank 0. Collective; see pipeline.state."""
        weights, optimizer = (self._parts(which, self.dense.state_dict(which)) for which in _MASTER_AND_STATE)
        return gather(weights, optimizer, self._ranks)

    def load_state_dict(self, state: ModelState) -> None:
        """Goes on from rank 0's `state`, of whatever pipeline; batches in flight stay. Collective; see pipeline.state.

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
        """Trains on the batch of `now` and distributes the ids of the one in `ahead`."""
        dense, streams, config = self.dense, self._streams, self._config
        update = partial(Bucket.update, learning_rate=self._learning_rate, eps=config.optimizer.eps)
        layers = range(config.model.cross_layers)
        with streams.beside("input_dist"):
            self._input_dist(ahead)
        with record_function("embedding_forward"):
            with streams.beside("cross_weights"):
                dense.cross.all_gather()
            with streams.beside("top_weights", after="cross_weights"):
                dense.top.all_gather()
            with streams.beside("local"):
                self._local_forward(now)
            pooled = self.ebc.lookup(now.ids)
            self.ebc.regroup(self.ebc.output_dist(pooled), self._interaction_input())
        streams.join("local", "cross_weights")
        with record_function("dense_forward_backward"), torch.no_grad():
            dense.cross_forward()
            streams.join("top_weights")
            grad = dense.top_backward(dense.loss_backward(dense.top_forward(), now.labels, self._loss))
            if not self._fills_gpu:
                self._update_top(update)
            for layer in reversed(layers):
                grad = dense.cross_backward(layer, grad)
            # Beside the all-to-all and the table update: beside the chain above they would delay it by as much.
            if self._fills_gpu:
                self._update_top(update)
            with streams.beside("weights"):
                for layer in layers:
                    dense.cross_weight_gradients(layer)
        pooled_grad = grad[:, config.model.embedding_dim :]
        with streams.beside("local"), record_function("dense_update"):
            dense.bottom_backward()
            update(dense.bottom)
            self.ebc.update_replicated(now.ids, pooled_grad)
        with record_function("embedding_backward"):
            received = self.ebc.gradient_dist(pooled_grad)
            with streams.beside("cross_weights", after="weights"), record_function("dense_update"):
                update(dense.cross)
            with streams.beside("tables"):
                self.ebc.update(now.ids, pooled, received)
        streams.join("input_dist", "local", "top_weights", "cross_weights", "tables")

    def _update_top(self, update: Callable[[Bucket], None]) -> None:
        with self._streams.beside("weights"):
            self.dense.top_weight_gradients()
        with self._streams.beside("top_weights", after="weights"), record_function("dense_update"):
            update(self.dense.top)

    def _local_forward(self, slot: _Slot) -> None:
        """What needs no other rank: the replicated tables and the bottom MLP."""
        self.ebc.lookup_replicated(slot.ids, self._interaction_input())
        self.dense.bottom_forward(slot.dense)

    def _input_dist(self, slot: _Slot) -> None:
        with record_function("input_dist"):
            slot.dense.copy_(slot.staging.dense)
            slot.labels.copy_(slot.staging.labels)
            self.ebc.input_dist(slot.staging.ids, slot.ids)

    def _forward(self, slot: _Slot) -> Tensor:
        """Logits of the batch in `slot`'s staging, by weights that were gathered before."""
        self._input_dist(slot)
        self._local_forward(slot)
        self.ebc.regroup(self.ebc.output_dist(self.ebc.lookup(slot.ids)), self._interaction_input())
        self.dense.cross_forward()
        return self.dense.top_forward()

    def _interaction_input(self) -> Tensor:
        return self.dense.x0[:, self._config.model.embedding_dim :]

    # Batches in flight

    def _new_slot(self, sorts: bool = True) -> _Slot:
        """sorts: whether its ids are sorted where those of the training are."""
        batch = Batch.empty(self._config.local_batch_size, self._config.model)
        staging = Batch.over(batch.storage.to(self._ranks.device), self._config.local_batch_size, self._config.model)
        ids = self.ebc.empty_ids()
        if not sorts:
            ids = replace(ids, sorted_ids=None, sorted_bags=None)
        return _Slot(staging, ids, torch.zeros_like(staging.dense), torch.zeros_like(staging.labels))

    def _prime(self, batches: Iterator[Batch]) -> None:
        self._fetch(batches)
        self._streams.wait_for_copy()
        if self._fetched:
            self._input_dist(self._slots[0])
        self._fetch(batches)

    def _fetch(self, batches: Iterator[Batch]) -> None:
        """Starts the next batch's copy to the device, if there is one, behind the last reader of its slot."""
        batch = next(batches, None)
        if batch is not None:
            with self._streams.copying():
                self._copy(batch, self._slots[self._fetched % 2])
            self._fetched += 1

    @staticmethod
    def _copy(batch: Batch, slot: _Slot) -> None:
        slot.staging.storage.copy_(batch.storage, non_blocking=True)


class _Streams:
    """The side streams of an iteration and the copy stream; on the CPU, or without overlap, everything is in order."""

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self._cuda = device.type == "cuda"
        self.main: torch.cuda.Stream | None = None
        self._side: dict[str, torch.cuda.Stream] = {}
        if self._cuda:
            self.main = torch.cuda.Stream(priority=_PRIORITY["main"])
            self._copy = torch.cuda.Stream()
            self._copied = torch.cuda.Event()
            # The event of iteration n, and of n - 1: the last reader of the slot that batch n + 2 goes to.
            self._ended = [torch.cuda.Event(), torch.cuda.Event()]
            if overlap:
                self._side = {name: torch.cuda.Stream(priority=p) for name, p in _PRIORITY.items() if name != "main"}

    @contextmanager
    def beside(self, name: str, after: str | None = None) -> Iterator[None]:
        """What is launched inside runs on side stream `name`, after all launched so far on the current stream, and on
        side stream `after` where one is named."""
        side = self._side.get(name)
        if side is None:
            yield
            return
        side.wait_stream(torch.cuda.current_stream())
        if after is not None:
            side.wait_stream(self._side[after])
        with torch.cuda.stream(side):
            yield

    def join(self, *names: str) -> None:
        """The current stream waits for the side streams of these names."""
        for name in names:
            if name in self._side:
                torch.cuda.current_stream().wait_stream(self._side[name])

    def copying(self) -> AbstractContextManager[Any]:
        """Copies launched inside run on the copy stream, behind the iteration before the last one."""
        return self._copying() if self._cuda else nullcontext()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        self._copy.wait_event(self._ended[0])
        with torch.cuda.stream(self._copy):
            yield
            self._copied.record()

    def wait_for_copy(self) -> None:
        """The current stream waits for the last copy."""
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._copied)

    def end_iteration(self) -> None:
        """Marks the end of an iteration on the current stream."""
        if self._cuda:
            self._ended.reverse()
            self._ended[1].record()
