"""Dense weights and gradients in flat buffers, and their update by Adagrad, sharded over ranks if that pays off."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.runtime.peer_memory import Barrier, PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.dense.flat_adagrad import flat_adagrad
from dlrm_bench.kernels.dense.peer_sums import peer_sums
from dlrm_bench.kernels.dense.sharded_adagrad import sharded_adagrad
from dlrm_bench.kernels.input_dist.gather_segments import Segment
from dlrm_bench.kernels.input_dist.push_segments import SegmentPushTable, push_segments
from dlrm_bench.kernels.non_finite import Watch
from dlrm_bench.kernels.peer_tensors import PeerTensors

# Tensors in the flat buffers start at multiples of this many elements: cuBLAS chooses kernels several times slower if
# an operand is not 16-byte aligned.
_ALIGN = 64

DenseState = Literal["master", "state"]
"""fp32 weights, or Adagrad's state."""


class Bucket(ABC):
    """Named tensors of one flat buffer, with its gradient and this rank's part of its optimizer state.

    sharded: each rank updates its slice; otherwise each updates all.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        ranks: Ranks,
        sharded: bool,
        zeros: Callable[[int], Tensor],
        of_node: dist.ProcessGroup | None = None,
    ) -> None:
        """zeros: returns memory for a number of working weights or gradients. of_node: the ranks of the node, if only
        these share the slices; None: all ranks do."""
        rank, world_size = (ranks.rank, ranks.world_size) if sharded else (0, 1)
        if of_node is not None:
            rank, world_size = ranks.local_rank, ranks.local_world_size
        self._of_node = of_node
        self.starts, end = {}, 0
        for name, value in weights.items():
            self.starts[name] = end
            end += -(-value.numel() // _ALIGN) * _ALIGN
        share = -(-end // (_ALIGN * world_size)) * _ALIGN
        self._mine = slice(rank * share, (rank + 1) * share)
        self._size, self._device, self._sharded = share * world_size, ranks.device, sharded
        self.shapes = {name: value.shape for name, value in weights.items()}
        flat = self._flat(weights)
        self.working, self.grad = zeros(self._size).copy_(flat), zeros(self._size)
        # In fp32 the working copy is the master.
        fp32 = self.working.dtype == torch.float32
        self.master = self.working[self._mine] if fp32 else flat[self._mine].clone()
        self.state = torch.zeros_like(self.master)

    @abstractmethod
    def update(self, learning_rate: Tensor, eps: float, watch: Watch | None = None) -> None:
        """Sums the gradient over the ranks and applies Adagrad to this rank's part. Collective.

        watch: a LossGuard's; if a flag is raised, no weight or state changes.
        """

    @abstractmethod
    def all_gather(self) -> None:
        """Distributes every rank's part of the working weights to all ranks; idempotent. Collective."""

    def tensors(self) -> list[Tensor]:
        """Returns this rank's memory: weights, master weights, Adagrad state, gradients; some share it."""
        return [self.working, self.master, self.state, self.grad]

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Returns the tensor `name` in a buffer with this bucket's layout."""
        shape = self.shapes[name]
        return flat[self.starts[name] :][: shape.numel()].view(shape)

    def load(self, which: DenseState, values: dict[str, Tensor]) -> None:
        """Loads `master` (and the working weights) or `state` from full tensors, the same on every rank."""
        flat = self._flat(values)
        getattr(self, which).copy_(flat[self._mine])
        if which == "master":
            self.working.copy_(flat)

    def _flat(self, values: dict[str, Tensor]) -> Tensor:
        """Returns an fp32 buffer with this bucket's layout."""
        flat = torch.zeros(self._size, device=self._device)
        for name, value in values.items():
            flat[self.starts[name] :][: value.numel()].copy_(value.flatten())
        return flat

    def full(self, share: Tensor) -> dict[str, Tensor]:
        """Returns named copies of `master` or `state`, assembled from all ranks. Collective."""
        flat = share
        if self._sharded:
            flat = share.new_empty(self._size)
            dist.all_gather_into_tensor(flat, share.clone(), group=self._of_node)
        return {name: self.view(flat, name).clone() for name in self.starts}


