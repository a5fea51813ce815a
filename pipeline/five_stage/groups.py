"""Process groups in addition to the default one."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def group_timeout() -> timedelta | None:
    """Returns the timeout of the default process group's collectives, for dist.new_group, which otherwise uses torch's
    default, 10 minutes for NCCL, whatever timeout init_process_group was given.

    torch has no public function for it; returns None if it is not where torch 2.13 stores it. All backends of a group
    have the same timeout.
    """
    world = dist.group.WORLD
    assert world is not None, "there is no process group"
    backend = world._get_backend(world._device_types[0])
    options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)  # TORCH_DISTRIBUTED_DEBUG wraps it
    return getattr(options, "_timeout", None)


_FREE: dict[tuple[Any, ...], list[dist.ProcessGroup]] = {}
_LENT: dict[dist.ProcessGroup, tuple[Any, ...]] = {}


def lend_group(use: str, ranks: Sequence[int], make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """Returns the group of this use and these ranks that a pipeline has given back last, or a new one by `make`.
    Collective: all ranks open and close their pipelines in the same order.

    Groups are given back, not destroyed: torch names a group by its ranks and the number of groups that there are, so a
    later group has a destroyed one's name, and finds its addresses in torch's store.
    """
    free = _FREE.setdefault((use, *ranks), [])
    while free and not _exists(free[-1]):  # the default process group was destroyed, and all others with it
        free.pop()
    group = free.pop() if free else make()
    _LENT[group] = (use, *ranks)
    return group


def give_back(*groups: dist.ProcessGroup | None) -> None:
    """Lets later pipelines have these groups, once no graph holds a collective of them."""
    for group in groups:
        if group is not None and (use := _LENT.pop(group, None)) is not None and _exists(group):
            _FREE[use].append(group)


def _exists(group: dist.ProcessGroup) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def of_all_ranks(own: T, group: dist.ProcessGroup) -> list[T]:
    """Returns what each rank gives, in rank order; anything that can be pickled. Collective."""
    everyone = [own] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def of_any_rank(own: T | None, group: dist.ProcessGroup) -> T | None:
    """Returns what the first rank gives that does not give None, the same on all ranks; None if all give None.
    Collective."""
    return next((of for of in of_all_ranks(own, group) if of is not None), None)


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a new communicator over the same ranks, so that another thread may launch the input dist. Collective.

    On GPUs its kernels have high priority, because all ranks wait for the last kernel to start. Its stream then cannot
    be that of `group` either: torch hands out 32 streams per priority in turn, and two communicators on one stream,
    whose threads launch in different orders on different ranks, would deadlock.
    """
    options, timeout = None, group_timeout()
    if dist.get_backend(group) == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            options._timeout = timeout  # torch warns if they differ
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=timeout, pg_options=options, use_local_synchronization=True)


def ready_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Returns own_group, already initialized: otherwise its first collective would wait for all ranks amid others."""
    own = lend_group("input_dist", dist.get_process_group_ranks(group), partial(own_group, group))
    dist.all_reduce(torch.zeros(1, device=device), group=own)
    return own
