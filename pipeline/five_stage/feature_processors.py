"""Feature processors beside graphs: the gradients of their parameters, which come from the embedding backward.

A feature processor computes the weights of ids, from parameters that all ranks have, between the input dist and the
lookup. Stage 4 returns the gradients of these weights. From these, torch.autograd.grad computes the parameters'
gradients: hooks of DistributedDataParallel, whose forward did not run, do not see them.

Processing is part of stage 2, in TorchRec and in the graph of an iteration: it reads parameters after the previous
batch's dense update, although the input dist runs ahead of that update. In the input dist of tables split by rows,
TorchRec's processors write the positions of ids, which reads no parameter.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_types import KJTList

from . import reasons
from .sharded_modules import Sharded


class FeatureProcessors:
    """The feature processors of all modules, used for one batch at a time."""

    def __init__(self, modules: Sequence[Sharded], apart: bool, captured: bool) -> None:
        """apart: compute their gradients here, instead of in a joint backward. captured: within a graph too."""
        self._modules, self._apart = [one for one in modules if one.has_processors], apart
        self._weights: list[tuple[Tensor, Tensor]] = []
        self._captured = captured
        self._leaves: dict[int, Tensor] = {}
        self.why_not_captured: str | None = None
        """Reason why no graph can hold the processors, as far as eager batches of this rank have shown."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, each once."""
        found = {
            id(parameter): parameter
            for one in self._modules
            for parameter in one.module._feature_processors.parameters()
            if parameter.requires_grad
        }
        return list(found.values())

    def look_up(self, modules: Sequence[Sharded], contexts: Sequence[Any], features: Sequence[KJTList]) -> list[Any]:
        """Starts stage 2 of a batch; returns an awaitable for each module."""
        self._weights.clear()
        with self._read_as_leaves():
            return [self._look_up(*of_module) for of_module in zip(modules, contexts, features, strict=True)]

    @contextmanager
    def _read_as_leaves(self) -> Iterator[None]:
        """Replaces the parameters, in the modules and in their dicts, by new leaves if graphs hold the processors:
        autograd waits for the stream on which a leaf was first used, and the parameters' stream is not the capturing
        one."""
        parameters = self.parameters if self._captured else []
        self._leaves = {id(of): of.detach().requires_grad_() for of in parameters}
        places = [(of, key, value) for of in self._dicts() for key, value in of.items() if id(value) in self._leaves]
        for of, key, parameter in places:
            of[key] = self._leaves[id(parameter)]
        try:
            yield
        finally:
            for of, key, parameter in places:
                of[key] = parameter

    def _dicts(self) -> Iterator[dict[Any, Any]]:
        if self._captured:
            for one in self._modules:
                for module in one.module._feature_processors.modules():
                    yield from (of for of in vars(module).values() if isinstance(of, dict))

    def _look_up(self, one: Sharded, context: Any, features: KJTList) -> Any:
        if not (self._apart and one.has_processors):
            return one.module.compute_and_output_dist(context, features)
        processed = one.module.apply_feature_processors_to_kjt_list(features)
        return one.collection.compute_and_output_dist(context, KJTList([self._detached(kjt) for kjt in processed]))

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of `parameters`, after the embedding backward; zeros for a parameter without weights,
        as in TorchRec, which adds all parameters, times zero, to the looked-up vectors."""
        parameters = self.parameters
        pairs = [(weights, leaf.grad) for weights, leaf in self._weights if leaf.grad is not None]
        self._weights.clear()
        if not (pairs and parameters):
            return [torch.zeros_like(p) for p in parameters]
        weights, grads = zip(*pairs, strict=True)
        inputs = [self._leaves.get(id(p), p) for p in parameters]
        capturing = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
        past = parameters if self._leaves and not capturing else []  # uses that no leaf has replaced
        found = torch.autograd.grad(weights, [*inputs, *past], grads, allow_unused=True)
        added = list(found[: len(parameters)])
        for i, (parameter, grad) in enumerate(zip(past, found[len(parameters) :], strict=True)):
            if grad is not None:
                within = added[i]
                added[i] = grad if within is None else within + grad
                self.why_not_captured = reasons.READ_PAST(parameter=self._name(parameter))
        return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, added, strict=True)]

    def _name(self, parameter: nn.Parameter) -> str:
        of_modules = ((one.name, one.module._feature_processors.named_parameters()) for one in self._modules)
        return next(f"{module}: {name}" for module, named in of_modules for name, of in named if of is parameter)

    def _detached(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        weights = features.weights_or_none()
        if weights is None or not weights.requires_grad:
            return features
        leaf = weights.detach().requires_grad_()
        self._weights.append((weights, leaf))
        return with_weights(features, leaf)


def with_weights(features: KeyedJaggedTensor, weights: Tensor | None) -> KeyedJaggedTensor:
    """Returns the same KJT, with its cached properties, over other weights."""
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=weights,
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        length_per_key=features.length_per_key_or_none(),
        offset_per_key=features.offset_per_key_or_none(),
        inverse_indices=features.inverse_indices_or_none(),
    )
