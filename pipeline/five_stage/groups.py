"""Process groups beside the default one."""

from datetime import timedelta

import torch
import torch.distributed as dist


def group_timeout() -> timedelta | None:
    """How long collectives of the default process group may take. dist.new_group falls back to torch's default, 10
    minutes for NCCL, whatever init_process_group was given: hand it this.

    torch tells it nowhere in public; None where it is not in the place that it has in 2.13. All backends of a group
    have the same.
    """
    world = dist.group.WORLD
    assert world is not None, "there is no process group"
    backend = world._get_backend(world._device_types[0])
    options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)  # TORCH_DISTRIBUTED_DEBUG wraps it
    return getattr(options, "_timeout", None)


def new_group(ranks: list[int], device: torch.device) -> dist.ProcessGroup:
    """A communicator, set up here and now: its first collective would wait for all ranks in the midst of others."""
    group = dist.new_group(ranks, timeout=group_timeout(), use_local_synchronization=True)
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group
