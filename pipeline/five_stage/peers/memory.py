"""Memory of all ranks of a node that each of them reads and writes, and the points at which their streams meet.

It is PyTorch's symmetric memory: allocations that the GPUs of a node map into each other's address space, and access
over NVLink or PCIe. The caching allocator does not count it.
"""

import os
import socket
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from .. import reasons
from .._triton import triton
from ..groups import of_all_ranks

Lane = Literal["ids", "vectors", "gradients"]
"""The part of an iteration's graph that an exchange is in. A lane's work is on one stream, in one order on all ranks;
lanes run beside one another."""
_LANES: tuple[Lane, ...] = get_args(Lane)


def why_no_peers(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns why the GPUs of a group's ranks cannot share memory, the same on all ranks; None if they can.
    Collective."""
    if group.size() == 1:
        return reasons.PEERS_ALONE()
    gpus = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    own = _host(), device.index, gpus, triton is not None
    return _why_not(of_all_ranks(own, group))


def _why_not(everyone: Sequence[tuple[str, int, list[str], bool]]) -> str | None:
    """Returns why not. everyone: of each rank its host, the index of its GPU among those that it sees, and whether it
    has Triton."""
    hosts, indices, seen, have_triton = zip(*everyone, strict=True)
    if len(set(hosts)) > 1:
        return reasons.PEERS_APART(hosts=len(set(hosts)))
    if not all(have_triton):
        return reasons.PEERS_NO_TRITON(rank=have_triton.index(False))
    if any(gpus != seen[0] for gpus in seen) or len(set(indices)) < len(indices):
        return reasons.PEERS_UNSEEN()
    for one, other in permutations(indices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return reasons.PEERS_NO_ACCESS(one=one, other=other)
    return None


def _host() -> str:
    """Returns what all containers of a machine share, and no two machines."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.exists() else socket.gethostname()


class PeerMemory:
    """Allocates the memory, for ranks for which `why_no_peers` finds nothing."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective."""
        # Nothing here uses NVLink's multicast, which symmetric memory would set up otherwise.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # An allocation, with its own signals, for each buffer: in a pool its offset would depend on each rank's
        # earlier frees.
        os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
        self.group, self.device, self.rank = group, device, group.rank()
        self.nbytes = 0
        """Bytes of this rank's allocations."""
        self._kept: list[Any] = []
        self._signals: Any = None
        self.allocate(1)

    def allocate(self, nbytes: int) -> list[Tensor]:
        """Returns a buffer of every rank, uint8 [nbytes], uninitialised. nbytes: the same on all ranks. Collective; not
        during a capture. RuntimeError if the GPUs cannot share memory."""
        # Registers operators that only GPUs need.
        import torch.distributed._symmetric_memory as symmetric_memory

        own = symmetric_memory.empty((nbytes,), dtype=torch.uint8, device=self.device)
        try:
            handle = symmetric_memory.rendezvous(own, self.group)
        except RuntimeError as error:
            raise RuntimeError(f"peer_memory=True, but the GPUs cannot share memory: {error}; leave it out") from error
        self._signals = self._signals or handle  # the signals of the first allocation serve all lanes
        self._kept += [own, handle]  # the views below keep neither alive
        self.nbytes += nbytes
        # If the environment has tensors come from a pool, get_buffer counts from the start of their allocation.
        offset = own.data_ptr() - handle.get_buffer(self.rank, (nbytes,), torch.uint8).data_ptr()
        # Torch zeroes new memory, signals included, on a stream that others do not wait for, at the latest in the
        # owner's rendezvous: nobody may write there before all ranks are here.
        if len(set(of_all_ranks(offset, self.group))) > 1:
            raise RuntimeError("peer_memory=True: buffers differ between ranks: set TORCH_SYMMMEM_IMPLICIT_POOL=0")
        return [handle.get_buffer(rank, (nbytes,), torch.uint8, offset) for rank in range(self.group.size())]

    def meet(self, lane: Lane) -> None:
        """Makes the current stream wait until the current streams of all ranks have reached this point of the lane: all
        their earlier work is then done, and visible to all. The wait for a rank that never comes has no timeout."""
        self._signals.barrier(channel=_LANES.index(lane))

    def close(self) -> None:
        """Lets go of the memory, which a peer's present writes keep alive. The device must be done with it."""
        self._kept.clear()
        self._signals = None
