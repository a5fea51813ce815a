"""Caches of what the host has put on the device for batches of one size."""

from typing import Any

import torch

_CACHED = 64


def bound(cache: dict[Any, Any]) -> None:
    """Batch sizes that vary must not fill the memory. To be called before an entry is added."""
    if len(cache) >= _CACHED:
        cache.clear()


def memory_owner(device: torch.device) -> int:
    """For keys of what is made, and read, on the current stream: dropped, it is that stream's to use again, which must
    have been the only one to read it."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
