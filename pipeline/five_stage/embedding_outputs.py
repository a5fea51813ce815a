"""The outputs of the sharded modules for one batch, as flat lists of tensors: for the leaves at which stage 3's
backward ends, and for the memory of a graph."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedTensor
from torchrec.distributed.types import LazyNoWait

from .batch_fields import forwards_replaced
from .sharded_modules import Sharded, refuse_call

_IN_PLACE = re.compile("leaf Variable that requires grad is being used in an in-place operation")

Output: TypeAlias = KeyedTensor | dict[str, JaggedTensor]
"""Pooled outputs; or unpooled embeddings, by feature."""


class EmbeddingOutputs:
    """Outputs of several modules.

    They consist of three lists of tensors: `values`, the vectors, which have gradients; `tokens`, with one row per
    unpooled vector (the ids, if the module returns them); `lengths`, one number per bag or sequence. All are in the
    order of the modules and of their features.
    """

    def __init__(self, names: Sequence[str], outputs: Sequence[Output]) -> None:
        """names: of the modules."""
        self.outputs = list(outputs)
        self._names = list(names)
        self.values: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.lengths: list[Tensor] = []
        self.jagged: list[bool] = []
        """Whether the rows of each of `values` are tokens, whose number changes from batch to batch."""
        self.token_of: list[int] = []
        """Index in `values` of the vectors of each of `tokens`."""
        for output in self.outputs:
            if isinstance(output, KeyedTensor):
                self.values.append(output.values())
                self.jagged.append(False)
                continue
            for of_feature in output.values():
                if (ids := of_feature.weights_or_none()) is not None:
                    self.tokens.append(ids)
                    self.token_of.append(len(self.values))
                self.values.append(of_feature.values())
                self.jagged.append(True)
                self.lengths.append(of_feature.lengths())

    @property
    def value_names(self) -> list[str]:
        """Readable names of `values`."""
        names = []
        for name, output in zip(self._names, self.outputs, strict=True):
            if isinstance(output, KeyedTensor):
                names.append(f"the pooled vectors of {name}")
            else:
                names += [f"the vectors of {name}[{key!r}]" for key in output]
        return names

    def rebuilt(
        self, values: Sequence[Tensor], tokens: Sequence[Tensor] | None = None, lengths: Sequence[Tensor] | None = None
    ) -> "EmbeddingOutputs":
        """Returns the same outputs over other tensors; over the same tokens and lengths if none are given."""
        of_values, of_tokens = iter(values), iter(self.tokens if tokens is None else tokens)
        of_lengths = iter(self.lengths if lengths is None else lengths)
        outputs: list[Output] = []
        for output in self.outputs:
            if isinstance(output, KeyedTensor):
                pooled = KeyedTensor(output.keys(), output.length_per_key(), next(of_values), output.key_dim())
                outputs.append(pooled)
                continue
            by_feature = {}
            for key, jagged in output.items():
                ids = None if jagged.weights_or_none() is None else next(of_tokens)
                by_feature[key] = JaggedTensor(values=next(of_values), weights=ids, lengths=next(of_lengths))
            outputs.append(by_feature)
        return EmbeddingOutputs(self._names, outputs)

    def leaves(self) -> "EmbeddingOutputs":
        """Returns the same outputs over new autograd leaves."""
        return self.rebuilt([values.detach().requires_grad_() for values in self.values])

    @property
    def grads(self) -> list[Tensor | None]:
        """Returns the gradients of `values`, which must be leaves."""
        return [values.grad for values in self.values]


def embedding_backward(outputs: EmbeddingOutputs, grads: Sequence[Tensor | None]) -> None:
    """Runs stage 4, from the outputs of the sharded modules and the gradients of their `values`."""
    pairs = [
        (values, grad)
        for values, grad in zip(outputs.values, grads, strict=False)
        if grad is not None and values.requires_grad
    ]
    if pairs:
        torch.autograd.backward([values for values, _ in pairs], [grad for _, grad in pairs])


class Lookups:
    """Modules that are looked up before the model's forward; during the forward they return these outputs."""

    def __init__(self, modules: Sequence[Sharded], called: Sequence[Sharded]) -> None:
        """modules: all of the model. called: the modules that its forward calls, in that order."""
        self.called = list(called)
        self.names = [one.name for one in called]
        self._refusing = {one.module: refuse_call(one) for one in modules if one not in called}

    def call(
        self,
        call: Callable[[Any], Any],
        batch: Any,
        features: Sequence[Any],
        outputs: EmbeddingOutputs,
        wait: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Any]:
        """Returns call(batch), in which each module returns its output for its KJT, the first of `features`. ValueError
        if it receives anything else. wait: called before an output is returned, to wait for it on the current
        stream."""

        def gives(one: Sharded, expected: Any, output: Output) -> Callable[..., LazyNoWait[Any]]:
            def forward(*args: Any, **kwargs: Any) -> LazyNoWait[Any]:
                if next(iter((*args, *kwargs.values())), None) is not expected:
                    raise ValueError(
                        f"the model gives {one.name} another KJT than with the first batch: the pipeline has looked up "
                        "the batch's field that the model gave then"
                    )
                if wait is not None:
                    wait()
                return LazyNoWait(output)

            return forward

        giving = {
            one.module: gives(one, expected, output)
            for one, expected, output in zip(self.called, features, outputs.outputs, strict=False)
        }
        with forwards_replaced({**self._refusing, **giving}):
            try:
                result: tuple[Tensor, Any] = call(batch)
            except RuntimeError as error:
                if not _IN_PLACE.search(str(error)):
                    raise
                raise ValueError(
                    f"the model changes in place what {' or '.join(self.names)} gave it, or a view of that, where the "
                    "pipeline's dense backward ends: write it out of place, as relu(x) for relu(x, inplace=True)"
                ) from error
            return result
