"""Stage 3 without DistributedDataParallel: forward, loss and backward of the dense part as CUDA graphs.

The gradient all-reduce is a graph of its own, of one collective on a flat buffer. Apart from the others, it runs beside
the embedding backward, which needs the gradients of the embeddings alone; and a rank whose last batch is smaller can
run its forward and backward eagerly while all ranks make the same collective call. A graph with the all-reduce inside
would be replayed by some ranks there and not by others, which NCCL does not promise to survive.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from .batch_fields import kjts_of, leaf_names, leaves, snapshot
from .batch_signature import Form, difference, form_of
from .capture_errors import told
from .cuda_graph import captures, destroy, record
from .embedding_outputs import EmbeddingOutputs, Lookups
from .frozen import FrozenModel, TrainedParameters
from .gradients import FlatGradients
from .graph_memory import GraphMemory, input_bytes
from .graph_pool import WARM_UP, GraphPool, Plan
from .groups import group_timeout
from .padding import why_padding_matters

logger = logging.getLogger(__name__)


class DenseGraph:
    """Forward, loss and backward of the unwrapped model, then the mean of its gradients over all ranks.

    A graph is of one form of batch: shapes, dtypes, values that are no tensors. Each form that comes back gets its own,
    up to a number of them, and as far as memory goes (see graph_memory.py); of unpooled embeddings a graph has room for
    a number of tokens, and batches with fewer are padded, if that changes nothing (see GraphPool and padding.py). All
    others run eagerly, and it is said why.

    Gradients come from torch.autograd.grad, which runs no AccumulateGrad: neither DDP's hooks nor those that a user
    registers there see them. They lie in flat buffers for good, and `all_reduce` makes them the parameters' `.grad`,
    for the user's optimizer, whose learning rate is its own business. A graph freezes what Python decides: control
    flow and Python numbers of the model stay as they were at the capture. Parameters and buffers that move, and modules
    that change their mode, are noticed: batches run eagerly then until WARM_UP ones have found nothing changed, and
    graphs are captured again. A parameter that is frozen or unfrozen after the first batch is an error, as with DDP.

    What torch.autograd.grad cannot run, such as checkpoints with use_reentrant=True, is seen in the first batch: it and
    all others run with Tensor.backward then, on every rank. However a rank makes its gradients, the one collective of
    an iteration is that of `all_reduce`.
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
        feature processors or replicated tables, whose gradients `keep_of_processors` is given. own_graphs: False where
        an iteration's graph holds the dense part, and all else runs eagerly. On the CPU nothing is captured."""
        self.own_graphs = own_graphs
        self._model, self._sharded, self._device = model, list(sharded), device
        tables = {id(parameter) for module in sharded for parameter in module.parameters()}
        dense = {n: p for n, p in model.named_parameters() if id(p) not in tables}
        named = {n: p for n, p in dense.items() if p.requires_grad}
        self._trained, self._frozen = TrainedParameters(dense.items(), processors), FrozenModel(model, sharded)
        self._settling = 0
        """The number of batches that are still to run eagerly after a change."""
        self._change: str | None = None
        self._names, self._parameters = list(named), list(named.values())
        self._group = dist.new_group(ranks, timeout=group_timeout(), use_local_synchronization=True)
        self.gradients = FlatGradients([*self._parameters, *processors], device, self._group)
        self._by_backward: bool | None = None
        self._pool = GraphPool()
        self._memory = GraphMemory(device)
        self._batches = 0
        self._form: Form | None = None
        self._why: dict[str, int] = {}
        self._other_form: str | None = None
        self._padding: dict[Form, str | None] = {}
        self.failure: str | None = None
        """Reason why the dense part cannot be captured; None while there is none."""
        self.eager_batches = 0
        """Batches that no graph ran although some have run others, or could."""
        self._reduce: torch.cuda.CUDAGraph | None = None
        self.gradients.mean()  # sets the communicator up, which a capture cannot
        if captures(device) and len(ranks) > 1:
            self._reduce = record(self.gradients.mean)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that gradients are made for, those within sharded modules last."""
        return self.gradients.parameters

    @property
    def captured(self) -> bool:
        """Whether batches are replayed."""
        return len(self._pool) > 0

    @property
    def why_eager(self) -> str | None:
        """Returns why batches have run eagerly, and how many; None while none but those before the capture have."""
        if self.failure is not None:
            return f"the dense part cannot be captured: {self.failure}"
        of_all = f"of {self._batches} batches ran eagerly: "
        return "; ".join(f"{count} {of_all}{why}" for why, count in self._why.items()) or None

    @property
    def what_it_holds(self) -> str:
        """A note for an error that is for want of memory."""
        gib = self._memory.idle / 2**30
        return f'CUDA graphs of the dense part hold {gib:.1f} GiB of it: cuda_graph="none" trains without them'

    def forward_backward(
        self, batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> tuple[Any, list[Tensor | None]]:
        """Returns the model's output, and the gradients of outputs.values, which the next call may overwrite.

        features: the inputs of the called modules. The dense part must read no KJT of the batch while captured.
        """
        features = [*features, *kjts_of(batch)]
        fields = list(leaves(batch, set(map(id, features))))
        if self.own_graphs:
            self.look()
        graph = None
        if self.failure is None and self.own_graphs:
            graph = self._graph_of(fields, batch, features, lookups, outputs)
        return graph.replay(fields, outputs) if graph is not None else self._eager(batch, features, lookups, outputs)

    def look(self) -> str | None:
        """Returns the change of the last batches in the state that graphs rely on; None without one. To be called
        before every batch. ValueError where a parameter is trained that was not, or the other way round."""
        self._batches += 1
        self._trained.check()
        self._look_for_changes()
        return self._change if self._settling > 0 else None

    def launch(
        self, batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> tuple[Any, list[Tensor | None]]:
        """forward_backward for another graph's capture, or as it will be captured: of a batch in memory that stays."""
        return self._run(batch, features, outputs.leaves(), lookups, capturing=True)

    def put_back(self) -> str | None:
        """Restores parameters and buffers that a capture has replaced; returns their names in words."""
        replaced = self._frozen.put_back()
        return None if replaced is None else f"its forward puts another tensor in the place of {replaced}"

    def keep_of_processors(self, grads: Sequence[Tensor]) -> None:
        """Takes the gradients of the parameters within sharded modules, before the all-reduce of every batch."""
        self.gradients.keep(grads, first=len(self._parameters))

    def all_reduce(self) -> None:
        """The mean of the gradients over all ranks, on the current stream, as `.grad` of the parameters. Collective."""
        self.gradients.accumulate()
        if self._reduce is not None:
            self._reduce.replay()
        else:
            self.gradients.mean()
        self.gradients.publish()

    def close(self) -> None:
        """Destroys the graphs: NCCL does not let go of a communicator before the last graph that has captured it."""
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
        if self.captured:
            logger.info("%s: the CUDA graphs of the dense part are captured again", change)
            self._drop_graphs()

    def _graph_of(
        self, fields: list[Any], batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> Any:
        """Returns the graph for this batch, captured now if due; None where it runs eagerly."""
        form, counts = form_of(fields, outputs, self._device), [len(values) for values in outputs.values]
        if self._form is None:
            self._form = form
        pads = any(outputs.jagged) and self._pads(form, batch, features, lookups, outputs)
        graph, plan = self._pool.find(form, counts, outputs.jagged, pads)
        if graph is not None:
            return graph
        if plan.rows is not None and self._settling > 0:
            plan = Plan(None, f"within {WARM_UP} batches something had changed: {self._change}")
        if plan.rows is None or not captures(self._device):
            if plan.eager is not None or form != self._form:
                self._say_eager(plan.eager, form, batch, features, outputs)
            if not self._memory.before_eager(input_bytes(fields, outputs.values, counts)):
                self._make_room()
            return None
        size = input_bytes(fields, outputs.values, plan.rows)
        if not self._memory.before_capture(size):
            self._make_room()
        run = partial(self._run, lookups=lookups, capturing=True)
        try:
            with self._memory.capturing(size):
                graph = self._pool.capture(form, batch, features, outputs, plan.rows, run)
            self.failure = self._memory.missing()
        except Exception as error:
            self.failure = told(error)
        if (replaced := self.put_back()) is not None and self.failure is None:
            self.failure = f"{replaced}, which no replay does"
        if self.failure is not None:
            graph = None
            self._drop_graphs()
        return graph

    def _make_room(self) -> None:
        logger.info("the CUDA graphs of the dense part make room for a larger batch: they are captured again after it")
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        destroy(self._pool.graphs())
        self._pool.clear()
        self._memory.dropped()

    def _pads(
        self, form: Form, batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> bool:
        """Whether batches of this form may be padded with tokens. Known when numbers of tokens first differ."""
        if form not in self._padding and self._pool.asks_for_padding(form, [len(values) for values in outputs.values]):
            put_back = snapshot(self._model, self._sharded, self._device)
            run = partial(self._run, batch, features, lookups=lookups, keep=False)
            try:
                self._padding[form] = why_padding_matters(self._model, run, outputs, put_back)
            except torch.OutOfMemoryError:
                self._padding[form] = "there is too little memory to try out whether tokens after the last one matter"
            put_back()
            if (why := self._padding[form]) is not None:
                logger.warning("the dense part is captured for exact numbers of tokens only: %s", why)
                self._pool.never_pad(form, why)
        return self._padding.get(form, "unknown") is None

    def _say_eager(
        self, why: str | None, form: Form, batch: Any, features: Sequence[Any], outputs: EmbeddingOutputs
    ) -> None:
        self.eager_batches += 1
        if why is None:
            if self._other_form is None:
                assert self._form is not None
                names = list(leaf_names(batch, set(map(id, features))))
                other = difference(names, outputs, self._form, form)
                self._other_form = f"a form had to come back before it is captured, where {other}"
            why = self._other_form
        if why not in self._why:
            logger.warning("the dense part has no CUDA graph for this batch, and runs it eagerly: %s", why)
        self._why[why] = self._why.get(why, 0) + 1

    # Eager batches

    def _eager(
        self, batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> tuple[Any, list[Tensor | None]]:
        if self._by_backward is None:
            return self._first(batch, features, lookups, outputs)
        run = self._backward if self._by_backward else self._run
        return run(batch, features, outputs.leaves(), lookups)

    def _first(
        self, batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> tuple[Any, list[Tensor | None]]:
        """Runs the first batch, and decides how all ranks run the next ones. Collective, so that collectives within a
        model are run again by all ranks or by none."""
        put_back = snapshot(self._model, self._sharded, self._device)
        result, own = None, None
        try:
            result = self._run(batch, features, outputs.leaves(), lookups)
        except Exception as error:
            own = error
        self._by_backward = self._has_failed(own)
        if result is not None and not self._by_backward:
            return result
        put_back()
        self.failure = (
            "another rank could not run its first batch by torch.autograd.grad"
            if own is None
            else f"{type(own).__name__}: {own}"
        )
        result = own = None  # and the activations that they hold
        return self._backward(batch, features, outputs.leaves(), lookups)

    def _has_failed(self, own: Exception | None) -> bool:
        """Whether any rank has such an error. Collective; where a broken device cannot even answer, `own` is raised."""
        try:
            failed = torch.tensor(float(own is not None), device=self._device)
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
            return bool(failed.item())
        except RuntimeError as error:
            if own is None:
                raise
            raise own from error

    def _run(
        self,
        batch: Any,
        features: Sequence[Any],
        outputs: EmbeddingOutputs,
        lookups: Lookups,
        capturing: bool = False,
        keep: bool = True,
    ) -> tuple[Any, list[Tensor | None]]:
        """Runs forward and backward. capturing: the parameters themselves are not touched, as their leaves are of
        another stream; the batches before have shown that the model does not read them. keep: the gradients, in the
        flat buffers; without it they are returned, with the losses, as the output."""
        weights = self._stand_ins()
        asked = [not capturing and parameter.requires_grad for parameter in self._parameters]

        def call(batch: Any) -> tuple[Tensor, Any]:
            return functional_call(self._model, dict(zip(self._names, weights, strict=True)), (batch,))

        losses, output = lookups.call(call, batch, features, outputs)
        values = outputs.values
        trained = [weight for weight in weights if weight.requires_grad]
        inputs = [*values, *trained, *(p for p, ask in zip(self._parameters, asked, strict=True) if ask)]
        of_values_and_rest = torch.autograd.grad(torch.sum(losses, dim=0), inputs, allow_unused=True)
        of_values: list[Tensor | None] = list(of_values_and_rest[: len(values)])
        rest = iter(of_values_and_rest[len(values) :])
        of_weights = [next(rest) if weight.requires_grad else None for weight in weights]
        past = [next(rest) if ask else None for ask in asked]
        if not keep:
            return (losses.detach(), output, of_weights), of_values
        self._keep(of_weights, past)
        return output, of_values

    def _backward(
        self, batch: Any, features: Sequence[Any], outputs: EmbeddingOutputs, lookups: Lookups
    ) -> tuple[Any, list[Tensor | None]]:
        """Does the same by Tensor.backward, into the stand-ins too: at the parameters themselves, hooks of a DDP that
        has not trained yet would count it as its first pass; for a static graph, that lets DDP reduce wrongly
        afterwards."""
        weights, step = self._stand_ins(), _Step(self._model)
        for parameter in self._parameters:
            parameter.grad = None

        def call(batch: Any) -> tuple[Tensor, Any]:
            within = {f"model.{name}": weight for name, weight in zip(self._names, weights, strict=True)}
            return functional_call(step, within, (batch,))

        _, output = lookups.call(call, batch, features, outputs)
        self._keep([weight.grad for weight in weights], [p.grad for p in self._parameters])
        return output, outputs.grads

    def _stand_ins(self) -> list[Tensor]:
        """Returns new leaves over the parameters' memory. Autograd waits for the stream on which a leaf was first used,
        and that of the parameters is not the capturing one."""
        return [parameter.detach().requires_grad_(parameter.requires_grad) for parameter in self._parameters]

    def _keep(self, grads: list[Tensor | None], past: list[Tensor | None]) -> None:
        """past: the gradients of the parameters themselves, which a module that holds them in its own list reads
        instead of their stand-ins."""
        for i, grad in enumerate(past):
            if grad is not None:
                within = grads[i]
                grads[i] = grad if within is None else within + grad
                if self.failure is None and not self.captured:
                    self.failure = f"the model reads {self._names[i]} past the module that it is a parameter of"
        self.gradients.keep(grads)


class _Step(nn.Module):
    """Forward and backward in one: checkpoints run parts of the model again, which must have the same parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        losses, output = self.model(batch)
        torch.sum(losses, dim=0).backward()
        return losses, output
