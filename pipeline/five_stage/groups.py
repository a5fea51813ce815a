"""Process groups beside the default one."""

from datetime import timedelta

import torch
import torch.distributed as dist


def group_timeout() -> timedelta | None:
    """Returns the timeout of collectives of the default process group, for dist.new_group, which otherwise falls back
    to torch's default, 10 minutes for NCCL, whatever init_process_group was given.

    No public function of torch returns it; None where it is not in its place of torch 2.13. All backends of a group
    have the same.
    """
    world = dist.group.WORLD
    assert world is not None, "there is no process group"
    backend = world._get_backend(world._device_types[0])
    options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)  # TORCH_DISTRIBUTED_DEBUG wraps it
    return getattr(options, "_timeout", None)


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a new communicator over the same ranks, so that another thread may launch the input dist. Collective.

    On GPUs its kernels have high priority: all ranks wait for the last one whose kernel finds room. Nor can its stream
    be that of `group` then: torch gives out 32 streams a priority in turn, and two communicators on one stream, whose
    threads launch in another order on another rank, would wait for each other without end.
    """
    options, timeout = None, group_timeout()
    if dist.get_backend(group) == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            options._timeout = timeout  # torch warns where they differ
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=timeout, pg_options=options, use_local_synchronization=True)


def ready_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """own_group, set up here and now: its first collective would wait for all ranks in the midst of others."""
    own = own_group(group)
    dist.all_reduce(torch.zeros(1, device=device), group=own)
    return own
