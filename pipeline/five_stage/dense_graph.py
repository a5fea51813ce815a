"""Stage 3 without DistributedDataParallel: forward, loss and backward of the dense part as CUDA graphs.

The gradient all-reduce is a separate graph, of one collective on a flat buffer. Separate, it runs beside the embedding
backward, which needs only the gradients of the embeddings; and a rank whose last batch is smaller can run its forward
and backward eagerly while all ranks make the same collective call. A graph that included the all-reduce would be
replayed by some ranks and not by others, which NCCL does not support.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .batch_fields import copy_of, kjts_of, leaf_names, leaves, snapshot
from .batch_signature import Form, Kind, difference, form_of, kind_of, why_no_form
from .capture_errors import told
from .captured import Captured, Run
from .cuda_graph import captures, destroy, record
from .dense_run import DenseRun, Made, Mark, last_of
from .embedding_outputs import EmbeddingOutputs, Lookups
from .frozen import FrozenModel, TrainedParameters
from .gradients import FlatGradients
from .graph_memory import GraphMemory, input_bytes
from .graph_obstacles import LateHooks, marked_hooks, without_marked_hooks
from .graph_pool import WARM_UP, GraphPool, Plan
from .groups import group_timeout, lend_group
from .padding import why_padding_matters
from .streams import StageStreams

if TYPE_CHECKING:
    from .peers.exchanges import Peers

logger = logging.getLogger(__name__)


def _state(
    frozen: FrozenModel, model: nn.Module, sharded: Sequence[nn.Module], device: torch.device
) -> Callable[[], None]:
    """Returns a function that restores what a run of the forward changes in the model."""
    of_model = snapshot(model, sharded, device)

    def put_back() -> None:
        frozen.undo()
        of_model()

    return put_back


class DenseGraph:
    """Forward, loss and backward of the unwrapped model, then the mean of its gradients over all ranks.

    A graph belongs to one form of batch: shapes, dtypes, values of non-tensors. Each form that recurs gets a graph, up
    to a maximum number, and as far as memory permits (see graph_memory.py). A batch that first runs eagerly in the
    graph's memory precedes the capture, so that nothing is compiled within it. For unpooled embeddings a graph has a
    capacity for tokens, and batches with fewer are padded, if that changes nothing (see GraphPool and padding.py). All
    other batches run eagerly, and the reason is logged.

    Gradients come from torch.autograd.grad, which runs no AccumulateGrad: neither DDP's hooks nor those that a user
    registers there see them. They stay in flat buffers, and `all_reduce` makes them the parameters' `.grad`, for the
    user's optimizer, whose learning rate is unaffected. A graph freezes everything that Python decides: control flow
    and Python numbers stay as they were at the capture. Parameters and buffers that move, modules that change their
    mode, and other values in modules' attributes, are detected: batches then run eagerly until WARM_UP batches show no
    change, and graphs are captured again. Values that the forward itself changes keep it out of graphs. A parameter
    that is frozen or unfrozen after the first batch is an error, as with DDP.

    Models that torch.autograd.grad cannot run, such as checkpoints with use_reentrant=True, are detected in the first
    batch: then it and all others run with Tensor.backward, on every rank. However a rank computes its gradients, an
    iteration has exactly one collective, that of `all_reduce`.
    """

    def __init__(
        self,
        model: nn.Module,
        sharded: Sequence[nn.Module],
        device: torch.device,
        ranks: list[int],
        processors: Sequence[nn.Parameter] = (),
        own_graphs: bool = True,
    ) -> None:
        """Collective over `ranks`. model: unwrapped, with its sharded modules. processors: parameters within those, of
        feature processors or replicated tables, whose gradients are passed to `keep_of_processors`. own_graphs: False
        if an iteration's graph holds the dense part, and everything else runs eagerly. The CPU captures nothing."""
        self._own_graphs = own_graphs
        self._model, self._sharded, self._device = model, list(sharded), device
        tables = {id(parameter) for module in sharded for parameter in module.parameters()}
        dense = {n: p for n, p in model.named_parameters() if id(p) not in tables}
        named = {n: p for n, p in dense.items() if p.requires_grad}
        self._trained, self._frozen = TrainedParameters(dense.items(), processors), FrozenModel(model, sharded)
        within = [(f"a sharded module's parameter of shape {tuple(p.shape)}", p) for p in processors]
        self._hooks = LateHooks(model, sharded, [*named.items(), *within])
        self._settling = 0
        """Number of batches still to run eagerly after a change."""
        self._change: str | None = None
        self._kind: Kind = ((), ())
        """That of the batch that runs, or is captured."""
        make = partial(dist.new_group, ranks, timeout=group_timeout(), use_local_synchronization=True)
        self.group = group = lend_group("dense", ranks, make)
        self.gradients = FlatGradients([*named.values(), *processors], device, group, late=len(processors))
        self._state = partial(_state, self._frozen, model, self._sharded, device)
        self._runs = DenseRun(model, list(named), self.gradients, device, group, self._state)
        self._runs.in_iteration = not own_graphs
        self._pool = GraphPool()
        self.memory = GraphMemory(device)
        self._batches = 0
        self._form: Form | None = None
        self._why: dict[str, int] = {}
        self._other_form: str | None = None
        self._padding: dict[Form, str | None] = {}
        self.failure: str | None = None
        """Reason why the dense part cannot be captured; None if there is none."""
        self.eager_batches = 0
        """Batches that ran eagerly although graphs have run others, or could have."""
        self._reduce: torch.cuda.CUDAGraph | None = None
        self.gradients.mean()  # initializes the communicator, which a capture cannot do
        if captures(device) and len(ranks) > 1:
            self._reduce = record(self.gradients.mean)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters with gradients, those within sharded modules last."""
        return self.gradients.parameters

    @property
    def captured(self) -> bool:
        """Whether batches are replayed."""
        return self._pool.graphs() != []

    @property
    def exchanges(self) -> bool:
        """Whether the model may launch collectives of its own, as its first batch has shown."""
        return self._runs.collectives is not None or any(True for _ in marked_hooks(self._model))

    @property
    def why_eager(self) -> str | None:
        """The reasons why batches have run eagerly, with counts; None if only those before the capture have."""
        if self.failure is not None:
            return f"the dense part cannot be captured: {self.failure}"
        of_all = f"of {self._batches} batches ran eagerly: "
        return "; ".join(f"{count} {of_all}{why}" for why, count in self._why.items()) or None

    def forward_backward(
        self, batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> tuple[Any, list[Tensor | None]]:
        """Returns the model's output, and the gradients of outputs.values, which the next call may overwrite.

        features: the inputs of the called modules. The dense part must not read a KJT of the batch while captured.
        """
        features = [*features, *kjts_of(batch)]
        fields = list(leaves(batch, set(map(id, features))))
        if self._own_graphs:
            self.look()
        result = None
        if self.failure is None and self._own_graphs:
            result = self._by_graph(fields, batch, features, lookups, outputs)
        if result is None:
            result = self._eager(batch, features, lookups, outputs)
            self._frozen.ran(kind_of(fields, map(len, outputs.values)))
        return result

    def look(self) -> str | None:
        """Returns the recent change in the state that graphs rely on; None without one. Must be called before every
        batch. ValueError if a parameter has been frozen or unfrozen."""
        self._batches += 1
        self._trained.check()
        if (added := self._hooks.look()) is not None and self.failure is None:
            self.failure = added
            self._drop_graphs()
        self._look_for_changes()
        return self._change if self._settling > 0 else None

    def launch(
        self,
        batch: Any,
        features: Sequence[Any],
        lookups: Lookups,
        outputs: EmbeddingOutputs,
        streams: StageStreams,
        wait: Callable[[], None],
    ) -> Made:
        """Runs forward and backward for another graph's capture, or eagerly in the same way, with a batch in memory
        that stays. The parameters' gradients are then to be given to `keep` or `reduce`. wait: for the outputs, on the
        current stream."""
        self._kind = kind_of(leaves(batch, set(map(id, features))), map(len, outputs.values))
        made = self._runs.make(batch, features, outputs.leaves(), lookups, capturing=True, mark=streams.mark, wait=wait)
        self._frozen.ran(self._kind)
        self._runs.check(made)
        return made

    def keep(self, made: Made) -> None:
        """Stores the gradients of the dense part, on the stream that has made them."""
        self.gradients.keep(made.of_weights, range(self._runs.count))

    def reduce(
        self,
        made: Made,
        of_processors: Sequence[Tensor],
        after: "torch.cuda.Event | None",
        streams: StageStreams,
        peers: "Peers | None",
        reduced: Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None],
    ) -> None:
        """Stores all gradients and computes their mean over the ranks, on the current stream: those that the backward
        made first before it has made the others. after: event after which those of the processors are made. reduced:
        called for each bucket, after its mean. All gradients must live until this stream's work is awaited.
        Collective."""
        grads = [*made.of_weights, *of_processors]
        at = [*made.weights_at, *(Mark(made.end.turn + 1, after) for _ in of_processors)]
        for bucket in self.gradients.buckets:
            streams.wait(last_of(at[i] for i in bucket.members))
            self.gradients.keep([grads[i] for i in bucket.members], bucket.members)
            self.gradients.mean(peers, bucket)
            views = [self.gradients.views[i] for i in bucket.members]
            reduced([self.parameters[i] for i in bucket.members], views)

    def capture_alone(self) -> None:
        """Begins to capture the dense part in graphs of its own, where an iteration's graph was to hold it."""
        self._own_graphs, self._runs.in_iteration = True, False
        self.failure = self.failure or self._runs.collectives

    def before_capture(self) -> None:
        """Notes the tensors that modules have as plain attributes, which a graph keeps, and values."""
        self._frozen.watch_attributes()

    def put_back(self) -> str | None:
        """Restores parameters, buffers, attributes and values that a capture has replaced; returns the first one in
        words."""
        did = self._frozen.put_back(self._kind)
        return None if did is None else f"its forward {did}"

    def keep_of_processors(self, grads: Sequence[Tensor]) -> None:
        """Stores the gradients of parameters within sharded modules, before the all-reduce of every batch."""
        self.gradients.keep(grads, range(self._runs.count, len(self.parameters)))

    def all_reduce(self) -> None:
        """Computes the mean of the gradients over all ranks, on the current stream, as the parameters' `.grad`.
        Collective."""
        self.gradients.accumulate()
        if self._reduce is not None:
            self._reduce.replay()
        else:
            self.gradients.mean()
        self.gradients.publish()

    def close(self) -> None:
        """Destroys the graphs: NCCL does not release a communicator while a graph that captured it exists."""
        self._drop_graphs()
        destroy([] if self._reduce is None else [self._reduce])
        self._reduce = None

    # The choice of a graph

    def _look_for_changes(self) -> None:
        self._settling = max(self._settling - 1, 0)
        change = self._frozen.change()
        if change is None or self._batches == 1:
            return
        self._settling, self._change = WARM_UP, change
        if len(self._pool) > 0:
            logger.info("%s: the CUDA graphs of the dense part are captured again", change)
            self._drop_graphs()

    def _by_graph(
        self, fields: list[Any], batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> tuple[Any, list[Tensor | None]] | None:
        """Returns the results of this batch's graph, which is rehearsed or captured now if due; None if the batch runs
        eagerly."""
        form, counts = form_of(fields, outputs, self._device), [len(values) for values in outputs.values]
        if form is None:
            why = why_no_form(leaf_names(batch, set(map(id, features))), fields)
            assert why is not None, "no form"
            self._count_eager(why)
            self._make_room_for(fields, outputs, counts)
            return None
        if self._form is None:
            self._form = form
        pads = any(outputs.jagged) and self._pads(form, batch, features, lookups, outputs)
        graph, plan = self._pool.find(form, counts, outputs.jagged, pads)
        if graph is not None and plan.rows is None:
            return self._replay(graph, fields, outputs)
        if plan.rows is not None and self._settling > 0:
            plan = Plan(None, f"within {WARM_UP} batches something had changed: {self._change}")
        if plan.rows is None or not captures(self._device):
            if plan.eager is not None or form != self._form:
                self._say_eager(plan.eager, form, batch, features, outputs)
            self._make_room_for(fields, outputs, counts)
            return None
        size = input_bytes(fields, outputs.values, plan.rows)
        run = partial(self._runs.run, lookups=lookups, capturing=True)
        self._kind = kind_of(fields, plan.rows)
        if graph is None:
            self._make_room_for(fields, outputs, plan.rows)
            graph = self._pool.new(form, batch, features, outputs, plan.rows)
            result = self._rehearse(graph, run, fields, outputs)
        else:
            if not self.memory.before_capture(size):
                self._make_room(graph)
            self._capture(graph, run, size)
            result = None if self.failure is not None else self._replay(graph, fields, outputs)
        if result is None:
            graph = None  # whose memory is then free
            self._drop_graphs()
        return result

    def _replay(self, graph: Captured, fields: list[Any], outputs: EmbeddingOutputs) -> tuple[Any, list[Tensor | None]]:
        self.gradients.restore(graph.used)
        return graph.replay(fields, outputs)

    def _rehearse(
        self, graph: Captured, run: Run, fields: list[Any], outputs: EmbeddingOutputs
    ) -> tuple[Any, list[Tensor | None]] | None:
        """Returns the results of a batch that runs eagerly in the graph's memory. None if the model cannot, which
        changes nothing: `failure` then has the reason."""
        put_back = self._state()
        try:
            result = graph.rehearse(run, fields, outputs)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and self.exchanges and self.group.size() > 1:
                raise  # after the forward, whose exchanges no other rank makes twice
            put_back()
            self.failure = told(error)
            return None
        self._frozen.ran(self._kind)
        return result

    def _capture(self, graph: Captured, run: Run, size: int) -> None:
        """Captures a graph for inputs of `size` bytes. If that fails, `failure` has the reason."""
        self.before_capture()
        try:
            with self.memory.capturing(size):
                self._pool.capture(graph, run)
            graph.used = self.gradients.used[: self._runs.count]
            self.failure = self.memory.missing()
        except Exception as error:
            self.failure = told(error)
        if (replaced := self.put_back()) is not None and self.failure is None:
            self.failure = f"{replaced}, which no replay does"

    def _make_room_for(self, fields: list[Any], outputs: EmbeddingOutputs, counts: list[int]) -> None:
        """Frees memory that an eager batch needs."""
        if not self.memory.before_eager(input_bytes(fields, outputs.values, counts)):
            self._make_room()

    def _make_room(self, but: Captured | None = None) -> None:
        """Drops all graphs, apart from one that was rehearsed and needs the room."""
        logger.info("the CUDA graphs of the dense part make room for a larger batch: they are captured again after it")
        self._drop_graphs(but)

    def _drop_graphs(self, but: Captured | None = None) -> None:
        destroy(self._pool.graphs())
        self._pool.clear(but)
        self.memory.dropped()

    def _pads(
        self, form: Form, batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> bool:
        """Whether batches of this form may be padded with tokens. Tested when numbers of tokens first differ."""
        if form not in self._padding and self._pool.asks_for_padding(form, [len(values) for values in outputs.values]):
            kept = {id(kjt): kjt for kjt in features}

            def run(outputs: EmbeddingOutputs) -> Made:
                # Of a copy, as a forward may change the batch in place.
                return self._runs.make(copy_of(batch, kept), features, outputs, lookups)

            with without_marked_hooks(self._model):  # which exchange, and other ranks may make no trial now
                why = why_padding_matters(self._model, self._sharded, run, outputs, self._state())
            self._padding[form] = why
            if why is not None:
                logger.warning("the dense part is captured for exact numbers of tokens only: %s", why)
                self._pool.never_pad(form, why)
        return self._padding.get(form, "unknown") is None

    def _say_eager(
        self, why: str | None, form: Form, batch: Any, features: Sequence[Any], outputs: EmbeddingOutputs
    ) -> None:
        if why is None:
            if self._other_form is None:
                assert self._form is not None
                names = list(leaf_names(batch, set(map(id, features))))
                other = difference(names, outputs, self._form, form)
                self._other_form = f"a form had to come back before it is captured, where {other}"
            why = self._other_form
        self._count_eager(why)

    def _count_eager(self, why: str) -> None:
        self.eager_batches += 1
        if why not in self._why:
            logger.warning("the dense part has no CUDA graph for this batch, and runs it eagerly: %s", why)
        self._why[why] = self._why.get(why, 0) + 1

    def _eager(
        self, batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> tuple[Any, list[Tensor | None]]:
        result = self._runs.eager(batch, features, lookups, outputs)
        if self.failure is None and not self.captured:
            self.failure = self._runs.problem or (self._runs.collectives if self._own_graphs else None)
        return result
