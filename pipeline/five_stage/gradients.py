"""The gradients of the dense part in flat buffers, and their mean over the ranks."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager

if TYPE_CHECKING:
    from .peers.exchanges import Peers

_ALIGNMENT = 128  # bytes; optimizers read gradients in vectors
_BUCKET = 2**24
"""Bytes from which gradients are reduced before the others are made. Two H200s take 70 us for 16 MiB by NCCL, of which
10 are the same for any size."""


class Bucket(NamedTuple):
    """Gradients of one dtype that are reduced together."""

    flats: list[Tensor]
    """Their parts of a flat buffer, as few as possible."""
    members: list[int]
    """Indices of their parameters, in the order in which the gradients are made."""


class FlatGradients:
    """A buffer for each dtype, and a view of it for each parameter, which is its `.grad` after `publish`."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], device: torch.device, group: dist.ProcessGroup, late: int = 0
    ) -> None:
        """late: number of last parameters whose gradients are made after those of all others."""
        self.parameters, self._device, self._group = list(parameters), device, group
        self.flat, self.views = flat_gradients(self.parameters)
        self._late = len(self.parameters) - late
        self.buckets: list[Bucket] = []
        """All gradients, those that are made first in the first ones; see `order`."""
        self.order(range(self._late - 1, -1, -1))
        self.used = [False] * len(self.parameters)
        """Whether the batch gave each parameter a gradient."""
        self._accumulated: list[Tensor | None] | None = None

    def order(self, made: Sequence[int]) -> None:
        """Divides the gradients into buckets. made: indices of all parameters but the late ones, in the order in which
        a backward makes their gradients; at first the reverse of the parameters' order."""
        late = range(len(self.parameters) - 1, self._late - 1, -1)
        self.buckets = [bucket for of in (made, late) for flat in self.flat for bucket in self._buckets(flat, of)]

    def _buckets(self, flat: Tensor, made: Sequence[int]) -> list[Bucket]:
        """Returns the buckets of a flat buffer, of at least _BUCKET bytes each, except for the last one."""
        buckets, members, nbytes = list[Bucket](), list[int](), 0
        within = [i for i in made if self.views[i].dtype == flat.dtype]
        for i in within:
            members.append(i)
            nbytes += self.views[i].nbytes
            if nbytes >= _BUCKET or i == within[-1]:
                buckets.append(Bucket(self._parts(flat, members), members))
                members, nbytes = [], 0
        return buckets

    def _parts(self, flat: Tensor, members: Sequence[int]) -> list[Tensor]:
        """Returns the parts of a flat buffer that contain these views, and nothing of others."""
        parts: list[list[int]] = []
        unit = _ALIGNMENT // flat.element_size()
        for start, count in sorted((int(self.views[i].storage_offset()), self.views[i].numel()) for i in members):
            end = start + -(-count // unit) * unit
            if parts and parts[-1][1] == start:
                parts[-1][1] = end
            else:
                parts.append([start, end])
        return [flat[start:end] for start, end in parts if start < end]

    def zero(self, zero_grad: Callable[[], None]) -> None:
        """Calls the optimizer's zero_grad. Gradients that it keeps, to accumulate over several batches, are set aside,
        and added to the next ones as in autograd."""
        left = [None if p.grad is None else (p.grad, p.grad._version) for p in self.parameters]
        zero_grad()
        kept = [
            p.grad if was is not None and p.grad is was[0] and p.grad._version == was[1] else None
            for p, was in zip(self.parameters, left, strict=True)
        ]
        self._accumulated = None
        if any(grad is not None for grad in kept):
            self._accumulated = [None if grad is None else grad.clone() for grad in kept]

    def keep(self, grads: Sequence[Tensor | None], places: Sequence[int]) -> None:
        """Copies autograd's gradients into the buffers. places: indices of their parameters. Parameters without a
        gradient get zeros, which other ranks may read."""
        for place, grad in zip(places, grads, strict=True):
            self.used[place] = grad is not None
        pairs = [(self.views[place], grad) for place, grad in zip(places, grads, strict=True) if grad is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        if len(pairs) < len(grads):
            without = [self.views[place] for place, grad in zip(places, grads, strict=True) if grad is None]
            torch._foreach_zero_(without)

    def restore(self, used: Sequence[bool]) -> None:
        """Takes which of the first parameters have gradients, of a graph whose replay runs `keep` without Python."""
        self.used[: len(used)] = used

    def accumulate(self) -> None:
        """Adds the gradients that `zero` has set aside. Must be called once per batch, before the mean."""
        if self._accumulated is None:
            return
        for i, grad in enumerate(self._accumulated):
            if grad is not None:
                if self.used[i]:
                    self.views[i].add_(grad)
                else:
                    self.views[i].copy_(grad)
                    self.used[i] = True

    def mean(self, peers: "Peers | None" = None, bucket: Bucket | None = None) -> None:
        """Computes DDP's average, of one bucket or of all gradients: divides, then sums. NCCL does both in one pass.
        peers: do so in place of NCCL, as far as they can. Collective."""
        flats = self.flat if bucket is None else bucket.flats
        left = flats if peers is None else peers.mean(flats)
        if not left or self._group.size() == 1:
            return
        if self._device.type == "cuda":
            with _coalescing_manager(self._group) if len(left) > 1 else nullcontext():  # in one launch
                for flat in left:
                    dist.all_reduce(flat, dist.ReduceOp.AVG, group=self._group)
        else:
            for flat in left:
                dist.all_reduce(flat.div_(self._group.size()), group=self._group)

    def publish(self) -> None:
        """Makes the views the parameters' gradients."""
        for parameter, view, used in zip(self.parameters, self.views, self.used, strict=True):
            parameter.grad = view if used else None


def flat_gradients(parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a flat buffer for each dtype, and every parameter's gradient as an aligned view of one of them."""
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
