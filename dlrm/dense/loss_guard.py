"""Keeps the weights of all ranks unchanged from the first iteration on in which any rank's loss is not finite, and from
the next one on after a gradient, or a number that is rounded to eight bits, was not finite."""

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.dense.tallies import GRADIENTS, Tallies
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels._triton import next_power_of_2
from dlrm_bench.kernels.non_finite import Watch, raise_flag
from dlrm_bench.kernels.peer_tensors import PeerTensors


class LossGuard:
    """Flags on the device, one for each rank or one for all, that every update of weights reads.

    A loss, or a number that the forward pass rounds to eight bits, is known before any update: no weight changes.
    Gradients come one after the other beside the updates of earlier ones. So an update skips every element whose
    gradient is not finite, all others of this iteration change, and the next iteration's look raises the flag: weights
    and optimizer state stay finite.

    The host learns of it when it reads losses and tallies, many iterations later; until then iterations run on and
    change nothing.
    """

    def __init__(self, ranks: Ranks, memory: PeerMemory | None, tallies: Tallies) -> None:
        """Collective. memory: through which the ranks exchange gradients, if that is peer memory."""
        self.tallies = tallies
        self._group: dist.ProcessGroup | None = None
        if memory is not None:
            self._flags = memory.zeros(next_power_of_2(ranks.world_size), dtype=torch.int32)
        else:
            self._flags = PeerTensors([torch.zeros(1, dtype=torch.int32, device=ranks.device)], 0)
            self._group = ranks.new_group() if ranks.world_size > 1 else None

    @property
    def watch(self) -> Watch:
        """The watch for all updates of weights."""
        return Watch(self._flags.own, self.tallies.of(GRADIENTS)[1:])

    def look(self, losses: Tensor) -> None:
        """Raises this rank's flag, for good, where the sum of `losses`, fp32 [n], or anything tallied is not finite.
        Collective.

        In peer memory other ranks see it after the next barrier.
        """
        raise_flag(losses, self.tallies.not_finite, self._flags)
        if self._group is not None:
            dist.all_reduce(self._flags.own, dist.ReduceOp.MAX, group=self._group)
