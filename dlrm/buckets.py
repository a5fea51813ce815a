"""Dense weights and gradients in flat buffers, and their update by Adagrad, sharded over ranks where that pays."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.peer_memory import PeerMemory
from dlrm.ranks import Ranks
from kernels.flat_adagrad import flat_adagrad
from kernels.peer_tensors import PeerTensors
from kernels.sharded_adagrad import sharded_adagrad

# Tensors in the flat buffers start at multiples of this many elements: cuBLAS falls to kernels several times slower
# where an operand is not 16-byte aligned.
_ALIGN = 64

DenseState = Literal["master", "state"]
"""fp32 weights, or Adagrad's state."""


class Bucket:
    """Named tensors of one flat buffer, with its gradient and what this rank keeps of its optimizer.

    sharded: each rank updates its slice, and `all_gather` brings the slices together; otherwise each updates all.
    """

    def __init__(self, weights: dict[str, Tensor], dtype: torch.dtype, ranks: Ranks, sharded: bool) -> None:
        """Collective: makes a process group."""
        self._lay_out(weights, ranks, sharded)
        flat = self._flat(weights)
        working = flat.to(dtype)
        self._take(working, flat, torch.zeros_like(working))
        self._group = ranks.new_group()
        self._summed = torch.zeros_like(self.working[self._mine]) if sharded else self.grad

    def _lay_out(self, weights: dict[str, Tensor], ranks: Ranks, sharded: bool) -> None:
        rank, world_size = (ranks.rank, ranks.world_size) if sharded else (0, 1)
        self.starts, end = {}, 0
        for name, value in weights.items():
            self.starts[name] = end
            end += -(-value.numel() // _ALIGN) * _ALIGN
        self._share = -(-end // (_ALIGN * world_size)) * _ALIGN
        self._mine = slice(rank * self._share, (rank + 1) * self._share)
        self._size, self._device, self._sharded = self._share * world_size, ranks.device, sharded
        self.shapes = {name: value.shape for name, value in weights.items()}

    def _take(self, working: Tensor, flat: Tensor, grad: Tensor) -> None:
        """working and grad: of the bucket's dtype. flat: fp32, the same weights."""
        self.working, self.grad = working, grad
        # In fp32 the working copy is the master.
        self.master = working[self._mine] if working.dtype == torch.float32 else flat[self._mine].clone()
        self.state = torch.zeros_like(self.master)

    def tensors(self) -> list[Tensor]:
        """All memory of this bucket on this rank: weights, master weights, Adagrad state, gradients; some share it."""
        return [self.working, self.master, self.state, self.grad, self._summed]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The tensor called `name` in a buffer of this bucket's layout."""
        shape = self.shapes[name]
        return flat[self.starts[name] :][: shape.numel()].view(shape)

    def update(self, learning_rate: Tensor, eps: float) -> None:
        """Sums the gradient over the ranks; Adagrad on what this rank keeps. Collective."""
        if self._sharded:
            dist.reduce_scatter_tensor(self._summed, self.grad, group=self._group)
        else:
            dist.all_reduce(self.grad, group=self._group)
        mine = self.working[self._mine]
        flat_adagrad(
            self.master, self.state, self._summed, learning_rate, eps, None if mine.dtype == torch.float32 else mine
        )

    def all_gather(self) -> None:
        """Brings every rank's share of the working weights to all ranks; doing it twice changes nothing. Collective."""
        if self._sharded:
            dist.all_gather_into_tensor(self.working, self.working[self._mine], group=self._group)

    def load(self, which: DenseState, values: dict[str, Tensor]) -> None:
        """Takes `master` (and the working weights) or `state` from full tensors, the same on every rank."""
        flat = self._flat(values)
        getattr(self, which).copy_(flat[self._mine])
        if which == "master":
            self.working.copy_(flat)

    def _flat(self, values: dict[str, Tensor]) -> Tensor:
        """An fp32 buffer of this bucket's layout."""
        flat = torch.zeros(self._size, device=self._device)
        for name, value in values.items():
            flat[self.starts[name] :][: value.numel()].copy_(value.flatten())
        return flat

    def full(self, share: Tensor) -> dict[str, Tensor]:
        """Named copies of `master` or `state` put together from all ranks. Collective."""
        flat = share
        if self._sharded:
            flat = share.new_empty(self._size)
            dist.all_gather_into_tensor(flat, share.clone())
        return {name: self.view(flat, name).clone() for name in self.starts}


class PeerBucket(Bucket):
    """Sharded, in peer memory: one kernel sums the slice's gradients from where the ranks have them, updates, and
    writes the new weights to where the ranks read them."""

    def __init__(
        self, name: str, weights: dict[str, Tensor], dtype: torch.dtype, ranks: Ranks, memory: PeerMemory
    ) -> None:
        """Collective. name: no other bucket's."""
        self._lay_out(weights, ranks, sharded=True)
        self._name, self._memory = name, memory
        flat = self._flat(weights)
        self._workings, grads = (memory.zeros(self._size, dtype=dtype) for _ in range(2))
        self._take(self._workings.own.copy_(flat), flat, grads.own)
        self._grads_of_share = PeerTensors([grad[self._mine] for grad in grads.tensors], ranks.rank)

    def tensors(self) -> list[Tensor]:
        """As Bucket's."""
        return [self.working, self.master, self.state, self.grad]

    def update(self, learning_rate: Tensor, eps: float) -> None:
        """As Bucket's, and it writes to all ranks' working weights: a rank calls it when it is through with its own,
        and reads them again behind it. Collective."""
        self._memory.barrier(f"{self._name} gradients")
        share = (self.master, self.state, self._grads_of_share, self._workings, self._mine.start)
        sharded_adagrad(*share, learning_rate, eps)
        self._memory.barrier(f"{self._name} weights")

    def all_gather(self) -> None:
        """Nothing: `update` has done it."""
