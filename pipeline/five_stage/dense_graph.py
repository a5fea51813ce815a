"""Stage 3 without DistributedDataParallel: forward, loss and backward of the dense part as one CUDA graph.

The gradient all-reduce is a second graph, of one collective on a flat buffer. Apart from the first, it runs beside the
embedding backward, which needs the pooled gradient alone; and a rank whose last batch is smaller can run its forward
and backward eagerly while all ranks make the same collective call. A graph with the all-reduce inside would be replayed
by some ranks there and not by others, which NCCL does not promise to survive.
"""

import logging
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_module
from torchrec.distributed.types import LazyNoWait

from ..cuda_graph import captures, destroy, record
from .batch_fields import forward_replaced, leaf_names, leaves, map_fields, snapshot
from .batch_signature import difference, form_of
from .groups import group_timeout

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Iterations of the shape to capture that run eagerly: cuBLAS and the autograd thread set themselves up in them."""
_ALIGNMENT = 128  # bytes; optimizers read gradients in vectors
_CONSTANT = (int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))
"""The types, beside tensors, of a captured model's output; such values stay as they were at the capture."""

Call = Callable[[Any], tuple[Tensor, Any]]


def call_dense(call: Call, collection: nn.Module, batch: Any, features: Any, pooled: KeyedTensor) -> tuple[Tensor, Any]:
    """call(batch), in which the collection gives `pooled` for `features`. ValueError if it is given anything else."""

    def forward(given: Any, *_: Any, **__: Any) -> LazyNoWait[KeyedTensor]:
        if given is not features:
            raise ValueError(
                "the model gives its ShardedEmbeddingBagCollection another KJT than for the first batch: the pipeline "
                "has looked up the field of the batch that it gave then"
            )
        return LazyNoWait(pooled)

    with forward_replaced(collection, forward):
        return call(batch)


def with_values(pooled: KeyedTensor, values: Tensor) -> KeyedTensor:
    """A KeyedTensor like `pooled` over other values."""
    return KeyedTensor(pooled.keys(), pooled.length_per_key(), values, pooled.key_dim())


def why_not_graphed(model: DistributedModelParallel, device: torch.device) -> str | None:
    """Says what keeps the dense part of this model out of a CUDA graph, as far as it is known before the capture."""
    wrapped = get_module(model)
    if device.type != "cuda":
        return f"CUDA graphs need a GPU; the pipeline's device is {device}"
    if not isinstance(wrapped, DistributedDataParallel):
        return f"the dense part is wrapped by {type(wrapped).__name__}, not by DistributedDataParallel"
    if wrapped._comm_hooks:
        return "DistributedDataParallel has a communication hook, and a graphed all-reduce would leave it out"
    if getattr(model, "model_trackers", None):
        return "a model tracker counts the calls of the model, of which a graph makes none"
    return None


