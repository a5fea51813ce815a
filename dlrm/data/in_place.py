"""Copies of batches on one stream to another stream's memory: TorchRec's in-place copies
(enable_inplace_copy_batch)."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

Part = TypeVar("Part", Tensor, KeyedJaggedTensor)


def empty_like(part: Part, device: torch.device) -> Part:
    """Returns uninitialised memory on `device`, shaped like `part`."""
    if isinstance(part, KeyedJaggedTensor):
        return KeyedJaggedTensor.empty_like(part, device=device)
    return torch.empty_like(part, device=device)


def fill_on(
    stream: torch.cuda.Stream,
    device: torch.device,
    targets: Sequence[Tensor | KeyedJaggedTensor],
    sources: Sequence[Tensor | KeyedJaggedTensor],
    non_blocking: bool,
) -> None:
    """Copies `sources` on `stream` to `targets`, which are memory of the current stream."""
    stream.wait_stream(torch.cuda.current_stream(device))  # the memory may still be in use there
    with torch.cuda.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=non_blocking)
