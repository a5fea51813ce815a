"""All five stages as one CUDA graph: an iteration is one launch, collectives and updates included.

Two graphs take turns. Graph i trains on slot i, and beside that it brings the next batch, from staging i, through its
input dist to the other slot; meanwhile the batch after it is copied from the host to the other staging:

```
                call n, graph 0                   call n+1, graph 1                 call n+2, graph 0
copy            batch n+2 -> staging 1            batch n+3 -> staging 0
graph           staging 0 -> dist n+1 -> slot 1   staging 1 -> dist n+2 -> slot 0   ...
                slot 0 -> train on n              slot 1 -> train on n+1
```

The pipeline also keeps every batch as it came: a batch that no graph takes runs eagerly, from itself. Before the
capture the graphs' work runs eagerly on the capture stream, and trains.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from . import reasons
from .batch_fields import map_fields
from .capture_errors import told
from .captured import copied, of_graph
from .captured_update import CapturedUpdate
from .cuda_graph import destroy, record
from .dense_graph import DenseGraph
from .embedding_outputs import EmbeddingOutputs, Lookups, embedding_backward
from .in_flight import InFlight
from .input_dist import Distribution, InputDist
from .iteration_obstacles import lookup_kernels, why_no_iteration_of
from .iteration_slots import BatchForm, Slot, Staging, fields_of
from .overflows import Overflows
from .replicated_tables import ReplicatedTables
from .sharded_modules import Sharded
from .step_graph import WARM_UP
from .streams import StageStreams, stage
from .table_rates import TableRates

logger = logging.getLogger(__name__)

FIRST = reasons.FIRST(count=WARM_UP)
STAGES = ("input dist of the next batch", "lookup and its exchange", "dense forward and backward", "table update")
_SLOTS = 2
UPDATE = ("all-reduce of dense gradients", "dense update")


class IterationGraph:
    """Trains on batches of the first one's form; see the module.

    Before every iteration it looks for changes that a replay would not notice: of the model (see FrozenModel), of the
    optimizers' numbers and memory. All ranks then capture the graphs again at once, because such changes are the same
    on all of them. Learning rates may change with every step (see TableRates and StepWork).
    """

    def __init__(
        self,
        dense: DenseGraph,
        replicated: ReplicatedTables,
        optimizer: torch.optim.Optimizer,
        input_dists: InputDist,
        lookups: Lookups,
        streams: StageStreams,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        """dense: of the whole model, without graphs of its own, and of replicated tables. group: all ranks'."""
        self._dense, self._replicated, self._input_dists, self._lookups = dense, replicated, input_dists, lookups
        self._streams, self._device, self._group = streams, device, group
        self._update = CapturedUpdate(optimizer, dense.parameters)
        self._rates = TableRates([kernel for _, kernel in lookup_kernels(lookups.called)])
        self._overflows = Overflows(lookups.called, _SLOTS, device)
        self._capacities: dict[str, dict[str, int]] = {}
        self._form: BatchForm | None = None
        self._slots: list[Slot] = []
        self._staging: list[Staging] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._outputs: list[Any] = [None, None]
        self._pool: Any = None
        self._turn = 0
        self._rehearsed = 0
        self._autocast = ""
        self._iterations = self.captures = self.replays = 0
        self._eager: dict[str, int] = {}
        self.failure: str | None = None
        """Reason why nothing is captured, the same on all ranks; None while there is none."""

    @property
    def updates(self) -> bool:
        """Whether the dense update is in the graph."""
        return self._update.why_not is None

    @property
    def why_eager(self) -> str | None:
        """Says why iterations have run eagerly beyond the first ones, and how many; None if none has."""
        of_all = f"of {self._iterations} iterations ran eagerly: "
        said = [f"{count} {of_all}{why}" for why, count in self._eager.items()]
        if not self.updates:
            said.append(f"the dense update: {self._update.why_not}")
        return "; ".join(said) or None

    def describe(self) -> dict[str, Any]:
        """Returns what the graph holds, how often it was captured and replayed, and what ran without it."""
        stages = [*STAGES, *(UPDATE if self.updates else ())]
        counts = {"iterations": self._iterations, "replays": self.replays, "captures": self.captures}
        more: dict[str, Any] = {"follows_table_rates": self._rates.followed}
        if self._overflows.possible:
            more["row_capacities"] = self._capacities
        return {"in_graph": stages if self.replays else [], **counts, "eager": dict(self._eager), **more}

    # Batches

    def begin(self, batch: Any, features: Sequence[KeyedJaggedTensor]) -> str | None:
        """Takes the form of the first batch; returns what keeps such batches out of a graph."""
        modules = self._lookups.called
        if (why := why_no_iteration_of(modules, features)) is None:
            self._form = BatchForm(batch, features, [one.module.declared for one in modules])
            of_modules = ((one, kjt.stride()) for one, kjt in zip(modules, features, strict=True) if _varying(one))
            self._capacities = {one.name: one.module.row_capacities(stride) for one, stride in of_modules}
        return why

    def fits(self, batch: Any) -> bool:
        """Returns whether a batch, on the host or the device, has the form of the first one."""
        return self._form is not None and self._form.fits(batch)

    def stage(self, batch: InFlight[Any]) -> None:
        """Copies the batch after the next one into the staging of the next call's graph, on the current stream,
        which comes after the last graph but one."""
        if self._graphs and batch.fits:
            self._stage(1 - self._turn, batch)

    def _stage(self, index: int, batch: InFlight[Any]) -> None:
        self._staging[index].fill(batch.batch)
        self._staging[index].holds = batch

    # An iteration

    def why_not_now(self, now: InFlight[Any], ahead: InFlight[Any] | None) -> str | None:
        """Returns what keeps this iteration out of a graph; None where `train` is to be called. Called once an
        iteration, in place of the dense part's own look for changes. Captures when it is time; `failure` has the reason
        if that fails."""
        self._iterations += 1
        if self.updates:
            self._dense.gradients.publish()
        valid, why_no_update = self._update.look()
        changed = self._dense.look()
        if self._rehearsed and (changed is not None or not valid or self._rates_moved()):
            self._drop()
        if self._iterations <= WARM_UP:
            self._autocast = _autocast(self._device)
            return FIRST
        why = self.failure or self._dense.failure
        if why is None and changed is not None:
            why = reasons.CHANGED(count=WARM_UP, change=changed)
        why = why or why_no_update
        if why is None and not (now.fits and (ahead is None or ahead.fits)):
            why = reasons.OTHER_FORM()
        if why is None and (autocast := _autocast(self._device)) != self._autocast:
            why = reasons.AUTOCAST(now=autocast, first=self._autocast)
        if why is None and not self._graphs and self._rehearsed >= len(self._slots) > 0:
            self._capture()
            why = self.failure
        if why is None and self._overflows.possible and self._overflows.of(index := self._by_capacity(now, ahead)):
            self._slots[index].holds, why = None, reasons.OVERFLOW()
        if why is not None:
            self._eager[why] = self._eager.get(why, 0) + 1
        return why

    def _rates_moved(self) -> bool:
        """Whether the graphs have other rates of the tables than the lookups, and cannot be given these."""
        if self.updates:
            self._update.set_rates(self._rates.are_as_before())
        follows = self._rates.follow()
        self.failure = self.failure or self._rates.failure
        return not follows

    def train(self, now: InFlight[Any], ahead: InFlight[Any] | None, wait: Callable[[], None]) -> Any:
        """Trains on `now` and distributes `ahead`; returns the model's output. wait: for the distribution of `now`,
        where no graph has made it."""
        if not self._slots:
            wait()
            self._make_slots(now, now.distribution)
        index = self._place(now, ahead, wait)
        if not self._graphs:
            self._prepare()
        self._update.before_replay()
        if self._graphs:
            self._graphs[index].replay()
            self.replays += 1
        else:
            self._rehearse(index)
        self._update.after_replay()
        self._overflows.launched(1 - index)
        self._turn = index
        self._slots[index].holds, self._slots[1 - index].holds = None, ahead
        self._staging[index].holds = None
        return map_fields(self._outputs[index], copied)

    def _place(self, now: InFlight[Any], ahead: InFlight[Any] | None, wait: Callable[[], None]) -> int:
        """Brings both to where one of the graphs reads them, and returns which one's place that is."""
        found = self._slot_of(now)
        if found is None:
            found = self._free_slot(ahead)
            wait()
            self._slots[found].fill(fields_of(now.batch), now.distribution)
        if ahead is not None and self._staging[found].holds is not ahead:
            self._stage(found, ahead)
        return found

    def _by_capacity(self, now: InFlight[Any], ahead: InFlight[Any] | None) -> int:
        """Returns the slot of a batch, which is distributed now where no graph has done it."""
        index = self._slot_of(now)
        if index is None:
            self._streams.wait(now.copied)
            index, distribution = self._free_slot(ahead), self._input_dists.new()
            with self._overflows.told(index):
                distribution.advance(now.features, "features")
            self._overflows.launched(index)
            if not self._slots:
                self._make_slots(now, distribution)
            self._slots[index].fill(fields_of(now.batch), distribution)
            self._slots[index].holds = now
        return index

    def _make_slots(self, now: InFlight[Any], distribution: Distribution) -> None:
        assert self._form is not None, "begun"
        varying = [_varying(one) for one in self._lookups.called]
        self._slots = [Slot(now.batch, now.features, distribution, varying) for _ in range(_SLOTS)]
        self._staging = [Staging(now.batch, now.features, self._form) for _ in range(_SLOTS)]

    def _slot_of(self, batch: InFlight[Any]) -> int | None:
        return next((i for i, slot in enumerate(self._slots) if slot.holds is batch), None)

    def _free_slot(self, ahead: InFlight[Any] | None) -> int:
        """Returns where to put a batch that no graph has distributed: where the graph reads `ahead` that has it."""
        staged = (i for i, staging in enumerate(self._staging) if ahead is not None and staging.holds is ahead)
        return next(staged, 1 - self._turn)

    def _rehearse(self, index: int) -> None:
        """Runs the work to be captured, on the capture stream, which trains."""
        with self._streams.on("iteration", after=self._streams.mark()):
            self._work(index)
        self._streams.wait(self._streams.mark("iteration"))
        self._rehearsed += 1

    def _prepare(self) -> None:
        if self.updates:
            self._update.prepare()

    def _work(self, index: int) -> None:
        """All launches of an iteration, in which nothing is read by the host."""
        streams, slot, lookups = self._streams, self._slots[index], self._lookups
        begun = streams.mark()
        with stage("input_dist", self._device), streams.on("input_dist", after=begun):
            self._distribute(self._staging[index], 1 - index)
            brought = streams.mark("input_dist")
        if self.updates:
            self._update.zero_grad()  # before the lookup, which FBGEMM hands the rate of its own update
        self._rates.mark()
        with stage("embedding_forward", self._device):
            of_modules = zip(lookups.called, slot.contexts, slot.features, strict=True)
            with self._replicated.looked_up():
                awaited = [one.module.compute_and_output_dist(*of_one) for one, *of_one in of_modules]
            outputs = EmbeddingOutputs(lookups.names, [output.wait() for output in awaited])
        with stage("dense_forward_backward", self._device):
            output, grads = self._dense.launch(slot.batch, slot.stand_ins, lookups, outputs)
        made = streams.mark()
        with stage("embedding_backward", self._device):
            embedding_backward(outputs, grads)
            if self._replicated.parameters:
                self._dense.keep_of_processors(self._replicated.gradients())
                made = streams.mark()
        updated = self._dense_update(after=made) if self.updates else None
        for event in (updated, brought):
            streams.wait(event)
        self._outputs[index] = map_fields(output, of_graph)

    def _distribute(self, staging: Staging, slot: int) -> None:
        distribution = self._input_dists.new()
        with self._overflows.told(slot):
            distribution.advance(staging.features, "features")
        self._slots[slot].fill(staging.fields, distribution)

    def _dense_update(self, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        with self._streams.on("dense_update", after):
            with stage("dense_forward_backward", self._device):
                self._dense.gradients.mean()
                self._dense.gradients.publish()
            with stage("dense_update", self._device):
                self._update.step()
            return self._streams.mark("dense_update")

    # Captures

    def _capture(self) -> None:
        """Captures both graphs, which runs nothing. The first time is collective: all ranks have them, or none, and
        each says why. Later times are not, as a rank without tables may have no reason: RuntimeError where they fail.
        """
        self._prepare()
        torch.clear_autocast_cache()  # a cast from before would be read as it is now, for ever
        error: str | None = None
        try:
            keep = self._rates.begin_capture()
            self._record(keep)
            if not self._rates.end_capture(self._graphs):
                self._drop()
                self._rates.begin_capture()
                self._record(keep=False)
                self._rates.end_capture(())
        except Exception as caught:
            error = told(caught)
            self._rates.end_capture(())
        torch.clear_autocast_cache()
        if (replaced := self._dense.put_back()) is not None:
            error = error or f"{replaced}, which no replay does"
        self._dense.gradients.publish()
        self.captures += 1
        if self.captures > 1:
            if error is not None:
                raise RuntimeError(f"an iteration that was captured before cannot be captured again: {error}")
            return
        everyone: list[str | None] = [None] * self._group.size()
        dist.all_gather_object(everyone, error, group=self._group)
        failed = [f"rank {rank}: {why}" for rank, why in enumerate(everyone) if why is not None]
        if failed:
            self.failure = "; ".join(failed)
            self._drop()

    def _record(self, keep: bool) -> None:
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        on = self._streams.stream("iteration")
        for index in range(len(self._slots)):
            self._graphs.append(record(partial(self._work, index), pool=self._pool, stream=on, keep=keep))

    def _drop(self) -> None:
        destroy(self._graphs)
        self._graphs.clear()
        self._outputs, self._pool = [None, None], None

    def close(self) -> None:
        """Destroys the graphs."""
        self._drop()


def _varying(one: Sharded) -> Sequence[int]:
    """Returns the places of the module's KJTs whose lengths of looked-up ids differ between batches."""
    found: Sequence[int] = getattr(one.module, "varying_groups", ())
    return found


def _autocast(device: torch.device) -> str:
    """Returns autocast's type in words."""
    if not torch.is_autocast_enabled(device.type):
        return "off"
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
