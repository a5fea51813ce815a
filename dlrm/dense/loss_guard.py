"""Keeps the weights of all ranks as they are from the first iteration on in which any rank's loss is not finite."""

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels._triton import next_power_of_2
from dlrm_bench.kernels.non_finite import raise_flag
from dlrm_bench.kernels.peer_tensors import PeerTensors


class LossGuard:
    """Flags on the device, one for each rank or one for all, that every update of weights reads.

    The host learns of a raised flag when it reads the losses, many iterations later; until then iterations run on and
    change nothing.
    """

    def __init__(self, ranks: Ranks, memory: PeerMemory | None) -> None:
        """Collective. memory: through which the ranks exchange gradients, if that is peer memory."""
        self._group: dist.ProcessGroup | None = None
        if memory is not None:
            self._flags = memory.zeros(next_power_of_2(ranks.world_size), dtype=torch.int32)
        else:
            self._flags = PeerTensors([torch.zeros(1, dtype=torch.int32, device=ranks.device)], 0)
            self._group = ranks.new_group() if ranks.world_size > 1 else None

    @property
    def stopped(self) -> Tensor:
        """int32 [2^k] on the device: weights must not change where any of it is not zero."""
        return self._flags.own

    def look(self, losses: Tensor) -> None:
        """Raises this rank's flag, for good, where the sum of `losses`, fp32 [n], is not finite. Collective.

        In peer memory other ranks see it after the next barrier.
        """
        raise_flag(losses, self._flags)
        if self._group is not None:
            dist.all_reduce(self._flags.own, dist.ReduceOp.MAX, group=self._group)
