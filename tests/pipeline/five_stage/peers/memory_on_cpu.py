"""Peer memory on the CPU: files that the processes of all ranks map, and a barrier of gloo."""

import shutil
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dlrm_bench.pipeline.five_stage.peers.exchanges
import dlrm_bench.pipeline.five_stage.switches
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.peers.exchanges import Peers
from dlrm_bench.pipeline.five_stage.peers.memory import Lane, PeerMemory
from dlrm_bench.pipeline.five_stage.trimmed.static_dist import RankGroup
from tests.pipeline.cpu_graphs import Checked


class MappedFiles(PeerMemory):
    """Stands for PeerMemory. Its memory is full of a number that nobody sends."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.rank, self.nbytes = group, device, group.rank(), 0

    def allocate(self, nbytes: int) -> list[Tensor]:
        folder: list[str | None] = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder, src=dist.get_process_group_ranks(self.group)[0], group=self.group)
        files = [f"{folder[0]}/{rank}" for rank in range(self.group.size())]
        tensors = [torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8) for file in files]
        tensors[self.rank].fill_(0xA5)
        dist.barrier(self.group)
        if self.rank == 0:
            assert folder[0] is not None
            shutil.rmtree(folder[0])  # the mappings stay
        self.nbytes += nbytes
        return tensors

    def meet(self, lane: Lane) -> None:
        dist.barrier(self.group)

    def close(self) -> None:
        pass


def peer_memory_on_cpu(memory: type[PeerMemory] = MappedFiles, why_not: Sequence[str] = ()) -> None:
    """In this process: there is peer memory; with a reason in `why_not`, there is none. Graphs replay by running: as a
    capture, a replay must not need what has not been there before."""
    dlrm_bench.pipeline.five_stage.peers.exchanges.PeerMemory = memory  # type: ignore[misc]
    dlrm_bench.pipeline.five_stage.peers.exchanges._in_capture = lambda source: Checked.replaying
    dlrm_bench.pipeline.five_stage.switches.why_no_peers = lambda *_: next(iter(why_not), None)


def peers_of(ranks: Ranks, **modules: Any) -> Peers:
    """Peers of all ranks, on a GPU of PyTorch's memory. modules: by name, the parts of a sharded module that they use,
    beside its `rank_group`."""
    if ranks.device.type == "cpu":
        peer_memory_on_cpu()
    world = dist.group.WORLD
    assert world is not None
    named: list[Any] = [SimpleNamespace(name=name, collection=of) for name, of in modules.items()]
    return Peers(named, ranks.device, world, lambda: False)


def module_of(ranks: Ranks, **dists: Any) -> Any:
    """A sharded module, as far as Peers use it. dists: its output dists, by sharding type."""
    group: Any = dist.group.WORLD
    rank_group = RankGroup(group=group, rank=ranks.rank, world_size=ranks.world_size, device=ranks.device)
    return SimpleNamespace(rank_group=rank_group, _sharding_types=list(dists), _output_dists=list(dists.values()))
