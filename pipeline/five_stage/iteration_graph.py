"""All five stages as one CUDA graph: an iteration is one launch, collectives and updates included.

Two graphs alternate. Graph i trains on slot i and meanwhile runs the next batch's input dist from staging i into the
other slot; at the same time the batch after the next is copied from the host to the other staging:

```
                call n, graph 0                   call n+1, graph 1                 call n+2, graph 0
copy            batch n+2 -> staging 1            batch n+3 -> staging 0
graph           staging 0 -> dist n+1 -> slot 1   staging 1 -> dist n+2 -> slot 0   ...
                slot 0 -> train on n              slot 1 -> train on n+1
```

If batches have several forms (batch_ids), there are two such graphs for each pair of the current and the next batch's
form, captured when that pair occurs; each form has its own slots and stagings (see iteration_pairs.py).

The pipeline also keeps every batch as received: a batch that no graph takes runs eagerly, without slots. Before the
capture, the graphs' work runs eagerly on the capture stream and trains.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from . import reasons
from .batch_fields import kjts_of, leaf_names, leaves
from .batch_forms import BatchForms
from .batch_signature import autocast_of, why_no_form, why_on_host
from .capture_errors import told
from .captured_update import CapturedUpdate
from .copies import copies_of
from .cuda_graph import destroy, record
from .dense_graph import DenseGraph
from .early_sorts import EarlySorts
from .embedding_outputs import Lookups
from .feature_processors import FeatureProcessors
from .groups import of_all_ranks
from .in_flight import InFlight
from .input_dist import Distribution, InputDist
from .iteration_memory import IterationMemory
from .iteration_obstacles import lookup_kernels, why_no_iteration_of
from .iteration_pairs import MOST_FORMS, Pair, Pairs
from .iteration_slots import TURNS, fields_of
from .iteration_work import STAGES, UPDATE, IterationWork
from .overflows import Overflows
from .peers.exchanges import Peers
from .replicated_tables import ReplicatedTables
from .step_graph import WARM_UP
from .streams import StageStreams
from .table_rates import TableRates

logger = logging.getLogger(__name__)

FIRST = reasons.FIRST(count=WARM_UP)


class IterationGraph:
    """Trains on batches of the first batch's form, and of other forms with declared numbers of ids; see the module.

    Before every iteration, looks for changes that a replay would miss: of the model (see FrozenModel), and of the
    optimizers' numbers and memory. All ranks then capture the graphs again at the same time, because such changes are
    the same on all ranks. Learning rates may change with every step (see TableRates and StepWork).
    """

    def __init__(
        self,
        dense: DenseGraph,
        processors: FeatureProcessors,
        replicated: ReplicatedTables,
        optimizer: torch.optim.Optimizer,
        input_dists: InputDist,
        lookups: Lookups,
        streams: StageStreams,
        device: torch.device,
        group: dist.ProcessGroup,
        peer_memory: bool,
    ) -> None:
        """dense: the dense part of the whole model, without separate graphs, including processors and replicated
        tables. group: process group of all ranks. peer_memory: exchange through it; see Peers. Collective then."""
        self._dense, self._processors, self._replicated = dense, processors, replicated
        self._input_dists, self._lookups = input_dists, lookups
        self._streams, self._device, self._group = streams, device, group
        self._peers = Peers(lookups.called, device, group, lambda: dense.exchanges) if peer_memory else None
        self._exchanging: Callable[[int], Any] = nullcontext if self._peers is None else self._peers.at
        self._update = CapturedUpdate(optimizer, dense.parameters)
        self._kernels = [kernel for _, kernel in lookup_kernels(lookups.called)]
        self._sorts = EarlySorts(self._kernels, streams)
        self._rates = TableRates(self._kernels)
        self._overflows = Overflows(lookups.called, TURNS, device)
        self._capacities: dict[str, dict[str, int]] = {}
        self._forms: BatchForms | None = None
        self.memory = IterationMemory(device)
        self._work = IterationWork(
            dense=dense,
            processors=processors,
            replicated=replicated,
            input_dists=input_dists,
            lookups=lookups,
            streams=streams,
            device=device,
            peers=self._peers,
            kernels=self._kernels,
            sorts=self._sorts,
            update=self._update,
            rates=self._rates,
            overflows=self._overflows,
            memory=self.memory,
        )
        self._pairs = Pairs()
        self._pool: Any = None
        self._turn = 0
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
        stages = [*STAGES, *(UPDATE if self.updates else ())] if self.replays else []
        counts = {"iterations": self._iterations, "replays": self.replays, "captures": self.captures}
        more: dict[str, Any] = {
            "follows_table_rates": self._rates.followed,
            "sorts_before_gradients": self._sorts.count,
        }
        if self._forms is not None and self._forms.several:
            more |= {"forms": len(self.memory), "rehearsals": self._pairs.rehearsals}
        nbytes = self.memory.nbytes()
        if self._overflows.possible:
            more["row_capacities"] = self._capacities
            nbytes["row_capacities"] += self._overflows.nbytes
        if self._peers is not None:
            more["peer_memory"], nbytes["peer_memory"] = self._peers.describe(), self._peers.nbytes
        return {"in_graph": stages, **counts, "eager": dict(self._eager), **more, "bytes": nbytes}

    # Batches

    def begin(self, batch: Any, features: Sequence[KeyedJaggedTensor]) -> str | None:
        """Takes the form of the first batch; returns what keeps such batches out of a graph, on this rank."""
        modules = self._lookups.called
        kjts = set(map(id, kjts_of(batch)))
        names, fields = list(leaf_names(batch, kjts)), list(leaves(batch, kjts))
        why = why_no_iteration_of(modules, features) or why_no_form(names, fields)
        why = why or why_on_host(names, fields, self._device)
        if why is None:
            self._forms = BatchForms(batch, features, [one.collection.declared for one in modules])
            of_modules = ((one, kjt.stride()) for one, kjt in zip(modules, features, strict=True) if one.varying)
            self._capacities = {one.name: one.module.row_capacities(stride) for one, stride in of_modules}
        return why

    def form_of(self, batch: Any) -> int | None:
        """Returns the number of the form of a batch on the host or the device; None where it has none."""
        return None if self._forms is None else self._forms.number(batch)

    def stage(self, batch: InFlight[Any]) -> None:
        """Copies the batch after the next one into the staging of the next call's graph, on the current stream, which
        runs after the second-to-last graph."""
        if self._pairs.graphs:
            self.memory.stage(batch, 1 - self._turn, self._iterations)

    def make_room(self) -> None:
        """Drops the graphs, which do not fit beside a batch, or beside a larger graph, on some rank. To be called on
        all ranks, which capture them again together."""
        logger.info("the CUDA graphs of iterations make room for a larger batch: they are captured again after it")
        self._drop()
        self._pairs.forget()

    # An iteration

    def why_not_now(self, now: InFlight[Any], ahead: InFlight[Any] | None) -> str | None:
        """Returns the reason why this iteration cannot run in a graph; None if `train` is to be called. Called once per
        iteration, instead of the dense part's own check for changes. Captures when due; if a capture fails, `failure`
        has the reason."""
        self._iterations += 1
        if self.updates:
            self._dense.gradients.publish()
        valid, why_no_update = self._update.look()
        changed = self._dense.look()
        if self._pairs.graphs and (changed is not None or not valid or self._rates_moved()):
            self._drop()
        if self._iterations <= WARM_UP:
            self._autocast = autocast_of(self._device)
            return FIRST
        why = self.failure or self._dense.failure
        if why is None and changed is not None:
            why = reasons.CHANGED(count=WARM_UP, change=changed)
        why = why or why_no_update
        if why is None and (now.form is None or (ahead is not None and ahead.form is None)):
            why = reasons.OTHER_FORM()
        if why is None and now.form not in self.memory and len(self.memory) >= MOST_FORMS:
            why = reasons.MANY_FORMS(count=MOST_FORMS)
        if why is None and (autocast := autocast_of(self._device)) != self._autocast:
            why = reasons.AUTOCAST(now=autocast, first=self._autocast)
        if why is None and self._pairs.is_due(pair := self._pair(now, ahead)):
            self._capture(pair)
            why = self.failure
        if why is None and self._overflows.possible:
            self._by_capacity(now)
            if self._overflows.of(1 - self._turn):
                why = reasons.OVERFLOW()
        if why is not None:
            self._eager[why] = self._eager.get(why, 0) + 1
            if now.form is not None and now.form in self.memory:
                self.memory[now.form].slots[1 - self._turn].holds = None
        return why

    def _pair(self, now: InFlight[Any], ahead: InFlight[Any] | None) -> Pair:
        """Returns the forms of the graph that trains on `now`. A next batch whose form has no memory yet is distributed
        separately: its input dist determines the memory that its form needs."""
        assert now.form is not None, "why_not_now"
        known = ahead is not None and (ahead.form == now.form or ahead.form in self.memory)
        return self._pairs.of(now.form, ahead.form if ahead is not None and known else None)

    def _rates_moved(self) -> bool:
        """Whether the graphs' table learning rates differ from those of the lookups and cannot be updated in place."""
        self._pass_rates()
        follows = self._rates.follow()
        self.failure = self.failure or self._rates.failure
        return not follows

    def _pass_rates(self) -> None:
        """Passes the tables' learning rates to the lookups, unless the pipeline does so outside the graph."""
        if self.updates:
            self._update.set_rates(self._rates.are_as_before())

    def train(self, now: InFlight[Any], ahead: InFlight[Any] | None, wait: Callable[[], None]) -> Any:
        """Trains on `now` and distributes `ahead`; returns the model's output. wait: waits for the distribution of
        `now` if no graph has distributed it."""
        turn, pair = 1 - self._turn, self._pair(now, ahead)
        if not self.memory.holds(now, turn):
            wait()
            self._place(now, now.distribution)
        memory, other = self.memory[pair.now], self.memory[pair.ahead]
        brought = ahead if ahead is not None and ahead.form == pair.ahead else None
        if brought is not None and other.staging[turn].holds is not brought:
            other.staging[turn].hold(brought)
        graphs = self._pairs.graphs.get(pair)
        if graphs is None:
            self._update.prepare()
        self._update.before_replay()
        if graphs is None:
            output = self._rehearse(turn, pair)
        else:
            self._rates.bring(graphs[turn])
            graphs[turn].replay()
            self.replays += 1
            output = self._pairs.outputs[pair][turn]
        self._update.after_replay()
        self._overflows.launched(1 - turn)
        self._turn = turn
        memory.slots[turn].holds, other.slots[1 - turn].holds = None, brought
        other.staging[turn].holds = None
        return copies_of(output)

    def _place(self, now: InFlight[Any], distribution: Distribution) -> None:
        """Copies a batch that no graph has distributed into the slot that the graph of this turn reads."""
        assert now.form is not None, "why_not_now"
        assert self._forms is not None, "begun"
        if now.form not in self.memory:
            varying = [one.varying for one in self._lookups.called]
            self.memory.add(now, distribution, self._forms[now.form], varying, self._iterations)
        self.memory[now.form].slots[1 - self._turn].fill(fields_of(now.batch), distribution)

    def _by_capacity(self, now: InFlight[Any]) -> None:
        """Distributes a batch now if no graph has distributed it."""
        if self.memory.holds(now, 1 - self._turn):
            return
        for event in (now.copied, now.distributed):  # work that an eager iteration has begun also reads the batch
            self._streams.wait(event)
        turn, distribution = 1 - self._turn, self._input_dists.new()
        with self._overflows.told(turn):
            distribution.advance(now.features, "features")
        self._overflows.launched(turn)
        self._place(now, distribution)
        assert now.form is not None, "placed"
        self.memory[now.form].slots[turn].holds = now

    def _rehearse(self, turn: int, pair: Pair) -> Any:
        """Runs the work to be captured, on the capture stream, which trains; returns the model's output."""
        with self._streams.on("iteration", after=self._streams.mark()), self._exchanging(turn):
            output = self._work(turn, pair)
        self._streams.wait(self._streams.mark("iteration"))
        self._pairs.rehearsed(pair)
        return output

    # Captures

    def _capture(self, pair: Pair) -> None:
        """Captures both graphs of a pair, which executes nothing. A pair's first capture is collective: all ranks
        capture it or none does, and each says why. Later captures are not collective, because a rank without tables may
        have no reason for one: RuntimeError if they fail."""
        self._make_room_for(pair)
        self._update.prepare()
        self._pass_rates()  # for begin_capture, also where graphs were dropped for another reason than the rates
        self._dense.before_capture()
        torch.clear_autocast_cache()  # replays would read an earlier cast's memory, with its present values, forever
        error: str | None = None
        try:
            keep = self._rates.begin_capture()
            self._record(pair, keep)
            if not self._rates.end_capture(self._pairs.graphs[pair]):
                self._drop()
                self._rates.begin_capture()
                self._record(pair, keep=False)
                self._rates.end_capture(())
            error = self.memory.missing() if self._pairs.is_new(pair) else None
        except BaseException as caught:
            self._rates.end_capture(())
            if not isinstance(caught, Exception):  # such as an interrupt, after which the model may train on elsewhere
                self._dense.put_back()
                raise
            error = told(caught)
        torch.clear_autocast_cache()
        if (replaced := self._dense.put_back()) is not None:
            error = error or f"{replaced}, which no replay does"
        error = self._processors.why_not_captured or error
        self._dense.gradients.publish()
        self.captures += 1
        if not self._pairs.is_new(pair):
            if error is not None:
                raise RuntimeError(f"an iteration that was captured before cannot be captured again: {error}")
            return
        everyone = of_all_ranks((error, bool(self._kernels)), self._group)
        self._rates.on_all_ranks = all(has_kernels for _, has_kernels in everyone)
        failed = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(everyone) if why is not None]
        if failed:
            self.failure = "; ".join(failed)
            self._drop()
        else:
            self._pairs.agree(pair)

    def _make_room_for(self, pair: Pair) -> None:
        """Drops the graphs if those of a larger pair do not fit beside them: smaller ones share the memory of larger
        ones that are captured before. Collective for a pair's first capture."""
        fits = self.memory.before_capture(self.memory.size(pair))
        if self._pairs.is_new(pair):
            if not all(of_all_ranks(fits, self._group)):
                self.make_room()
        elif not fits:
            self._drop()

    def _record(self, pair: Pair, keep: bool) -> None:
        if self._pool is None and self._device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        on, outputs = self._streams.stream("iteration"), self._pairs.outputs.setdefault(pair, [None] * TURNS)
        graphs = self._pairs.graphs.setdefault(pair, [])
        self._sorts.count = 0
        with self.memory.capturing(self.memory.size(pair)):
            for turn in range(TURNS):
                work = partial(self._launch, outputs, turn, pair)
                change = self._sorts.change if keep else None
                graphs.append(record(work, pool=self._pool, stream=on, keep=keep, change=change))

    def _launch(self, outputs: list[Any], turn: int, pair: Pair) -> None:
        with self._exchanging(turn):
            outputs[turn] = self._work(turn, pair)

    def _drop(self) -> None:
        graphs = self._pairs.clear()
        destroy(graphs)
        self._rates.dropped()
        self._pool = None  # torch takes no pool again that has lost all its graphs
        if graphs:
            graphs.clear()
            self.memory.dropped()

    def close(self) -> None:
        """Destroys the graphs."""
        self._drop()
        if self._peers is not None:
            self._peers.close()
