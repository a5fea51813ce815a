"""Warm-up before the first batch, which leaves no trace: see pipeline/static/warm_up.py."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks

ROWS = 16
"""Number of first rows of each table part that are saved and restored: a warm-up batch names no other rows."""


@contextmanager
def unchanged(tensors: Sequence[Tensor], rows: AbstractContextManager[None], ranks: Ranks) -> Iterator[None]:
    """Restores `tensors` bit for bit after training inside, and torch's generators, which draw dropout's masks. rows:
    restores the tables' rows when it ends. Collective."""
    copies = [tensor.detach().clone() for tensor in tensors]
    on_gpu = ranks.device.type == "cuda"
    of_host = torch.get_rng_state()
    of_device = torch.cuda.get_rng_state(ranks.device) if on_gpu else None
    with rows:
        yield
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
    torch.set_rng_state(of_host)
    if of_device is not None:
        torch.cuda.set_rng_state(of_device, ranks.device)
