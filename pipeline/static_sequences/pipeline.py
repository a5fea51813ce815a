"""The static pipeline for unpooled rows: iterations of fixed shapes, eager or as CUDA graphs, with one graph for each
token capacity that batches need and each of two slots."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.benchmark import Parts
from dlrm_bench.dlrm.config import TrainingConfig, check_learning_rate
from dlrm_bench.dlrm.dense.loss_guard import LossGuard
from dlrm_bench.dlrm.dense.static_dense import DenseContext
from dlrm_bench.dlrm.dense.static_sequences import Needs, Prepared
from dlrm_bench.dlrm.dense.tallies import Tallies
from dlrm_bench.dlrm.optimizers import RowWiseAdagrad
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import DynamicRows
from dlrm_bench.dlrm.tables.sequence.capacity import IdCapacity, check_ids
from dlrm_bench.dlrm.tables.sequence.sequence_tables import SequenceTables
from dlrm_bench.pipeline.dynamic_state import dynamic_blocks
from dlrm_bench.pipeline.interface import Capacities, StepMetrics, check_device
from dlrm_bench.pipeline.state import StateBlocks, TensorBlock, TensorBlocks
from dlrm_bench.pipeline.static.fetch import BatchFetcher
from dlrm_bench.pipeline.static.graphs import Graphs, Pool
from dlrm_bench.pipeline.static.memory import memory_gb
from dlrm_bench.pipeline.static.options import StaticOptions
from dlrm_bench.pipeline.static.streams import MAX_IN_FLIGHT, IterationStreams
from dlrm_bench.pipeline.static_sequences.iteration import Iteration, Slot, Space
from dlrm_bench.pipeline.static_sequences.lane import AHEAD, EAGER, Lane
from dlrm_bench.pipeline.static_sequences.room import Agreement, IdRoom
from dlrm_bench.pipeline.static_sequences.warm_up import ROWS, unchanged


class StaticSequencesPipeline:
    """See dlrm_bench.pipeline.interface.Pipeline."""

    def __init__(self, config: TrainingConfig, options: StaticOptions, ranks: Ranks, parts: Parts) -> None:
        """Collective over all ranks. parts: the benchmark's, whose dense network is stage 3. ValueError where the
        options need a GPU and there is none."""
        check_device(options, ranks.device)
        self._config, self._options, self._ranks = config, options, ranks
        self._rate = torch.tensor([config.optimizer.learning_rate], device=ranks.device)
        """The learning rate of all weights on the device, fp32 [1]."""
        self._learning_rate = config.optimizer.learning_rate
        self.dense = parts.static_sequences(config, options.dense, ranks)
        room = IdRoom(0, 0, 0).grown(Needs(*(config.local_batch_size,) * 4))
        self.tables = self._new_tables(room)
        self._streams = IterationStreams(ranks.device, options.overlap)
        self._guard = LossGuard(ranks, None, self.dense.tallies)
        self._fetcher, self._agreement = BatchFetcher(ranks.device, MAX_IN_FLIGHT), Agreement(ranks)
        context = DenseContext(self._streams, self._rate, self._guard)
        self._iteration = Iteration(self._fetcher, self.dense, self._streams, context)
        self._evaluated = [torch.zeros(2, config.local_batch_size, device=ranks.device) for _ in range(2)]
        """Logits and labels of the batch in each slot."""
        self._pool = Pool()
        self._train = self._new_lane("iteration", self._iteration.train, room, trains=True)
        self._eval = self._new_lane("evaluation", self._evaluate, room, trains=False)
        self._lanes = {"iteration": self._train, "evaluation": self._eval}
        self._runs = self._train
        """The lane that batches are prepared for."""
        self._launched = self._before = 0

    def _new_tables(self, room: IdRoom) -> SequenceTables:
        config = self._config
        optimizer = config.optimizer.tables
        assert isinstance(optimizer, RowWiseAdagrad), "checked with the configuration"
        capacity, tables, dynamic = self._capacity(room), config.model.tables, None
        places = self._options.row_places
        if places is not None:
            dynamic = DynamicRows.in_parts(tables, self._ranks, config.seed, places)
        return SequenceTables(tables, capacity, self._ranks, optimizer, self._rate, config.seed, dynamic=dynamic)

    def _capacity(self, room: IdRoom) -> IdCapacity:
        return IdCapacity(self.dense.id_counts(room.batch), room.rows)

    def _new_lane(self, name: str, work: Any, room: IdRoom, trains: bool) -> Lane:
        graphs = None
        if self._options.cuda_graph != "none":
            graphs = Graphs(name, [], self._ranks, self._streams.main, self._options.cuda_graph == "try", self._pool)
        stages = (self._iteration, self.dense, self._fetcher, self._agreement, self._streams)
        return Lane(work, partial(self._new_space, trains=trains), room, *stages, graphs, self._forget_graphs, AHEAD)

    def _forget_graphs(self) -> None:
        for lane in self._lanes.values():
            lane.forget()

    def _new_space(self, room: IdRoom, trains: bool) -> Space:
        capacity, device = self._capacity(room), self._ranks.device
        tables = self.tables.sized(capacity)
        unused = torch.full((capacity.count,), -1, dtype=torch.int32, device=device)
        slots = [Slot(self.dense.on_device(room.batch), unused.clone(), tables.empty_ids(trains)) for _ in range(2)]
        rows = torch.zeros(capacity.count, self._config.model.tables.columns, device=device)
        return Space(tables, (slots[0], slots[1]), rows, torch.zeros_like(rows) if trains else None)

    def warm_up(self, evaluates: bool) -> None:
        """Trains on artificial batches until an iteration is captured, and evaluates some if the run will evaluate;
        restores weights, optimizer state and generators afterwards. See pipeline/interface.py."""
        assert self._launched == 0, "a warm-up comes before the first batch"
        batch = self.prepare(self.dense.warm_up_batch())
        if self._ranks.device.type == "cuda":  # which loads the kernels of large products when they are first launched
            batch = replace(batch, needs=batch.needs._replace(tokens=self.dense.usual_tokens))
        kept = [*self.dense.memory(), self._guard.watch.stopped]
        count = EAGER + 2  # which capture the graph of each slot
        with unchanged(kept, self.tables.unchanged(ROWS), self._ranks):
            batches = repeat(batch, count)
            for _ in range(count):
                self.train_step(batches)
            self._train.reset()
            if evaluates:
                for _ in self.evaluate(repeat(batch, count)):
                    pass
        for lane in self._lanes.values():
            lane.renew()
        self._launched = 0
        if self._iteration.metrics is not None:
            self._iteration.metrics.reset()

    def measure(self, metrics: StepMetrics) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        assert self._launched == 0, "before the first iteration, and so before any graph"
        self._iteration.measure(metrics)

    def prepare(self, batch: Any) -> Prepared:
        """Returns the batch padded in pinned memory, one buffer to copy."""
        return self.dense.prepare(batch, self._runs.room.batch)

    def train_step(self, batches: Iterator[Prepared]) -> Tensor:
        """Runs one iteration; reads AHEAD batches beyond it. ValueError for batches after the end."""
        self.dense.before_step(self._before + self._launched + 1)
        if self._train.run(batches, self._check_ids if self._options.check_ids else None) is None:
            raise StopIteration
        self._launched += 1
        return self.dense.loss(self._launched - 1)

    def _check_ids(self, space: Space, slot: int) -> None:
        tables, rank = self._config.model.tables, self._ranks.rank
        check_ids(space.slots[slot].ids, space.tables.capacity, tables, rank, self._launched + 1)

    def evaluate(self, batches: Iterator[Prepared]) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs forward passes only; the batches of the training in flight keep their slots."""
        self._eval.reset()
        self._runs = self._eval
        try:
            while (slot := self._eval.run(batches)) is not None:
                logits, labels = self._evaluated[slot].clone().unbind()
                yield logits, labels
        finally:
            self._runs = self._train

    def _evaluate(self, space: Space, slot: int, tokens: int) -> None:
        self._iteration.evaluate(space, slot, tokens, *self._evaluated[slot].unbind())

    def capacities(self) -> Capacities:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        return {name: asdict(lane.room) for name, lane in self._lanes.items()}

    def go_on_after(self, iterations: int, capacities: Capacities) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        self._before = iterations
        for name, sizes in capacities.items():
            lane = self._lanes.get(name)
            if lane is None or sizes.keys() != asdict(lane.room).keys():
                raise ValueError(f"--resume: the checkpoint has capacities that no version has: {name} {dict(sizes)}")
            lane.begin_with(IdRoom(**sizes))
        if self.tables.dynamic is not None:
            self.tables.dynamic.map.go_on_after(iterations)

    def tallies(self) -> Tallies:
        """See dlrm_bench.pipeline.interface.Pipeline."""
        return self.dense.tallies

    def set_learning_rate(self, value: float) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline: every update reads it from the device."""
        if value != 0:  # with which a ramp begins, and which changes no weight
            check_learning_rate(value)
        if value != self._learning_rate:
            self._learning_rate = value
            self._rate.fill_(value)

    def describe(self) -> dict[str, Any]:
        """Returns the split of the tables, rank 0's counts of batches by room, graphs, and GB of memory. Collective."""
        memory = memory_gb(
            self._ranks,
            {
                "tables": [self.tables.memory[0]],
                "optimizer_state": [self.tables.memory[1]],
                "rows": [[lane.space.rows, lane.space.gradients] for lane in self._lanes.values()],
                "dense_weights": self.dense.memory(),
            },
        )
        rooms: list[Any] = [{name: lane.describe() for name, lane in self._lanes.items()}]
        dist.broadcast_object_list(rooms)
        dynamic: dict[str, Any] = {}
        if self.tables.dynamic is not None:
            of_ranks: list[Any] = [None] * self._ranks.world_size
            dist.all_gather_object(of_ranks, self.tables.dynamic.map.describe())
            dynamic = {"dynamic_rows": of_ranks}
        return dynamic | {
            "row_parts": self._ranks.world_size,
            **self.dense.tallies.describe(),
            "rooms": rooms[0],
            "paused_after": self._train.interruptions,
            "cuda_graphs": {
                name: lane.graphs.describe() for name, lane in self._lanes.items() if lane.graphs is not None
            },
            "memory_gb": memory,
        }

    def close(self) -> None:
        """Destroys the graphs."""
        for lane in self._lanes.values():
            if lane.graphs is not None:
                lane.graphs.close()

    # State

    def state_blocks(self) -> StateBlocks:
        """See dlrm_bench.pipeline.interface.Pipeline: the memory that is trained."""
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()
        weights: TensorBlocks = {key: [TensorBlock.whole(value)] for key, value in self.dense.weights().items()}
        state: TensorBlocks = {key: [TensorBlock.whole(value)] for key, value in self.dense.optimizer_state().items()}
        if self.tables.dynamic is not None:
            rows = dynamic_blocks(self.tables.dynamic, self._ranks)
            return StateBlocks(weights | rows.weights, state | rows.optimizer)
        tables, ranks = self._config.model.tables, range(self._ranks.world_size)
        for number, (key, table) in enumerate(zip(self.dense.table_keys, self.tables.table_shards(), strict=True)):
            for of_kind, local, columns in ((weights, table.weights, tables.columns), (state, table.state, 1)):
                of_kind[key] = [
                    TensorBlock(
                        rank,
                        (rank, 0),
                        (len(range(rank, tables.rows[number], len(ranks))), columns),
                        local if rank == self._ranks.rank else None,
                        len(ranks),
                    )
                    for rank in ranks
                    if rank < tables.rows[number]
                ]
        return StateBlocks(weights, state)

    def take_blocks(self, blocks: StateBlocks) -> None:
        """See dlrm_bench.pipeline.interface.Pipeline: the blocks are the memory that is trained."""
        self.dense.take_weights()
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()
