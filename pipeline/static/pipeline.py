"""The five-stage pipeline on the static EBC: iterations of fixed shapes, eager or as one CUDA graph each."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.benchmark import Parts
from dlrm_bench.dlrm.config import TrainingConfig, check_learning_rate
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.dense.buckets import DenseState
from dlrm_bench.dlrm.dense.loss_guard import LossGuard
from dlrm_bench.dlrm.dense.static_dense import DenseContext
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.runtime.gpu_types import costs_of
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.plan.planner import plan_for
from dlrm_bench.dlrm.tables.pooled.static_ebc import StaticEBC, TableUpdates
from dlrm_bench.dlrm.tables.pooled.ways import Collectives, InPeerMemory, Layout, OverNodes, Way
from dlrm_bench.dlrm.tables.table_memory import (
    check_places_fit,
    check_tables_fit,
    device_memory_bytes,
    rank_memory_bytes,
    table_memory_bytes,
)
from dlrm_bench.pipeline.dynamic_state import dynamic_blocks
from dlrm_bench.pipeline.interface import Capacities, StepMetrics, check_device
from dlrm_bench.pipeline.state import StateBlocks, TensorBlock, TensorBlocks
from dlrm_bench.pipeline.static.check_ids import check_ids
from dlrm_bench.pipeline.static.concurrency import embedding_barriers
from dlrm_bench.pipeline.static.evaluation import EAGER_BATCHES, Evaluation
from dlrm_bench.pipeline.static.fetch import BatchFetcher
from dlrm_bench.pipeline.static.graphs import Graphs
from dlrm_bench.pipeline.static.iteration import Iteration, Slot, Stages
from dlrm_bench.pipeline.static.memory import memory_gb
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.static.streams import MAX_IN_FLIGHT, IterationStreams
from dlrm_bench.pipeline.static.table_load import embedding_load
from dlrm_bench.pipeline.static.warm_up import ROWS, unchanged, warm_up_batch

# Iterations that run eagerly before the capture, in which NCCL and cuBLAS initialize themselves.
_EAGER_ITERATIONS = 3

_MASTER_AND_STATE: tuple[DenseState, DenseState] = ("master", "state")


class StaticPipeline:
    """See dlrm_bench.pipeline.interface.Pipeline."""

    def __init__(self, config: TrainingConfig, options: StaticOptions, ranks: Ranks, parts: Parts) -> None:
        """Collective over all ranks. parts: the benchmark's, whose dense network is stage 3. ValueError if the options
        need a GPU and there is none."""
        self._config, self._options, self._ranks, device = config, options, ranks, ranks.device
        check_device(options, device)
        tables, optimizer = config.model.tables, config.optimizer
        tiers = options.tiers(tables)
        if options.row_places is None:
            check_tables_fit(tables, optimizer.tables, rank_memory_bytes(ranks, tiers), device)
        self._gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self._plan = plan_for(
            config,
            Topology.of(ranks.world_size, ranks.local_world_size),
            table_memory_bytes(ranks, tiers) if options.row_places is None else None,
            replicate=options.replicates(ranks.nodes),
            split_rows=options.splits_rows(ranks.nodes),
            costs=costs_of(self._gpu),
            constraints=options.constraints_on(tables),
            split_columns=options.splits_columns,
            tiers=tiers,
        )
        self._memory = PeerMemory(ranks) if options.peer_memory else None
        self.dense = parts.static_dense(config, options.dense, ranks, self._memory)
        self._rate = torch.tensor([optimizer.learning_rate], device=device)
        """The learning rate of all weights on the device, fp32 [1]."""
        layout = Layout(tables, self._plan, ranks, self.dense.shape)
        updates = TableUpdates(optimizer.tables, self._rate, options.presort_ids)
        self._check_places_fit(self.dense.shape)
        self.ebc = StaticEBC(layout, updates, self._way(), config.seed, options.row_places or tiers)
        self._learning_rate = optimizer.learning_rate
        # Batch n uses slot n % 2.
        self._slots = [self._new_slot() for _ in range(2)]
        self._streams = IterationStreams(device, options.overlap)
        self._fetcher = BatchFetcher(device, MAX_IN_FLIGHT)
        # The flags are read at once on all nodes, so peer memory serves one node only.
        self._guard = LossGuard(ranks, self._memory if ranks.nodes == 1 else None, self.dense.tallies)
        context = DenseContext(self._streams, self._rate, self._guard)
        stages = Stages(self._fetcher, self.ebc, self.dense, self._memory)
        self._iteration = Iteration(stages, self._streams, context)
        make_graphs = None
        if options.cuda_graph != "none":
            fallback = options.cuda_graph == "try"
            make_graphs = partial(Graphs, ranks=ranks, stream=self._streams.main, fallback=fallback)
        iterations = [partial(self._iteration.train, self._slots[i], self._slots[1 - i]) for i in range(2)]
        self._graphs = make_graphs("iteration", iterations) if make_graphs else None
        slots = [self._new_slot(sorts=False) for _ in range(2)]
        self._eval = Evaluation(slots, self._iteration, self._fetcher, self._streams, make_graphs)
        self._step = self._named = self._overflows = 0
        self._launched = 0
        """Number of iterations, including those of the warm-up."""

    def _check_places_fit(self, shape: BatchShape) -> None:
        """Raises ValueError, on every rank, if rows to be created do not fit in any rank's memory. Collective."""
        places, tables, ranks = self._options.row_places, self._config.model.tables, self._ranks
        if places is None:
            return
        hot = sum(tables.hot[shard.table] for shard in self._plan.of_rank(ranks.rank))
        states = self._config.optimizer.tables.state_columns(tables.columns)
        unnamed = shape.samples * ranks.world_size * hot
        memory = device_memory_bytes(ranks)
        check_places_fit(tables, places.count, memory, ranks.device, states, unnamed)

    def _way(self) -> Way:
        """Returns the way in which ids, pooled vectors and their gradients are exchanged."""
        if self._memory is None:
            return Collectives()
        barriers = embedding_barriers(self.dense.shape.parts, self._ranks.nodes)
        if self._ranks.nodes > 1:
            return OverNodes(self._memory, barriers)
        assert self.dense.peer_inputs is not None, "on one node all ranks write to the inputs in peer memory"
        return InPeerMemory(self._memory, barriers, *self.dense.peer_inputs)

    def warm_up(self, evaluates: bool) -> None:
        """Trains on artificial batches until the iterations are captured, and evaluates some if the run will evaluate;
        restores weights and optimizer state afterwards. See pipeline/interface.py."""
        assert self._named == 0, "a warm-up comes before the first batch"
        pin = self._ranks.device.type == "cuda"
        tables, places = self._config.model.tables, self._options.row_places
        named = ROWS if places is None else min(ROWS, places.count // tables.count)
        batch = warm_up_batch(self.dense.layout, tables, pin, named)
        dynamic, shards = self.ebc.dynamic, list(self.ebc.table_shards())
        rows = nullcontext() if dynamic is None else dynamic.unchanged(named)
        with unchanged(shards, rows, self.dense.buckets, self._guard, self._ranks):
            steps = _EAGER_ITERATIONS + len(self._slots)  # the latter replay the graph of each slot
            batches = repeat(batch, steps)
            for _ in range(steps):
                self.train_step(batches)
            if evaluates:
                for _ in self.evaluate(repeat(batch, EAGER_BATCHES + len(self._eval.slots))):
                    pass
        self._step = self._named = self._overflows = 0
        self.ebc.forget_moves()
        if self._iteration.metrics is not None:
            self._iteration.metrics.reset()

    def measure(self, metrics: StepMetrics) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        assert self._launched == 0, "before the first iteration, and so before any graph"
        self._iteration.measure(metrics)

    def prepare(self, batch: Batch) -> Batch:
        """Returns the batch itself: only its one buffer in pinned memory is copied."""
        return batch

    def train_step(self, batches: Iterator[Batch]) -> Tensor:
        """Runs one iteration; reads one batch ahead. Raises ValueError for batches after the end: the last iteration
        had no next batch whose input dist it could launch."""
        if self._named == 0:
            self._prime(batches)
        if self._step == self._named:
            if self._step > 0 and next(batches, None) is not None:
                raise ValueError("the batches of this static pipeline have ended: give one iterator over all of them")
            raise StopIteration
        now, ahead = self._slots[self._step % 2], self._slots[(self._step + 1) % 2]
        self._streams.limit_run_ahead()
        self._check_ids(now.batch, self._step + 1)
        self._name(next(batches, None))
        eager = self.ebc.eager_ids(now.ids)
        self.ebc.expect(ahead.ids)
        graphs = self._graphs if self._launched >= _EAGER_ITERATIONS else None
        if graphs is not None:
            graphs.capture()  # before the first replay, which a batch that runs eagerly may delay
        if eager is not None:
            self._overflows += eager is not now.ids
            self._iteration.train(replace(now, ids=eager), ahead)
        elif graphs is not None:
            graphs.run(self._step % 2)
        else:
            self._iteration.train(now, ahead)
        self._streams.end_iteration()
        self._step += 1
        self._launched += 1
        return self.dense.loss(self._launched - 1)

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs forward passes only; training batches in flight keep their slots."""
        self.dense.gather()
        yield from self._eval.run(batches)

    def capacities(self) -> Capacities:
        """See dlrm_bench.pipeline.interface.Pipeline: no shape depends on earlier batches."""
        return {}

    def go_on_after(self, iterations: int, capacities: Capacities) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline: this pipeline draws no random numbers."""
        if self.ebc.dynamic is not None:
            self.ebc.dynamic.map.go_on_after(iterations)

    def tallies(self) -> Tallies:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        return self.dense.tallies

    def set_learning_rate(self, value: float) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline.

        Nearly all updates read it from the device. FBGEMM's update, without presort_ids, has it built into the captured
        iteration, which is then captured again; rank 0 prints a message.
        """
        check_learning_rate(value)
        if value == self._learning_rate:
            return
        self._learning_rate = value
        self._rate.fill_(value)
        self.ebc.set_learning_rate(value)
        if self._graphs is not None and not self._options.presort_ids:
            self._graphs.forget(f"learning rate {value}")

    def describe(self) -> dict[str, Any]:
        """Returns the plan, each rank's embedding time, predicted and measured, its memory in GB, and the graphs.
        Collective."""
        names, graphs = self._config.model.tables.names, {"iteration": self._graphs, "evaluation": self._eval.graphs}
        memory = memory_gb(
            self._ranks,
            {
                **self.ebc.memory(),
                "batches": [*self._slots, *self._eval.slots],
                "dense_weights": [bucket.tensors() for bucket in self.dense.buckets],
                # Includes the batches and dense weights that other ranks write.
                **({"peer_memory": self._memory.own} if self._memory is not None else {}),
            },
        )
        return {
            "plan": [
                [_describe_shard(s, names) for s in self._plan.of_rank(rank)] for rank in range(self._ranks.world_size)
            ],
            **self._describe_overflows(),
            **self._describe_placed_rows(),
            **self.dense.tallies.describe(),
            **embedding_load(self._config, self.ebc, [slot.ids for slot in self._slots], self._ranks, self._gpu),
            "cuda_graphs": {name: graph.describe() for name, graph in graphs.items() if graph is not None},
            "memory_gb": memory,
        }

    def _describe_overflows(self) -> dict[str, Any]:
        """Returns the number of batches that named more of a rank's rows than its lists can hold, if tables are split
        by rows. Collective."""
        if all(shard.row_parts == 1 for shard in self._plan.shards):
            return {}
        overflows = [0] * self._ranks.world_size
        dist.all_gather_object(overflows, self._overflows)
        return {"batches_over_capacity": overflows}

    def _describe_placed_rows(self) -> dict[str, Any]:
        """Returns each rank's rows on each tier and the rows moved to the device, if rows are on two tiers; places and
        created rows, if rows are created when first named. Collective."""
        dynamic = self.ebc.dynamic
        own, name = self.ebc.describe_tiers(), "table_tiers"
        if dynamic is not None:
            own, name = {**dynamic.map.describe()}, "dynamic_rows"
        if own is None:
            return {}
        of_ranks = [own] * self._ranks.world_size
        dist.all_gather_object(of_ranks, own)
        return {name: of_ranks}

    def close(self) -> None:
        """Destroys the graphs."""
        for graphs in (self._graphs, self._eval.graphs):
            if graphs is not None:
                graphs.close()

    # State

    def state_blocks(self) -> StateBlocks:
        """See dlrm_bench.pipeline.interface.Pipeline: dense tensors are whole copies on every rank."""
        blocks = StateBlocks(*(self._blocks(which) for which in _MASTER_AND_STATE))
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()
        if self.ebc.dynamic is None:
            return blocks
        rows = dynamic_blocks(self.ebc.dynamic, self._ranks)
        return StateBlocks(blocks.weights | rows.weights, blocks.optimizer | rows.optimizer)

    def take_blocks(self, blocks: StateBlocks) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        for which, of_which in zip(_MASTER_AND_STATE, blocks, strict=True):
            values = {key: of_which[key][0].local for key in self.dense.dense_keys}
            self.dense.load_state_dict(
                {key: value for key, value in values.items() if isinstance(value, Tensor)}, which
            )

    def _blocks(self, which: DenseState) -> TensorBlocks:
        """Returns weights or optimizer state of the tables, as stored, and of the dense network, from full copies."""
        tables, keys = self._config.model.tables, self.dense.table_keys
        held = {table.shard: table.weights if which == "master" else table.state for table in self.ebc.table_shards()}
        blocks = {key: [TensorBlock.whole(value)] for key, value in self.dense.state_dict(which).items()}
        state_columns = self._config.optimizer.tables.state_columns
        for s in self._plan.shards if self.ebc.dynamic is None else ():
            columns = s.columns if which == "master" else state_columns(s.columns)
            if columns == 0:
                continue
            block = TensorBlock(s.rank, (s.row_part, s.column), (s.rows(tables), columns), held.get(s), s.row_parts)
            blocks.setdefault(keys[s.table], []).append(block)
        for shard, tensor in held.items():
            if isinstance(tensor, Tensor) and shard.table in self._plan.replicated:
                blocks[keys[shard.table]] = [TensorBlock.whole(tensor)]
        return blocks

    # Batches in flight

    def _new_slot(self, sorts: bool = True) -> Slot:
        """Returns a slot. sorts: whether its ids are sorted, if the training sorts ids."""
        layout = self.dense.layout
        storage = Batch.of_layout(layout, pin=False).storage.zero_().to(self._ranks.device)
        return Slot(Batch.over(storage, layout), self.ebc.empty_ids(sorts))

    def _prime(self, batches: Iterator[Batch]) -> None:
        first = next(batches, None)
        if first is not None:
            self._name(first)
            self.ebc.expect(self._slots[0].ids)
            self._iteration.input_dist(self._slots[0])
            # Without a second batch this slot is distributed as it is, so it must not make rows of a warm-up's ids.
            self._slots[1].batch.storage.copy_(self._slots[0].batch.storage)

    def _name(self, batch: Batch | None) -> None:
        """Names the batch of the next input dist."""
        if batch is not None and self.ebc.in_tiers:  # which finds places by its ids before `now` is checked
            self._check_ids(batch, self._named + 1)
        self._fetcher.name(batch)
        self._named += batch is not None

    def _check_ids(self, batch: Batch, iteration: int) -> None:
        if self._options.check_ids:
            check_ids(batch, self._config.model.tables, self._ranks.rank, iteration)


def _describe_shard(shard: Shard, names: Sequence[str]) -> dict[str, Any]:
    """Returns the record's description of a shard; omits rows if it has all of them."""
    columns = {"table": names[shard.table], "column": shard.column, "columns": shard.columns}
    return columns if shard.row_parts == 1 else columns | {"row_part": shard.row_part, "row_parts": shard.row_parts}
