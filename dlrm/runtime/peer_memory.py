"""Memory of a node's ranks that every rank of the node accesses directly, and barriers between its users.

On GPUs it is PyTorch's symmetric memory: allocations that the GPUs of a node map into each other's address space and
access over NVLink or PCIe. On the CPU it is files that all processes map. A kernel that writes straight to the rank
that needs a value does in one pass the three steps of a collective: reorder, exchange, reorder.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.peer_tensors import PeerTensors


@dataclass(frozen=True, slots=True)
class Barrier:
    """A point of an iteration at which the streams of all ranks of a node wait for one another."""

    name: str
    """Unique name."""
    orders: str
    """The accesses that it separates: those before it on any rank, and those after it on every rank."""


class PeerMemory:
    """Tensors that all ranks of a node share, and barriers on the current stream."""

    def __init__(self, ranks: Ranks) -> None:
        """Collective over all ranks. ValueError, on every rank, if a GPU cannot access another GPU of its node, or if
        over several nodes NCCL would register buffers of graphs."""
        self._ranks, self._index, self._size = ranks, ranks.local_rank, ranks.local_world_size
        self._alone, self._cuda = self._size == 1, ranks.device.type == "cuda"
        world = dist.GroupMember.WORLD
        self.group = ranks.new_group_of_node() if ranks.nodes > 1 else world
        """The ranks of the node, by local rank; collectives of this group run one after another."""
        self._channels: dict[Barrier, int] = {}
        self._handles: list[Any] = []
        """Handles of all allocations; the signals of the first one serve the barriers."""
        self.own: list[Tensor] = []
        """This rank's tensors of all allocations; on GPUs PyTorch's allocator does not count these."""
        if self._cuda and not self._alone:
            _check_reach(self._size)
            if ranks.nodes > 1:
                _register_nothing()
            # Nothing here uses NVLink's multicast, which symmetric memory would set up otherwise.
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            # A separate allocation, with its own signals, for each tensor: in a pool its offset would depend on each
            # rank's earlier frees.
            os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
            self._allocate((1,), torch.float32)

    def zeros(self, *shape: int, dtype: torch.dtype) -> PeerTensors:
        """Returns one tensor per rank of the node, by local rank, all of this shape and zero on return. Collective."""
        tensors = self._allocate(shape, dtype)
        tensors[self._index].zero_()
        if self._cuda:
            torch.cuda.synchronize()
        dist.barrier(self.group)
        return PeerTensors(tensors, self._index)

    def barrier(self, barrier: Barrier) -> None:
        """Makes the current stream wait until the streams of all ranks of the node have reached this point: all their
        earlier work is then done, and visible to all.

        All ranks must reach the different barriers for the first time in the same order, and likewise each barrier's
        further uses. Different barriers may wait at the same time. Waiting for a rank that never comes has no timeout.
        """
        if self._alone:
            return
        if self._cuda:
            self._handles[0].barrier(channel=self._channels.setdefault(barrier, len(self._channels)))
        else:
            dist.barrier(self.group)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Returns an uninitialised tensor of every rank."""
        if self._cuda and not self._alone:
            return self._allocate_on_gpus(shape, dtype)
        if self._alone:
            tensors = [torch.empty(shape, dtype=dtype, device=self._ranks.device)]
        else:
            tensors = self._mapped_files(shape, dtype)
        self.own.append(tensors[self._index])
        return tensors

    def _allocate_on_gpus(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        import torch.distributed._symmetric_memory as symmetric_memory  # registers operators that only GPUs need

        own = symmetric_memory.empty(shape, dtype=dtype, device=self._ranks.device)
        assert self.group is not None
        try:
            handle = symmetric_memory.rendezvous(own, self.group)
        except RuntimeError as error:
            raise RuntimeError(f"--peer-memory: the GPUs cannot share memory: {error}; leave it out") from error
        self._handles.append(handle)
        self.own.append(own)  # keeps the views below alive
        # If tensors come from a pool, get_buffer counts from the start of their allocation.
        offset = own.data_ptr() - handle.get_buffer(self._index, shape, dtype).data_ptr()
        offsets = [offset] * self._size
        dist.all_gather_object(offsets, offset, group=self.group)
        if len(set(offsets)) > 1:
            raise RuntimeError("--peer-memory: tensor offsets differ between ranks: set TORCH_SYMMMEM_IMPLICIT_POOL=0")
        return [handle.get_buffer(rank, shape, dtype, offset // own.itemsize) for rank in range(self._size)]

    def _mapped_files(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Returns a file-backed tensor for each rank, mapped by all; deletes the files, since the mappings keep
        them."""
        folder: list[str | None] = [tempfile.mkdtemp() if self._index == 0 else None]
        first = self._ranks.node * self._size
        dist.broadcast_object_list(folder, src=first, group=self.group)
        assert folder[0] is not None
        tensors = [
            torch.from_file(f"{folder[0]}/{rank}", shared=True, size=prod(shape), dtype=dtype).view(shape)
            for rank in range(self._size)
        ]
        dist.barrier(self.group)
        if self._index == 0:
            shutil.rmtree(folder[0])
        return tensors


def _register_nothing() -> None:
    """Keeps NCCL from registering the buffers of collectives in graphs.

    In a captured all-to-all between GPUs that reach each other, NCCL registers the send buffer, if it is symmetric
    memory, and not the receive buffer, which is memory of another kind: the graph then waits without end (2.28.9,
    messages of 1 MB). NCCL reads the variable when it plans its first captured collective, not when it starts.
    ValueError where the environment has NCCL register.
    """
    value = os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if value != "0":
        raise ValueError(
            f"--peer-memory over nodes: with NCCL_GRAPH_REGISTER={value} graphs of exchanges can hang; take it out of "
            "the environment"
        )


def _check_reach(gpus: int) -> None:
    """Raises ValueError if a GPU of this node cannot map another's memory; every rank checks all pairs."""
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        raise ValueError(
            f"--peer-memory needs GPUs that can access each other's memory, but GPU {apart[0][0]} cannot access GPU "
            f"{apart[0][1]}: leave it out"
        )
