"""Keeps the weights of all ranks unchanged from the first iteration with a non-finite loss on any rank, and from the
iteration after a non-finite gradient, or a non-finite number that was rounded to 8 bits."""

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
    """Flags on the device, one per rank or one for all ranks, that every update of weights reads.

    The loss, and numbers that the forward pass rounds to 8 bits, are known before any update: no weight changes.
    Gradients become known one after another, while earlier ones are already applied. So an update skips every element
    with a non-finite gradient, all other elements of this iteration change, and `look` raises the flag in the next
    iteration: weights and optimizer state stay finite.

    The host learns of it when it reads losses and tallies, many iterations later; until then iterations run and change
    nothing.
    """

    def __init__(self, ranks: Ranks, memory: PeerMemory | None, tallies: Tallies) -> None:
        """Collective. memory: the ranks' peer memory, if they exchange gradients through it."""
        self.tallies = tallies
        self._group: dist.ProcessGroup | None = None
        if memory is not None:
            self._flags = memory.zeros(next_power_of_2(ranks.world_size), dtype=torch.int32)
        else:
            self._flags = PeerTensors([torch.zeros(1, dtype=torch.int32, device=ranks.device)], 0)
            self._group = ranks.new_group() if ranks.world_size > 1 else None

    @property
    def watch(self) -> Watch:
        """Returns the watch for all updates of weights."""
        return Watch(self._flags.own, self.tallies.of(GRADIENTS)[1:])

    def look(self, losses: Tensor) -> None:
        """Raises this rank's flag, permanently, if the sum of `losses`, fp32 [n], or anything tallied is not finite.
        Collective. Streams other than the current one must wait before they read the flags.

        With peer memory, other ranks see the flag after the next barrier.
        """
        raise_flag(losses, self.tallies.not_finite, self._flags)
        if self._group is not None:
            dist.all_reduce(self._flags.own, dist.ReduceOp.MAX, group=self._group)
