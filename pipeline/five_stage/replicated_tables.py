"""Data-parallel tables without DistributedDataParallel, beside the graph of a whole iteration.

TorchRec wraps their lookups in DDP, whose hooks and buckets cannot be captured. Here the wrapped lookup runs over new
leaves, and their gradients join those of the dense part: in one all-reduce, and in the user's optimizer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .batch_fields import forwards_replaced
from .sharded_modules import Sharded


@contextmanager
def leaves_of_now(kernels: Sequence[nn.Module]) -> Iterator[None]:
    """Replaces the kernels' parameters, within the block, by new leaves over the same memory. Autograd waits for the
    stream on which a leaf was first used, as long as anything holds its node, and that is not the capturing one."""
    before = [dict(kernel._parameters) for kernel in kernels]
    for kernel, parameters in zip(kernels, before, strict=True):
        for name, of in parameters.items():
            if of is not None:
                kernel._parameters[name] = of.detach().requires_grad_(of.requires_grad)  # type: ignore[assignment]
    try:
        yield
    finally:
        for kernel, parameters in zip(kernels, before, strict=True):
            kernel._parameters.update(parameters)


class ReplicatedTables:
    """The data-parallel tables of all sharded modules."""

    def __init__(self, modules: Sequence[Sharded]) -> None:
        self._wrapped: list[DistributedDataParallel] = [
            lookup
            for one in modules
            for lookup in one.collection._lookups
            if isinstance(lookup, DistributedDataParallel)
        ]
        self._kernels = [kernel.emb_module for lookup in self._wrapped for kernel in lookup.module._emb_modules]
        self._leaves: list[Tensor] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """FBGEMM's parameters, one for several tables; an optimizer has slices of them."""
        return [kernel.weights for kernel in self._kernels]

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        """Makes TorchRec look up these tables without DDP within the block."""
        forwards: dict[nn.Module, Any] = {lookup: lookup.module.__call__ for lookup in self._wrapped}
        with leaves_of_now(self._kernels), forwards_replaced(forwards):
            self._leaves = list(self.parameters)
            yield

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of `parameters`, after the embedding backward; zeros for those without one."""
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]
