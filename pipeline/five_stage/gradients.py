"""The gradients of the dense part in flat buffers, and their mean over the ranks."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from .peers.exchanges import Peers

_ALIGNMENT = 128  # bytes; optimizers read gradients in vectors
_BUCKET, _LEAST = 2**24, 2**22
"""Bytes from which gradients are reduced before the others are made: the latter if no more than these follow, so that
few are left for the end. Two H200s take 70 us for 16 MiB by NCCL, of which 10 are the same for any size."""


class Bucket(NamedTuple):
    """Gradients that are reduced together."""

    flat: Tensor
    """Their part of a flat buffer."""
    members: list[int]
    """Indices of their parameters, in the order in which the gradients are made."""


class FlatGradients:
    """A buffer for each dtype, and a view of it for each parameter, which is its `.grad` after `publish`."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], device: torch.device, group: dist.ProcessGroup, late: int = 0
    ) -> None:
        """late: number of last parameters whose gradients are made after those of all others."""
        self.parameters, self._device, self._group = list(parameters), device, group
        self._late = range(len(self.parameters) - 1, len(self.parameters) - late - 1, -1)
        self.flat, self.views = flat_gradients(self.parameters)
        self._lay_out(range(len(self.parameters) - late - 1, -1, -1))
        self.used = [False] * len(self.parameters)
        """Whether the batch gave each parameter a gradient."""
        self._accumulated: list[Tensor | None] | None = None

    def order(self, made: Sequence[int]) -> None:
        """Moves the gradients within the buffers, to the order in which a backward makes them. made: indices of all
        parameters but the late ones, which at first are in reverse order; equal on all ranks. To be called before
        anything relies on the addresses of `views`."""
        values = [view.clone() for view in self.views]
        self._lay_out(made)
        torch._foreach_copy_(self.views, values)

    def _lay_out(self, made: Sequence[int]) -> None:
        order = [*made, *self._late]
        assert sorted(order) == list(range(len(self.parameters))), "each parameter once"
        views = _views({flat.dtype: flat for flat in self.flat}, [self.parameters[i] for i in order])
        self.views = [view for _, view in sorted(zip(order, views, strict=True), key=itemgetter(0))]
        self.buckets = [bucket for of in (made, self._late) for flat in self.flat for bucket in self._buckets(flat, of)]
        """All gradients, in the order in which a backward makes them, the late ones last."""

    def _buckets(self, flat: Tensor, made: Sequence[int]) -> list[Bucket]:
        """Returns the buckets of a flat buffer: each, except for the last one, of at least _BUCKET bytes, or of as many
        as follow and at least _LEAST."""
        buckets, members = list[Bucket](), list[int]()
        within = [i for i in made if self.views[i].dtype == flat.dtype]
        following = sum(_aligned(self.views[i]) for i in within)
        for i in within:
            members.append(i)
            start, last = (int(self.views[of].storage_offset()) for of in (members[0], i))
            end = last + _aligned(self.views[i])
            following -= _aligned(self.views[i])
            enough = min(_BUCKET, max(_LEAST, following * flat.element_size()))
            if i == within[-1] or (end - start) * flat.element_size() >= enough:
                buckets.append(Bucket(flat[start:end], members))
                members = []
        return buckets

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


def flat_gradients(parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a flat buffer for each dtype, and every parameter's gradient as an aligned view of one of them."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + _aligned(parameter)
    device = parameters[0].device if parameters else None
    flats = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
    return list(flats.values()), _views(flats, parameters)


def _views(flats: Mapping[torch.dtype, Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients of parameters as views of the flat buffers, one after another."""
    views, ends = [], dict.fromkeys(flats, 0)
    for parameter in parameters:
        start = ends[parameter.dtype]
        ends[parameter.dtype] += _aligned(parameter)
        views.append(flats[parameter.dtype][start : start + parameter.numel()].view(parameter.shape))
    return views


def _aligned(of: Tensor) -> int:
    """Returns the number of elements that a tensor of this size and dtype takes in a flat buffer."""
    unit = _ALIGNMENT // of.element_size()
    return -(-of.numel() // unit) * unit
