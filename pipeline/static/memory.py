"""The memory that a pipeline uses on every rank, and the memory that is left."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks


def memory_gb(ranks: Ranks, parts: Mapping[str, Any]) -> list[dict[str, float]]:
    """Returns the GB of each part on each rank, and on GPUs of the allocator and of free memory. Collective.

    parts: tensors, possibly in lists and dataclasses; memory with several views counts once, and memory without a view
    does not count. On GPUs `allocated` is all of this process's live tensors (these parts, FBGEMM's and the dense
    network's buffers, graph pools in use) except those in peer memory, `reserved` is PyTorch's memory for them, and
    `left` is the device's free memory.
    """
    own = {name: _bytes(part) for name, part in parts.items()}
    if ranks.device.type == "cuda":
        stats = torch.cuda.memory_stats(ranks.device)
        own["allocated"] = stats["allocated_bytes.all.current"]
        own["reserved"] = stats["reserved_bytes.all.current"]
        own["left"] = torch.cuda.mem_get_info(ranks.device)[0]
    gigabytes = {name: float(f"{size / 1e9:.4g}") for name, size in own.items()}
    of_ranks = [gigabytes] * ranks.world_size
    dist.all_gather_object(of_ranks, gigabytes)
    return of_ranks


def _bytes(part: Any) -> int:
    """Returns the bytes of each allocation covered by its views, which may be strided; at most its whole size."""
    whole: dict[int, int] = {}
    seen: Counter[int] = Counter()
    for tensor in _tensors(part):
        storage = tensor.untyped_storage()
        whole[storage.data_ptr()] = storage.nbytes()
        seen[storage.data_ptr()] += tensor.nbytes
    return sum(min(size, seen[address]) for address, size in whole.items())


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
