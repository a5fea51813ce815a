"""Forward, loss and backward of the dense part: eagerly, or as a graph captures them."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from . import reasons
from .batch_fields import copy_of
from .embedding_outputs import EmbeddingOutputs, Lookups
from .gradients import FlatGradients
from .groups import of_all_ranks
from .own_collectives import OwnCollectives

_FINE, _COLLECTIVES, _FAILED = 0, 1, 2
"""Facts that a rank reports about its first batch."""


class Mark(NamedTuple):
    """A point of the stream that runs the dense part."""

    turn: int
    """Number of the mark in its stream's order."""
    event: "torch.cuda.Event | None"


def last_of(marks: Iterable[Mark]) -> "torch.cuda.Event | None":
    """Returns the event of the last mark; None if there are no marks."""
    return max(marks, key=attrgetter("turn"), default=Mark(0, None)).event


class Made(NamedTuple):
    """Results of a forward and backward of the dense part, and when they were made."""

    losses: Tensor
    output: Any
    of_values: list[Tensor | None]
    """Gradients of the embedding outputs' values."""
    of_weights: list[Tensor | None]
    """Gradients of the parameters."""
    values_at: list[Mark]
    """Points by which the gradients of the values are made; empty if nobody asked."""
    weights_at: list[Mark]
    """Points by which the gradients of the parameters are made; empty if nobody asked."""
    end: Mark