class DenseGraph:
    """Forward, loss and backward of the unwrapped model, then the mean of its gradients over all ranks.

    Gradients come from torch.autograd.grad, which runs no AccumulateGrad: neither DDP's hooks nor those that a user
    registers there see them. They lie in flat buffers for good, and `all_reduce` makes them the parameters' `.grad`,
    for the user's optimizer, whose learning rate is its own business. A graph freezes what Python decides: control
    flow and Python numbers of the model stay as they were at the capture.

    What torch.autograd.grad cannot run, such as checkpoints with use_reentrant=True, is seen in the first batch: it and
    all others run with Tensor.backward then, on every rank. However a rank makes its gradients, the one collective of
    an iteration is that of `all_reduce`.
    """

    def __init__(self, model: nn.Module, collection: nn.Module, device: torch.device, ranks: list[int]) -> None:
        """Collective over `ranks`. model: unwrapped, with its collection. On the CPU nothing is captured."""
        self._model, self._collection, self._device = model, collection, device
        tables = set(map(id, collection.parameters()))
        named = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in tables}
        self._names, self._parameters = list(named), list(named.values())
        self._flat, self._grads = _flat_gradients(self._parameters)
        self._used = [False] * len(self._parameters)
        self._group = dist.new_group(ranks, timeout=group_timeout(), use_local_synchronization=True)
        self._by_backward: bool | None = None
        self._captured: _Captured | None = None
        self._batches = self._warm = 0
        self._form: list[Any] | None = None
        self._difference = ""
        self.failure: str | None = None
        """Why the dense part is not captured, if it cannot be."""
        self.eager_batches = 0
        """Batches that a graph cannot run, of another form than the first: shapes, dtypes, values that are no tensors,
        autocast."""
        self._reduce: torch.cuda.CUDAGraph | None = None
        self._mean()  # sets the communicator up, which a capture cannot
        if captures(device) and len(ranks) > 1:
            self._reduce = record(self._mean)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that gradients are made for."""
        return self._parameters

    @property
    def why_eager(self) -> str | None:
        """Why batches have run eagerly, and how many; None while none but those before the capture have."""
        if self.failure is not None:
            return f"the dense part cannot be captured: {self.failure}"
        if not self.eager_batches:
            return None
        return (
            f"{self.eager_batches} of {self._batches} batches ran eagerly, as they were not of the form of the first "
            f"one: {self._difference}"
        )

    def forward_backward(
        self, batch: Any, features: KeyedJaggedTensor, pooled: KeyedTensor
    ) -> tuple[Any, Tensor | None]:
        """The model's output, and the gradient of the pooled values, which the next call may overwrite.

        features: the KJT of the batch, which the dense part must not read while captured.
        """
        values = pooled.values()
        fields = list(leaves(batch, features))
        form = form_of(fields, values)
        self._batches += 1
        if self._form is None:
            self._form = form
        if form != self._form:
            self._say_eager(form, batch, features)
        elif self._captured is not None:
            return self._captured.replay(fields, values)
        elif captures(self._device) and self.failure is None:
            self._warm += 1
            if self._warm > WARM_UP and self._capture(batch, features, pooled):
                assert self._captured is not None
                return self._captured.replay(fields, values)
        if self._by_backward is None:
            return self._first(batch, features, pooled)
        run = self._backward if self._by_backward else self._forward_backward
        return run(batch, features, _leaf(pooled))

    def all_reduce(self) -> None:
        """The mean of the gradients over all ranks, on the current stream, as `.grad` of the parameters. Collective."""
        if self._reduce is not None:
            self._reduce.replay()
        else:
            self._mean()
        for parameter, grad, used in zip(self._parameters, self._grads, self._used, strict=True):
            parameter.grad = grad if used else None

    def close(self) -> None:
        """Destroys the graphs: NCCL does not let go of a communicator before the last graph that has captured it."""
        own = self._captured.graph if self._captured is not None else None
        destroy([graph for graph in (own, self._reduce) if graph is not None])
        self._captured = self._reduce = None

    def _first(self, batch: Any, features: Any, pooled: KeyedTensor) -> tuple[Any, Tensor | None]:
        """The first batch, and how all ranks run the next ones. Collective, so that collectives within a model are run
        again by all ranks or by none."""
        put_back = snapshot(self._model, self._collection, self._device)
        result, own = None, None
        try:
            result = self._forward_backward(batch, features, _leaf(pooled))
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
        return self._backward(batch, features, _leaf(pooled))

    def _has_failed(self, own: Exception | None) -> bool:
        """Whether any rank has such an error. Collective; where a broken device cannot even tell, `own` is raised."""
        try:
            failed = torch.tensor(float(own is not None), device=self._device)
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
            return bool(failed.item())
        except RuntimeError as error:
            if own is None:
                raise
            raise own from error

    def _forward_backward(
        self, batch: Any, features: Any, pooled: KeyedTensor, capturing: bool = False
    ) -> tuple[Any, Tensor | None]:
        """capturing: nothing is asked of the parameters themselves, whose leaves are of another stream; the batches
        before have shown that the model reads none of them."""
        weights = self._stand_ins()
        asked = [not capturing and parameter.requires_grad for parameter in self._parameters]

        def call(batch: Any) -> tuple[Tensor, Any]:
            return functional_call(self._model, dict(zip(self._names, weights, strict=True)), (batch,))

        losses, output = call_dense(call, self._collection, batch, features, pooled)
        inputs = [pooled.values(), *weights, *(p for p, ask in zip(self._parameters, asked, strict=True) if ask)]
        of_pooled, *grads = torch.autograd.grad(torch.sum(losses, dim=0), inputs, allow_unused=True)
        rest = iter(grads[len(weights) :])
        past = [next(rest) if ask else None for ask in asked]
        self._keep(list(grads[: len(weights)]), past)
        return output, of_pooled

    def _backward(self, batch: Any, features: Any, pooled: KeyedTensor) -> tuple[Any, Tensor | None]:
        """The same by Tensor.backward, into the stand-ins too: at the parameters themselves, hooks of a DDP that has
        not trained yet would count it as its first pass; of a static graph, that lets DDP reduce wrongly afterwards."""
        weights, step = self._stand_ins(), _Step(self._model)
        for parameter in self._parameters:
            parameter.grad = None

        def call(batch: Any) -> tuple[Tensor, Any]:
            within = {f"model.{name}": weight for name, weight in zip(self._names, weights, strict=True)}
            return functional_call(step, within, (batch,))

        _, output = call_dense(call, self._collection, batch, features, pooled)
        self._keep([weight.grad for weight in weights], [p.grad for p in self._parameters])
        return output, pooled.values().grad

    def _stand_ins(self) -> list[Tensor]:
        """Leaves of now over the parameters' memory. Autograd waits for the stream on which a leaf was first used, and
        that of the parameters is not the capturing one."""
        return [parameter.detach().requires_grad_() for parameter in self._parameters]

    def _keep(self, grads: list[Tensor | None], past: list[Tensor | None]) -> None:
        """past: the gradients of the parameters themselves, which a module that holds them in a list of its own reads
        instead of what stands in for them."""
        for i, grad in enumerate(past):
            if grad is not None:
                within = grads[i]
                grads[i] = grad if within is None else within + grad
                if self.failure is None and self._captured is None:
                    self.failure = f"the model reads {self._names[i]} past the module that it is a parameter of"
        self._used = [grad is not None for grad in grads]
        pairs = [(flat, grad) for flat, grad in zip(self._grads, grads, strict=True) if grad is not None]
        if pairs:
            torch._foreach_copy_([flat for flat, _ in pairs], [grad for _, grad in pairs])

    def _mean(self) -> None:
        """DDP's average: divided, then summed. NCCL does both in one pass."""
        for flat in self._flat if self._group.size() > 1 else ():
            if self._device.type == "cuda":
                dist.all_reduce(flat, dist.ReduceOp.AVG, group=self._group)
            else:
                dist.all_reduce(flat.div_(self._group.size()), group=self._group)

    def _say_eager(self, form: list[Any], batch: Any, features: Any) -> None:
        self.eager_batches += 1
        if self.eager_batches == 1:
            assert self._form is not None
            names = [*leaf_names(batch, features), "the tensor of pooled vectors", "autocast's dtype"]
            self._difference = difference(names, self._form, form)
            if self.failure is None:
                logger.warning(
                    "the dense part's CUDA graph is of one form of batch; this batch and all others that are not run "
                    "eagerly: %s",
                    self._difference,
                )

    def _capture(self, batch: Any, features: KeyedJaggedTensor, pooled: KeyedTensor) -> bool:
        captured = _Captured(batch, features, pooled)
        try:
            captured.capture(partial(self._forward_backward, capturing=True))
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            return False
        self._captured = captured
        return True


