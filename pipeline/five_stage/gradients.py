"""The gradients of the dense part in flat buffers, and their mean over the ranks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from .peers.exchanges import Peers

_ALIGNMENT = 128  # bytes; optimizers read gradients in vectors
_BUCKET = 2**24
"""Bytes from which gradients are reduced before the others are made. Two H200s take 70 us for 16 MiB by NCCL, of which
10 are the same for any size."""


class Bucket(NamedTuple):
    """Gradients that are reduced together."""

    flat: Tensor
    """Their part of a flat buffer."""
    members: list[int]
    """Indices of their parameters."""


class FlatGradients:
    """A buffer for each dtype, and a view of it for each parameter, which is its `.grad` after `publish`."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], device: torch.device, group: dist.ProcessGroup, late: int = 0
    ) -> None:
        """late: number of last parameters whose gradients are made after those of all others."""
        self.parameters, self._device, self._group = list(parameters), device, group
        self.flat, self.views = flat_gradients(self.parameters)
        self.buckets = _buckets(self.flat, self.views, len(self.parameters) - late)
        """All gradients: those of the last parameters first, as a backward makes them, and the late ones last."""
        self.used = [False] * len(self.parameters)
        """Whether the batch gave each parameter a gradient."""
        self._accumulated: list[Tensor | None] | None = None

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
        flats = self.flat if bucket is None else [bucket.flat]
        left = flats if peers is None else peers.mean(flats)
        for flat in left if self._group.size() > 1 else ():
            if self._device.type == "cuda":
                dist.all_reduce(flat, dist.ReduceOp.AVG, group=self._group)
            else:
                dist.all_reduce(flat.div_(self._group.size()), group=self._group)

    def publish(self) -> None:
        """Makes the views the parameters' gradients."""
        for parameter, view, used in zip(self.parameters, self.views, self.used, strict=True):
            parameter.grad = view if used else None


def _buckets(flats: Sequence[Tensor], views: Sequence[Tensor], late: int) -> list[Bucket]:
    """Returns the buckets of flat buffers, which have at least _BUCKET bytes, except for the last one of a dtype.

    late: index of the first late parameter."""
    buckets: list[Bucket] = []
    for first, last in ((0, late), (late, len(views))):
        for flat in flats:
            starts = [(i, int(view.storage_offset())) for i, view in enumerate(views) if view.dtype == flat.dtype]
            end, members = next((start for i, start in starts if i >= last), flat.numel()), list[int]()
            of_these = [(i, start) for i, start in starts if first <= i < last]
            for i, start in reversed(of_these):
                members.append(i)
                if i == of_these[0][0] or (end - start) * flat.element_size() >= _BUCKET:
                    buckets.append(Bucket(flat[start:end], members))
                    end, members = start, []
    return buckets


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
