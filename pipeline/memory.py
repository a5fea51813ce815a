"""What a pipeline keeps in memory, on every rank, and how much is left."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.ranks import Ranks


def memory_gb(ranks: Ranks, parts: Mapping[str, Any]) -> list[dict[str, float]]:
    """GB of each part on each rank, and on GPUs what the allocator holds and what is left. Collective.

    parts: tensors, in lists and dataclasses where need be; memory behind several views counts once. On GPUs `allocated`
    is all of this process's live tensors (these parts, FBGEMM's and the dense network's buffers, graph pools in use),
    `reserved` what PyTorch took from the device for them, and `left` what nobody has taken.
    """
    own = {name: sum(_storages(part).values()) for name, part in parts.items()}
    if ranks.device.type == "cuda":
        stats = torch.cuda.memory_stats(ranks.device)
        own["allocated"] = stats["allocated_bytes.all.current"]
        own["reserved"] = stats["reserved_bytes.all.current"]
        own["left"] = torch.cuda.mem_get_info(ranks.device)[0]
    mine = {name: float(f"{size / 1e9:.4g}") for name, size in own.items()}
    everyones = [mine] * ranks.world_size
    dist.all_gather_object(everyones, mine)
    return everyones


def _storages(part: Any) -> dict[int, int]:
    """Bytes of each allocation, by address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(part)}


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))