class _Step(nn.Module):
    """Forward and backward in one: checkpoints run parts of the model again, which must have the same parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        losses, output = self.model(batch)
        torch.sum(losses, dim=0).backward()
        return losses, output


class FeaturesRead:
    """Stands for the KJT while the dense part is captured: its ids are another batch's at every replay."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(
            f"the dense part reads the batch's KJT (.{name}), which a CUDA graph cannot: its shape changes with every "
            "batch; give what is needed of it as a tensor field of the batch"
        )


class _Captured:
    """The graph, and the memory that it reads and writes."""

    def __init__(self, batch: Any, features: KeyedJaggedTensor, pooled: KeyedTensor) -> None:
        self._features = FeaturesRead()
        self._batch = map_fields(batch, _empty_like, features, self._features)
        self._values = torch.empty_like(pooled.values()).requires_grad_()
        self._tensors = _tensors(leaves(self._batch, self._features), self._values.detach())
        self._pooled = with_values(pooled, self._values)

    def capture(self, run: Callable[[Any, Any, KeyedTensor], tuple[Any, Tensor | None]]) -> None:
        """Runs nothing on the GPU. Whatever `run` raises leaves the device as it was."""
        returned: list[tuple[Any, Tensor | None]] = []
        # A weight that autocast has cast before would be read as it is now, for ever.
        torch.clear_autocast_cache()
        try:
            self.graph = record(lambda: returned.append(run(self._batch, self._features, self._pooled)))
        finally:
            torch.clear_autocast_cache()
        ((output, self._grad),) = returned
        self._output = map_fields(output, _of_graph)

    def replay(self, fields: list[Any], values: Tensor) -> tuple[Any, Tensor | None]:
        """The output, copied out, and the gradient of the pooled values, which the next replay overwrites.

        fields: the leaves of the batch.
        """
        with torch.no_grad():
            torch._foreach_copy_(self._tensors, _tensors(fields, values))
            self.graph.replay()
            return map_fields(self._output, _copied), self._grad


def _flat_gradients(parameters: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """A flat buffer for each dtype, and every parameter's gradient as an aligned view of one of them."""
    sizes: dict[torch.dtype, int] = {}
    starts = []
    for parameter in parameters:
        start = sizes.get(parameter.dtype, 0)
        unit = _ALIGNMENT // parameter.element_size()
        starts.append(start)
        sizes[parameter.dtype] = start + -(-parameter.numel() // unit) * unit
    device = parameters[0].device if parameters else None
    flats = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
    views = [
        flats[p.dtype][start : start + p.numel()].view(p.shape) for p, start in zip(parameters, starts, strict=True)
    ]
    return list(flats.values()), views


def _empty_like(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf


def _of_graph(leaf: Any) -> Any:
    """A leaf of the output, which is in the graph's memory. ValueError for one that cannot be copied out of there."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if isinstance(leaf, _CONSTANT):
        return leaf
    found = "the batch's KJT" if isinstance(leaf, FeaturesRead) else f"a {type(leaf).__name__}"
    raise ValueError(
        f"the model's output holds {found}, which the next replay might overwrite: put out tensors, numbers and "
        "strings, in dataclasses, tuples, lists and dicts"
    )


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _leaf(pooled: KeyedTensor) -> KeyedTensor:
    return with_values(pooled, pooled.values().detach().requires_grad_())


def _tensors(fields: Iterable[Any], values: Tensor) -> list[Tensor]:
    return [*(leaf for leaf in fields if isinstance(leaf, Tensor)), values]