class CollectiveBucket(Bucket):
    """A bucket exchanged by NCCL's or gloo's collectives."""

    def __init__(self, weights: dict[str, Tensor], dtype: torch.dtype, ranks: Ranks, sharded: bool) -> None:
        """Collective: makes a process group."""
        super().__init__(weights, ranks, sharded, partial(torch.zeros, dtype=dtype, device=ranks.device))
        self._group = ranks.new_group()
        self._summed = torch.zeros_like(self.working[self._mine]) if sharded else self.grad

    def tensors(self) -> list[Tensor]:
        """Returns Bucket's memory and the sums of gradients."""
        return [*super().tensors(), self._summed]

    def update(self, learning_rate: Tensor, eps: float, watch: Watch | None = None) -> None:
        """Sums the gradient by a reduce-scatter, or by an all-reduce if not sharded, and updates. Collective."""
        if self._sharded:
            dist.reduce_scatter_tensor(self._summed, self.grad, group=self._group)
        else:
            dist.all_reduce(self.grad, group=self._group)
        share = self.working[self._mine]
        working = None if share.dtype == torch.float32 else share
        flat_adagrad(self.master, self.state, self._summed, learning_rate, eps, working, watch)

    def all_gather(self) -> None:
        """Gathers all parts; does nothing if the bucket is not sharded. Collective."""
        if self._sharded:
            dist.all_gather_into_tensor(self.working, self.working[self._mine], group=self._group)


class PeerBucket(Bucket):
    """A sharded bucket in peer memory: one kernel sums the slice's gradients from all ranks' memory, updates, and
    writes the new weights to all ranks' memory.

    The barrier `gradients`, which `update` launches, must come after every rank has written its gradient and read its
    working weights for the last time, and before any rank's kernel reads the gradients and writes the weights. The
    caller launches another barrier of all ranks between that kernel and the next read of the weights or write of the
    gradient.
    """

    def __init__(
        self, gradients: Barrier, weights: dict[str, Tensor], dtype: torch.dtype, ranks: Ranks, memory: PeerMemory
    ) -> None:
        """Collective. gradients: a barrier of this bucket only."""
        peers: list[PeerTensors] = []

        def zeros(size: int) -> Tensor:
            peers.append(memory.zeros(size, dtype=dtype))
            return peers[-1].own

        super().__init__(weights, ranks, True, zeros)
        self._barrier, self._memory = gradients, memory
        self._workings, grads = peers
        self._grads_of_share = PeerTensors([grad[self._mine] for grad in grads.tensors], ranks.rank)

    def update(self, learning_rate: Tensor, eps: float, watch: Watch | None = None) -> None:
        """Updates this rank's slice and writes it to all ranks' working weights. Collective."""
        self._memory.barrier(self._barrier)
        share = (self.master, self.state, self._grads_of_share, self._workings, self._mine.start)
        sharded_adagrad(*share, learning_rate, eps, watch)

    def all_gather(self) -> None:
        """Does nothing: `update` has distributed the weights."""


class NodeBucket(Bucket):
    """A bucket over several nodes, sharded within each node in its peer memory: a rank sums its slice's gradients over
    the node, ranks with the same slice sum these results over all nodes, and each updates the slice and writes it to
    its node. Needs PeerBucket's barriers, between the ranks of a node."""

    def __init__(
        self,
        gradients: Barrier,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        ranks: Ranks,
        memory: PeerMemory,
        across: dist.ProcessGroup | None,
    ) -> None:
        """Collective. gradients: a barrier of this bucket only. across: the ranks with this local rank on all nodes."""
        peers: list[PeerTensors] = []

        def zeros(size: int) -> Tensor:
            peers.append(memory.zeros(size, dtype=dtype))
            return peers[-1].own

        super().__init__(weights, ranks, True, zeros, of_node=memory.group)
        self._barrier, self._memory, self._across = gradients, memory, across
        workings, grads = peers
        self._grads_of_share = PeerTensors([grad[self._mine] for grad in grads.tensors], ranks.local_rank)
        self._summed = torch.zeros_like(self._grads_of_share.own)
        # The working weights as words of 4 bytes; a rank writes the words of its slice to the other ranks.
        self._words = workings.viewed(torch.int32)
        start, end = (place * dtype.itemsize // 4 for place in (self._mine.start, self._mine.stop))
        slices = [
            [Segment(start, start, end - start)] if rank != ranks.local_rank else []
            for rank in range(ranks.local_world_size)
        ]
        self._push = SegmentPushTable(slices, ranks.device)

    def tensors(self) -> list[Tensor]:
        """Returns Bucket's memory and the sums of gradients."""
        return [*super().tensors(), self._summed]

    def update(self, learning_rate: Tensor, eps: float, watch: Watch | None = None) -> None:
        """Updates this rank's slice and writes it to the working weights of all ranks of the node. Collective."""
        self._memory.barrier(self._barrier)
        peer_sums(self._grads_of_share, self._summed)
        dist.all_reduce(self._summed, group=self._across)
        share = self.working[self._mine]
        working = None if share.dtype == torch.float32 else share
        flat_adagrad(self.master, self.state, self._summed, learning_rate, eps, working, watch)
        push_segments(self._words.own, self._push, self._words)

    def all_gather(self) -> None:
        """Does nothing: `update` has distributed the weights."""
