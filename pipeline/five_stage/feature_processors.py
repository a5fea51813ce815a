"""Feature processors beside a dense graph: the gradients of their parameters, which the embedding backward makes.

A feature processor makes the weights of ids, from parameters that all ranks have, between the input dist and the
lookup. Stage 4 returns the gradients of these weights. From there torch.autograd.grad computes the parameters'
gradients: hooks of DistributedDataParallel, whose forward did not run, see nothing of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_types import KJTList

from .sharded_modules import Sharded


class FeatureProcessors:
    """The feature processors of all modules, for one batch after the other."""

    def __init__(self, modules: Sequence[Sharded], apart: bool) -> None:
        """apart: their gradients are made here, rather than by a backward of all."""
        self._modules, self._apart = [one for one in modules if one.has_processors], apart
        self._weights: list[tuple[Tensor, Tensor]] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Returns those that are trained, each once."""
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
        return [self._look_up(*of_module) for of_module in zip(modules, contexts, features, strict=True)]

    def _look_up(self, one: Sharded, context: Any, features: KJTList) -> Any:
        if not (self._apart and one.has_processors):
            return one.module.compute_and_output_dist(context, features)
        processed = one.module.apply_feature_processors_to_kjt_list(features)
        return one.collection.compute_and_output_dist(context, KJTList([self._detached(kjt) for kjt in processed]))

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of `parameters`, after the embedding backward; zeros for one that no weight comes from,
        as TorchRec does, which adds all of them, times zero, to the looked-up vectors."""
        parameters = self.parameters
        pairs = [(weights, leaf.grad) for weights, leaf in self._weights if leaf.grad is not None]
        self._weights.clear()
        found: Sequence[Tensor | None] = [None] * len(parameters)
        if pairs and parameters:
            weights, grads = zip(*pairs, strict=True)
            found = torch.autograd.grad(weights, parameters, grads, allow_unused=True)
        return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, found, strict=True)]

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
