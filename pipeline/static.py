"""The five-stage pipeline on the static EBC: every stage of fixed shapes, eager or as one CUDA graph an iteration.

1 input dist               of the next batch, beside stages 2 to 5
2 embedding forward        the bottom MLP and the all-gather of the last dense update beside it
3 dense forward/backward   where there is room, the top MLP's weight gradients and update beside its later part
4 embedding backward       the other weight gradients beside it
5 dense update             beside 3 and 4

Large batches go through stages 2 to 4 in two halves: what one half moves over the links or through memory hides behind
the other half's GEMMs. Table update and weight gradients are of the whole batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dlrm.config import RunConfig
from dlrm.data.batch import Batch
from dlrm.embedding.capacity import check_tables_fit, device_memory_bytes
from dlrm.embedding.plan import make_plan, rank_loads
from dlrm.embedding.static_ebc import DistributedIds, StaticEBC
from dlrm.explicit_dense import Bucket, DenseState, ExplicitDense
from dlrm.model import torchrec_names
from dlrm.ranks import Ranks
from pipeline.memory import memory_gb
from pipeline.state import ModelState, Part, Parts, gather, scatter, table_key
from pipeline.streams import IterationStreams

# Real iterations that run eagerly before the capture: NCCL and cuBLAS set themselves up in them.
_EAGER_ITERATIONS = 3

# Local batches from here on keep every multiprocessor busy in the dense backward: weight gradients beside it gain
# nothing there, but two halves of the batch do. Below, weight gradients find room, and the top MLP's reduce-scatter can
# start early.
_FILLING_BATCH = 2048
# The streams of the batch's parts, from the embedding forward to the embedding backward.
_PART_STREAMS = ("main", "second half")

_ALL = slice(None)
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
        self._fills_gpu = batch_size >= _FILLING_BATCH
        parts = 2 if self._fills_gpu and config.presort_ids and batch_size % 2 == 0 else 1
        self._part_rows = [slice(i * batch_size // parts, (i + 1) * batch_size // parts) for i in range(parts)]
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
            parts,
        )
        self.dense = ExplicitDense(model, config.seed, batch_size, global_batch_size, self._dtype, ranks, parts)
        self._learning_rate = torch.tensor([config.optimizer.learning_rate], device=device)
        self._loss = torch.zeros(parts, device=device)
        self._slots = [self._new_slot() for _ in range(2)]
        self._eval_slot = self._new_slot()
        self._streams = IterationStreams(device, config.overlap)
        self._graphs: list[torch.cuda.CUDAGraph] = []
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
        self._streams.limit_run_ahead()
        self._streams.wait_for_copy()
        if self._config.cuda_graph == "iteration" and self._step >= _EAGER_ITERATIONS:
            self._replay()
        else:
            self._iteration(now, ahead)
        self._streams.end_iteration()
        self._step += 1
        self._fetch(batches)
        return self._loss.mean()

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Forward only; the batches of the training in flight keep their slots."""
        slot = self._eval_slot
        for batch in batches:
            self._copy(batch, slot)
            self._input_dist(slot)
            with torch.no_grad():
                logits = self._forward(slot)
            yield logits.float(), slot.labels.clone()

    def describe(self) -> dict[str, Any]:
        """The plan, and each rank's predicted embedding time and GB of memory. Collective."""
        config, names = self._config, self._config.model.feature_names
        loads = rank_loads(
            self._plan,
            config.model,
            config.optimizer,
            config.local_batch_size * self._ranks.world_size,
            config.pooled_bytes,
        )
        return {
            "plan": [
                [{"table": names[s.table], "column": s.column, "columns": s.columns} for s in self._plan.of_rank(rank)]
                for rank in range(self._ranks.world_size)
            ],
            "predicted_embedding_us": [round(load.embedding_us) for load in loads],
            "memory_gb": memory_gb(
                self._ranks,
                {
                    "tables": [part.weights for part in self.ebc.tables()],
                    "optimizer_state": [part.state for part in self.ebc.tables()],
                    "ids_and_staging": [*self._slots, self._eval_slot],
                    "dense_weights": [bucket.tensors() for bucket in self.dense.buckets],
                },
            ),
        }

    def close(self) -> None:
        """Destroys the graphs."""
        if self._graphs:
            torch.cuda.synchronize()
            for graph in self._graphs:
                graph.reset()
            self._graphs.clear()

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
        dense, ebc, streams = self.dense, self.ebc, self._streams
        update = partial(Bucket.update, learning_rate=self._learning_rate, eps=self._config.optimizer.eps)
        parts = list(zip(_PART_STREAMS, self._part_rows, strict=False))
        last = parts[-1][0]
        with streams.beside("input_dist"):
            self._input_dist(ahead)
        with record_function("embedding_forward"):
            with streams.beside("cross_weights"):
                dense.cross.all_gather()
            with streams.beside("top_weights", after="cross_weights"):
                dense.top.all_gather()
            with streams.beside("local"):
                self._local_forward(now)
            pooled = []
            for part, (stream, _) in enumerate(parts):
                with streams.beside(stream):
                    pooled.append(ebc.lookup(now.ids, part))
            for part, (stream, rows) in enumerate(parts):
                with streams.on(stream):
                    ebc.regroup(ebc.output_dist(pooled[part]), self._interaction_input(rows))
        with record_function("dense_forward_backward"), torch.no_grad():
            for part, (stream, rows) in enumerate(parts):
                with streams.on(stream):
                    streams.join("local", "cross_weights")
                    dense.cross_forward(part)
                    streams.join("top_weights")
                    dense.loss_backward(dense.top_forward(part), now.labels[rows], self._loss[part], part)
                    dense.top_backward(part)
                    if not self._fills_gpu:
                        self._update_top(update)
                    dense.cross_backward(part)
            # Beside the all-to-all and the table update: beside the chain above they would delay it by as much.
            if self._fills_gpu:
                self._update_top(update, after=last)
            with streams.beside("weights", after=last):
                dense.cross_weight_gradients()
        with streams.beside("local", after=last), record_function("dense_update"):
            dense.bottom_backward()
            update(dense.bottom)
            ebc.update_replicated(now.ids, self._interaction_gradient())
        with record_function("embedding_backward"):
            gradients = ebc.empty_gradients()
            for part, (stream, rows) in enumerate(parts):
                with streams.on(stream):
                    ebc.gradient_dist(self._interaction_gradient(rows), gradients[part])
            with streams.beside("cross_weights", after="weights"), record_function("dense_update"):
                update(dense.cross)
            with streams.beside("tables", after=last):
                ebc.update(now.ids, pooled[0], gradients)
        streams.join("input_dist", *(stream for stream, _ in parts), "local", "top_weights", "cross_weights", "tables")

    def _update_top(self, update: Callable[[Bucket], None], after: str | None = None) -> None:
        with self._streams.beside("weights", after=after):
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
        self.dense.cross.all_gather()
        self.dense.top.all_gather()
        self._local_forward(slot)
        logits = []
        for part, rows in enumerate(self._part_rows):
            pooled = self.ebc.lookup(slot.ids, part)
            self.ebc.regroup(self.ebc.output_dist(pooled), self._interaction_input(rows))
            self.dense.cross_forward(part)
            logits.append(self.dense.top_forward(part))
        return torch.cat(logits)

    def _interaction_input(self, rows: slice = _ALL) -> Tensor:
        return self.dense.x0[rows, self._config.model.embedding_dim :]

    def _interaction_gradient(self, rows: slice = _ALL) -> Tensor:
        return self.dense.dx0[rows, self._config.model.embedding_dim :]

    # Batches in flight

    def _new_slot(self) -> _Slot:
        batch = Batch.empty(self._config.local_batch_size, self._config.model)
        staging = Batch.over(batch.storage.to(self._ranks.device), self._config.local_batch_size, self._config.model)
        return _Slot(staging, self.ebc.empty_ids(), torch.zeros_like(staging.dense), torch.zeros_like(staging.labels))

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

    # The graph

    def _replay(self) -> None:
        if not self._graphs:
            self._capture()
        self._graphs[self._step % 2].replay()

    def _capture(self) -> None:
        """Two graphs, one for each slot of the batch in training. Capturing runs nothing."""
        torch.cuda.synchronize()
        for i in range(2):
            graph = torch.cuda.CUDAGraph()
            pool = self._graphs[0].pool() if self._graphs else None
            with torch.cuda.graph(graph, pool=pool, stream=self._streams.main, capture_error_mode="thread_local"):
                self._iteration(self._slots[i], self._slots[1 - i])
            self._graphs.append(graph)