class DenseRun:
    """Makes the gradients of the dense part by torch.autograd.grad, or where that cannot run it by Tensor.backward.

    All ranks decide that together at the first batch. There they also compare which parameters get gradients: ranks
    that differ would train other weights, as each publishes its own, and so would a rank that changes later.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        gradients: FlatGradients,
        device: torch.device,
        group: dist.ProcessGroup,
        state: Callable[[], Callable[[], None]],
    ) -> None:
        """names: of the first of the gradients' parameters, those of the dense part. group: of all ranks. state:
        returns a function that restores what a run of the forward changes in the model."""
        self._model, self._names, self._state = model, list(names), state
        self._parameters, self._gradients = gradients.parameters[: len(names)], gradients
        self._places = _places(model, self._parameters)
        self._device, self._group = device, group
        self._by_backward: bool | None = None
        self._used: list[bool] | None = None
        self.in_iteration = False
        """Whether a graph of iterations holds the dense part: as on several ranks, all batches must then give gradients
        to the same parameters. A graph of one rank's dense part knows which it gives gradients."""
        self.problem: str | None = None
        """Reason why a graph cannot hold the dense part, as an eager batch has shown; None without one."""
        self.collectives: str | None = None
        """Reason why graphs that only some ranks replay cannot hold it: its own collectives; None without them."""

    @property
    def count(self) -> int:
        """Returns the number of parameters."""
        return len(self._parameters)

    def eager(
        self, batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> tuple[Any, list[Tensor | None]]:
        """Returns the model's output and the gradients of outputs.values. Collective for the first batch."""
        if self._by_backward is None:
            return self._first(batch, features, lookups, outputs)
        run = self._backward if self._by_backward else self.run
        return run(batch, features, outputs.leaves(), lookups)

    def run(
        self,
        batch: Any,
        features: Sequence[Any],
        outputs: EmbeddingOutputs,
        lookups: Lookups,
        capturing: bool = False,
    ) -> tuple[Any, list[Tensor | None]]:
        """Runs forward and backward, and stores the parameters' gradients in the flat buffers; returns the output and
        the gradients of outputs.values. capturing: see `make`."""
        made = self.make(batch, features, outputs, lookups, capturing)
        self._keep(made.of_weights)
        return made.output, made.of_values

    def make(
        self,
        batch: Any,
        features: Sequence[Any],
        outputs: EmbeddingOutputs,
        lookups: Lookups,
        capturing: bool = False,
        mark: "Callable[[], torch.cuda.Event | None] | None" = None,
        wait: Callable[[], None] | None = None,
    ) -> Made:
        """Runs forward and backward. capturing: does not touch the parameters themselves, because their leaves belong
        to another stream; earlier batches have shown that the model does not read them. mark: records an event on the
        current stream, once for each gradient; None: nobody asks when they are made. wait: see Lookups.call."""
        weights = self._stand_ins()
        asked = [not capturing and parameter.requires_grad for parameter in self._parameters]

        def call(batch: Any) -> tuple[Tensor, Any]:
            within = {name: weights[of] for name, of in self._places}
            return functional_call(self._model, within, (batch,), tie_weights=False)

        losses, output = lookups.call(call, batch, features, outputs, wait)
        values = outputs.values
        # After the forward, so that these hooks run after those that the model itself has put on its leaves.
        marks = _Marks([*values, *weights] if mark is not None else [], mark, self._device)
        trained = [weight for weight in weights if weight.requires_grad]
        inputs = [*values, *trained, *(p for p, ask in zip(self._parameters, asked, strict=True) if ask)]
        of_values_and_rest = torch.autograd.grad(torch.sum(losses, dim=0), inputs, allow_unused=True)
        of_values: list[Tensor | None] = list(of_values_and_rest[: len(values)])
        rest = iter(of_values_and_rest[len(values) :])
        of_weights = [next(rest) if weight.requires_grad else None for weight in weights]
        self._add_past(of_weights, [next(rest) if ask else None for ask in asked])
        *at, end = marks.all()
        return Made(losses.detach(), output, of_values, of_weights, at[: len(values)], at[len(values) :], end)

    def check(self, made: Made) -> None:
        """Raises ValueError if the parameters that have gradients are not those of the first batch."""
        self._check_uses(made.of_weights)

    def _first(
        self, batch: Any, features: Sequence[Any], lookups: Lookups, outputs: EmbeddingOutputs
    ) -> tuple[Any, list[Tensor | None]]:
        """Runs the first batch, and decides how all ranks run the next ones. Collective, so that either all ranks or
        none run collectives within a model again."""
        put_back = self._state()
        again = copy_of(batch, {id(kjt): kjt for kjt in features})  # a forward may change the batch in place
        watch = OwnCollectives(self._model) if self._group.size() > 1 else None
        result, turns, own = None, list[int](), None
        try:
            with watch or nullcontext():
                result, turns = self._in_turn(batch, features, outputs.leaves(), lookups)
        except Exception as error:
            own = error
        exchanges = watch is not None and watch.seen
        told = self._most(_FAILED if own is not None else _COLLECTIVES if exchanges else _FINE, own)
        if told == _COLLECTIVES:
            self.collectives = reasons.OWN_COLLECTIVES()
        self._by_backward = told == _FAILED
        if result is None or self._by_backward:
            put_back()
            self.problem = (
                "another rank could not run its first batch by torch.autograd.grad"
                if own is None
                else f"{type(own).__name__}: {own}"
            )
            result, turns, own = None, [], None  # frees the activations that they hold
            result = self._backward(again, features, outputs.leaves(), lookups)
        self._agree_on_uses()
        self._agree_on_order(turns)
        return result

    def _in_turn(
        self, batch: Any, features: Sequence[Any], outputs: EmbeddingOutputs, lookups: Lookups
    ) -> tuple[tuple[Any, list[Tensor | None]], list[int]]:
        """Does what `run` does; also returns the turn in which the backward has made each parameter's gradient."""
        made = self.make(batch, features, outputs, lookups, mark=lambda: None)
        self._keep(made.of_weights)
        return (made.output, made.of_values), [mark.turn for mark in made.weights_at]

    def _agree_on_order(self, turns: Sequence[int]) -> None:
        """Lays the gradients out in the order in which the first backward has made them, if it is the same on all
        ranks. turns: see `_in_turn`; empty: no order. Collective."""
        order = sorted(range(len(turns)), key=lambda i: (turns[i], -i))
        if order and all(other == order for other in of_all_ranks(order, self._group)):
            self._gradients.order(order)

    def _most(self, own: int, error: Exception | None) -> int:
        """Returns the largest of all ranks' numbers. Collective; where a broken device cannot even answer, `error` is
        raised."""
        try:
            most = torch.tensor(own, device=self._device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
            return int(most.item())
        except RuntimeError as broken:
            if error is None:
                raise
            raise error from broken

    def _agree_on_uses(self) -> None:
        """Raises ValueError on every rank that names a parameter that gets gradients on some ranks only. Collective."""
        self._used = self._gradients.used[: self.count]
        if self._group.size() == 1:
            return
        counts = torch.tensor(self._used, dtype=torch.int32, device=self._device)
        dist.all_reduce(counts, group=self._group)
        for name, count in zip(self._names, counts.tolist(), strict=True):
            if 0 < count < self._group.size():
                raise ValueError(f"{name} gets a gradient on {count} of {self._group.size()} ranks: {_INSTEAD}")

    def _check_uses(self, grads: Sequence[Tensor | None]) -> None:
        used = [grad is not None for grad in grads]
        stay = self.in_iteration or self._group.size() > 1
        if self._used is None or used == self._used or not stay:
            return
        name, has = next(
            (name, now) for name, now, was in zip(self._names, used, self._used, strict=True) if now != was
        )
        raise ValueError(
            f"{name} gets {'a' if has else 'no'} gradient from this batch, unlike from the first one: {_INSTEAD}"
        )

    def _backward(
        self, batch: Any, features: Sequence[Any], outputs: EmbeddingOutputs, lookups: Lookups
    ) -> tuple[Any, list[Tensor | None]]:
        """Does the same by Tensor.backward, into stand-ins too: hooks of a DDP that has not trained yet would count a
        backward to the parameters themselves as its first pass; for a static graph, DDP would then reduce wrongly."""
        weights, step = self._stand_ins(), _Step(self._model)
        for parameter in self._parameters:
            parameter.grad = None

        def call(batch: Any) -> tuple[Tensor, Any]:
            within = {f"model.{name}": weights[of] for name, of in self._places}
            return functional_call(step, within, (batch,), tie_weights=False)

        _, output = lookups.call(call, batch, features, outputs)
        grads = [weight.grad for weight in weights]
        self._add_past(grads, [p.grad for p in self._parameters])
        self._keep(grads)
        return output, outputs.grads

    def _stand_ins(self) -> list[Tensor]:
        """Returns new leaves over the parameters' memory. Autograd waits for the stream on which a leaf was first used,
        and the parameters' stream is not the capturing one."""
        return [parameter.detach().requires_grad_(parameter.requires_grad) for parameter in self._parameters]

    def _keep(self, grads: Sequence[Tensor | None]) -> None:
        """Stores the gradients."""
        self._check_uses(grads)
        self._gradients.keep(grads, range(len(grads)))

    def _add_past(self, grads: list[Tensor | None], past: Sequence[Tensor | None]) -> None:
        """Adds `past`: the gradients of the parameters themselves, read by a module that keeps them in its own list,
        instead of the stand-ins."""
        for i, grad in enumerate(past):
            if grad is not None:
                within = grads[i]
                grads[i] = grad if within is None else within + grad
                if self.problem is None:
                    self.problem = f"the model reads {self._names[i]} past the module that it is a parameter of"


class _Marks:
    """Notes when a backward makes the gradients of leaves."""

    def __init__(
        self, leaves: Sequence[Tensor], mark: "Callable[[], torch.cuda.Event | None] | None", device: torch.device
    ) -> None:
        """mark: records an event on the current stream; None without leaves."""
        self._mark, self._device, self._stream = mark, device, _stream(device)
        self._of: list[Mark | None] = [None] * len(leaves)
        self._turns = 0
        for place, leaf in enumerate(leaves):
            if leaf.requires_grad:
                leaf.register_hook(partial(self._note, place))

    def _note(self, place: int, gradient: Tensor) -> None:
        # Streams of the model's own, on which autograd runs what they have run in the forward, have an order of theirs.
        if _stream(self._device) == self._stream:
            self._of[place] = self._next()

    def _next(self) -> Mark:
        self._turns += 1
        return Mark(self._turns, None if self._mark is None else self._mark())

    def all(self) -> list[Mark]:
        """Returns the marks of all leaves, and of the backward's end, which also stands for leaves without one. Must be
        called when the backward has been launched, on the stream that has launched it."""
        end = self._next()
        return [*(mark or end for mark in self._of), end]


def _places(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[tuple[str, int]]:
    """Returns every place of these parameters in the model once: its name, and the parameter's index.

    Where a module has two names, functional_call's own tie_weights replaces its parameters under both, and leaves those
    of the call in the module.
    """
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    return [
        (f"{name}.{key}" if name else key, index[id(parameter)])
        for name, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if id(parameter) in index
    ]


def _stream(device: torch.device) -> "torch.cuda.Stream | None":
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


_INSTEAD = (
    "graphs publish the same gradients on all ranks and for all batches. Use every parameter in every batch, or set "
    "cuda_graph='none' and find_unused_parameters=True of DistributedDataParallel"
)


class _Step(nn.Module):
    """Forward and backward in one: checkpoints rerun parts of the model, which need the same parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        losses, output = self.model(batch)
        torch.sum(losses, dim=0).backward()
        return losses, output
