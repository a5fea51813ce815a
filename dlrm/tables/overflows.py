"""The agreement of all ranks on batches with more entries than a list of fixed capacity takes on any of them.

Such a batch is launched eagerly, where others are the replay of a graph. All ranks must then do so: NCCL forbids that
some replay a collective that others launch. The excess is known on the device alone, so the ranks exchange it there,
and their hosts read it when the batch's turn comes, an iteration later.
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
"""Share of the wait so far that passes from one look to the next: a wait of 250 ms takes 60 looks, and the device is
then still at work on the iteration that the number came with."""


class Overflows:
    """The agreement of all ranks on batches that overflow on any of them: a maximum over the ranks, on the device."""

    def __init__(self, ranks: Ranks) -> None:
        """Makes a process group: the exchange runs beside other collectives. Collective over all ranks."""
        self._device = ranks.device
        self._group = ranks.new_group() if ranks.world_size > 1 else None

    def empty(self) -> Tensor:
        """Returns memory for one batch's agreement: int32 [1] on the host, pinned beside a GPU."""
        return torch.full((1,), NOT_YET, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    def reset(self, out: Tensor) -> None:
        """Forgets the agreement, before the next batch's is on its way."""
        out.fill_(NOT_YET)

    def exchange(self, excess: Tensor | None, out: Tensor) -> None:
        """Launches the exchange of one batch's excess: how many entries are more than this rank's list takes, int32 [1]
        on the device; None on a rank without a list. Collective."""
        if excess is None:
            excess = torch.full((1,), -1, dtype=torch.int32, device=self._device)
        if self._group is not None:
            dist.all_reduce(excess, dist.ReduceOp.MAX, group=self._group)
        out.copy_(excess, non_blocking=True)

    def largest(self, out: Tensor) -> int:
        """Returns the greatest excess of all ranks, the same on all, 0 or less where no list overflows; waits until the
        device has exchanged it. RuntimeError where the device has failed."""
        return arrived(out)


def arrived(number: Tensor) -> int:
    """Returns a number that the device writes to the host, int32 [1], once it is there. RuntimeError where the device
    has failed: it writes nothing then, and only a question to it says so."""
    value, began = number.numpy(), time.monotonic()
    while value[0] == NOT_YET:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().query()
        time.sleep(max(_POLL_S, _POLL_SHARE * (time.monotonic() - began)))
    return int(value[0])
