"""Agreement of all ranks on batches that exceed a list of fixed capacity on any rank.

Such a batch is launched eagerly, while others replay a graph. All ranks must then launch eagerly: NCCL forbids some
ranks to replay a collective that others launch. The excess is known only on the device, so the ranks exchange it there,
and their hosts read the result before the batch trains, an iteration later.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks

NOT_YET = torch.iinfo(torch.int32).min
"""Value of a number on the host until the device has written it."""
_POLL_S = 20e-6
_POLL_SHARE = 1 / 8
"""Delay until the next poll, as a share of the wait so far: a wait of 250 ms takes 60 polls, and the device is then
still working on the iteration that produced the number."""


class Overflows:
    """Agreement of all ranks on batches that overflow on any rank: a maximum over the ranks, on the device."""

    def __init__(self, ranks: Ranks) -> None:
        """Makes a process group, so that the exchange overlaps with other collectives. Collective over all ranks."""
        self._device = ranks.device
        self._group = ranks.new_group() if ranks.world_size > 1 else None

    def empty(self) -> Tensor:
        """Returns memory for one batch's agreement: int32 [1] on the host, pinned if there is a GPU."""
        return torch.full((1,), NOT_YET, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def reset(self, out: Tensor) -> None:
        """Clears the agreement, before that of the next batch is launched."""
        out.fill_(NOT_YET)

    def exchange(self, excess: Tensor | None, out: Tensor) -> None:
        """Launches the exchange of one batch's excess: the number of entries beyond this rank's list capacity, int32
        [1] on the device; None on a rank without a list. Collective."""
        if excess is None:
            excess = torch.full((1,), -1, dtype=torch.int32, device=self._device)
        if self._group is not None:
            dist.all_reduce(excess, dist.ReduceOp.MAX, group=self._group)
        out.copy_(excess, non_blocking=True)

    def largest(self, out: Tensor) -> int:
        """Returns the largest excess of all ranks, the same on all, 0 or less if no list overflows; waits until the
        device has exchanged it. RuntimeError if the device has failed."""
        return arrived(out)


def arrived(number: Tensor) -> int:
    """Returns a number, int32 [1], that the device writes to the host; waits for it. RuntimeError if the device has
    failed: it then writes nothing, and only a query reports the failure."""
    value, began = number.numpy(), time.monotonic()
    while value[0] == NOT_YET:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().query()
        time.sleep(max(_POLL_S, _POLL_SHARE * (time.monotonic() - began)))
    return int(value[0])
