"""All launches of an iteration that a graph captures, or that run eagerly before: on which streams, and after what.

```
input_dist      dist of the next batch
iteration       lookup, exchange --.            .- exchange of gradients, table update
dense              bottom MLP ------`- the rest, backward -.- rest of the backward
dense_update                                  bucket        bucket ... dense update
```

The dense part runs beside the lookup until it asks for its outputs. From its backward on, the rest begins as soon as
what it needs is made: the tables' update with the gradients of the looked-up vectors, and the mean over the ranks with
the gradients of a bucket of parameters. The update's sort of the ids begins after the exchange: see early_sorts.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .batch_fields import map_fields, over_same_memory
from .captured import of_graph
from .captured_update import CapturedUpdate
from .dense_graph import DenseGraph
from .dense_run import Made, last_of
from .early_sorts import EarlySorts
from .embedding_outputs import EmbeddingOutputs, Lookups, embedding_backward
from .feature_processors import FeatureProcessors
from .input_dist import InputDist
from .iteration_memory import IterationMemory
from .iteration_pairs import Pair
from .iteration_slots import FormMemory
from .overflows import Overflows
from .peers.exchanges import Peers
from .replicated_tables import ReplicatedTables, leaves_of_now
from .streams import StageStreams, stage
from .table_rates import TableRates

STAGES = ("input dist of the next batch", "lookup and its exchange", "dense forward and backward", "table update")
UPDATE = ("all-reduce of dense gradients", "dense update")


@dataclass(frozen=True)
class IterationWork:
    """The launches, on memory that stays allocated; see the module."""

    dense: DenseGraph
    processors: FeatureProcessors
    replicated: ReplicatedTables
    input_dists: InputDist
    lookups: Lookups
    streams: StageStreams
    device: torch.device
    peers: Peers | None
    kernels: Sequence[Any]
    """FBGEMM's lookups of the called modules."""
    sorts: EarlySorts
    update: CapturedUpdate
    rates: TableRates
    overflows: Overflows
    memory: IterationMemory

    def __call__(self, turn: int, pair: Pair) -> Any:
        """Launches an iteration, on the current stream and on streams that it joins; returns the model's output. The
        host reads nothing."""
        streams, lookups, updates = self.streams, self.lookups, self.update.why_not is None
        slot, begun = self.memory[pair.now].slots[turn], streams.mark()
        with stage("input_dist", self.device), streams.on("input_dist", after=begun):
            self._distribute(self.memory[pair.ahead], turn)
            brought = streams.mark("input_dist")
        if updates:
            self.update.zero_grad()  # before the lookup, which FBGEMM hands the rate of the table update
        self.rates.mark()
        cleared = streams.mark()
        with stage("embedding_forward", self.device):
            with self.replicated.looked_up(), leaves_of_now(self.kernels), self.sorts.on_streams():
                awaited = self.processors.look_up(lookups.called, slot.contexts, slot.features)
            outputs = EmbeddingOutputs(lookups.names, [output.wait() for output in awaited])
            looked_up = streams.mark()
            self.sorts.looked_up()
        with stage("dense_forward_backward", self.device), streams.on("dense", after=cleared):
            wait = partial(streams.wait, looked_up)
            batch = over_same_memory(slot.batch)  # other iterations use the slot, and its fields
            made = self.dense.launch(batch, slot.stand_ins, lookups, outputs, streams, wait)
            if not updates:
                self.dense.keep(made)
            trained = streams.mark("dense")
        with stage("embedding_backward", self.device):
            streams.wait(last_of([made.values_at[i] for i, grad in enumerate(made.of_values) if grad is not None]))
            embedding_backward(outputs, made.of_values)
            self.sorts.updated()
            of_modules = [*self.processors.gradients(), *self.replicated.gradients()]
            if of_modules and not updates:
                self.dense.keep_of_processors(of_modules)
        updated = self._dense_update(made, of_modules, after=streams.mark()) if updates else None
        for event in (trained, updated, brought):
            streams.wait(event)
        return map_fields(made.output, of_graph)

    def _distribute(self, memory: FormMemory, turn: int) -> None:
        staging, distribution = memory.staging[turn], self.input_dists.new()
        with self.overflows.told(1 - turn):
            distribution.advance(staging.features, "features")
        memory.slots[1 - turn].fill(staging.fields, distribution)

    def _dense_update(
        self, made: Made, of_modules: Sequence[Tensor], after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Reduces the gradients of the dense part and of parameters within modules, and steps. after: event after which
        the latter are made."""
        with self.streams.on("dense_update"):
            with stage("dense_forward_backward", self.device):
                reduced = self.update.gradients_reduced
                self.dense.reduce(made, of_modules, after, self.streams, self.peers, reduced)
                self.dense.gradients.publish()
            self.streams.wait(made.end.event)  # until then the backward may read what the update writes
            with stage("dense_update", self.device):
                self.update.step()
            return self.streams.mark("dense_update")
