"""The place of this process among all processes of a run."""

import os
import shlex
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]  # public, but not in __all__

RESTARTS = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
"""Number of times that torchrun has restarted its ranks; part of the keys in the store, which outlives the ranks."""
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(kw_only=True, slots=True, frozen=True)
class Ranks:
    """Global rank for logs and data, local rank for the GPU, and the sizes of both."""

    rank: int
    """Global rank, 0 .. world_size - 1 over all nodes."""
    local_rank: int
    """Rank on this node, 0 .. local_world_size - 1; selects the GPU."""
    world_size: int
    local_world_size: int
    device: torch.device

    @staticmethod
    def from_environment() -> "Ranks":
        """Reads torchrun's environment variables; ValueError names a missing one, or one that does not fit this
        node."""
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} not set: start this program with torchrun, for example "
                "`torchrun --nproc_per_node 8 launch/dlrm.py --preset launch-bound`"
            )
        rank, local_rank, world_size, local_world_size = (int(os.environ[name]) for name in _VARIABLES[:4])
        device = torch.device("cpu")
        if torch.cuda.is_available():
            if local_world_size > torch.cuda.device_count():
                raise ValueError(
                    f"{local_world_size} ranks on a node with {torch.cuda.device_count()} GPU(s): "
                    f"use `torchrun --nproc_per_node {torch.cuda.device_count()}`"
                )
            device = torch.device("cuda", local_rank)
        if world_size % local_world_size or rank % local_world_size != local_rank:
            raise ValueError(
                f"rank {rank} of {world_size} is local rank {local_rank} of {local_world_size}: give every node the "
                "same number of ranks (`torchrun --nproc_per_node`), with consecutive ranks on each node"
            )
        return Ranks(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            device=device,
        )

    @property
    def nodes(self) -> int:
        """Number of nodes, all with the same number of ranks."""
        return self.world_size // self.local_world_size

    @property
    def node(self) -> int:
        """Index of this node: ranks count through one node after another."""
        return self.rank // self.local_world_size

    def command_line(self, program: str, arguments: list[str]) -> str:
        """Returns the command that starts the same ranks again."""
        torchrun = ["torchrun", *([f"--nnodes={self.nodes}"] if self.nodes > 1 else [])]
        return shlex.join([*torchrun, f"--nproc_per_node={self.local_world_size}", program, *arguments])

    def init_process_group(self) -> None:
        """Starts NCCL on GPUs, gloo on CPUs; sets the current GPU. Returns once all ranks are connected: one that then
        ends with an error, such as bad input, breaks no connection that another rank is still making."""
        store = None if RESTARTS == "0" else _store_of_this_start()
        known: dict[str, Any] = {}
        if store is not None:
            known = {"store": store, "rank": self.rank, "world_size": self.world_size}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            dist.init_process_group("nccl", device_id=self.device, **known)
        else:
            dist.init_process_group("gloo", **known)
        dist.barrier()

    def new_group(self) -> dist.ProcessGroup:
        """Returns a new communicator over all ranks, so that its collectives overlap with those of other groups.

        On GPUs its kernels have high priority, because all ranks wait for the last kernel to start. Collective.
        """
        return self._new_group(None)

    def new_group_of_node(self) -> dist.ProcessGroup:
        """Returns a new communicator of this node's ranks, by local rank. Collective over all ranks."""
        size = self.local_world_size
        groups = [self._new_group(list(range(node * size, (node + 1) * size))) for node in range(self.nodes)]
        return groups[self.node]

    def new_group_across_nodes(self) -> dist.ProcessGroup:
        """Returns a new communicator of the ranks with this local rank on all nodes, by node. Collective over all
        ranks."""
        size = self.local_world_size
        groups = [self._new_group(list(range(local, self.world_size, size))) for local in range(size)]
        return groups[self.local_rank]

    def _new_group(self, members: list[int] | None) -> dist.ProcessGroup:
        if self.device.type != "cuda":
            return dist.new_group(members)
        return dist.new_group(members, pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))

    def destroy_process_group(self) -> None:
        """Waits for the other ranks, then leaves the group."""
        dist.barrier()
        dist.destroy_process_group()


def _store_of_this_start() -> PrefixStore:
    """Returns the store of torchrun, or of rank 0, with keys that no earlier start of these ranks has used.

    torchrun keeps its store when it restarts ranks, with the addresses of the old ones in it: without new keys a rank
    would wait for these forever, or be refused.
    """
    store, _, _ = next(rendezvous("env://"))
    return PrefixStore(f"restart-{RESTARTS}", store)
