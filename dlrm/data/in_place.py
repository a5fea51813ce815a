"""Copies of batches by one stream into memory of another: TorchRec's in-place copies (enable_inplace_copy_batch)."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

Part = TypeVar("Part", Tensor, KeyedJaggedTensor)


def empty_like(part: Part, device: torch.device) -> Part:
    """Returns uninitialised memory on `device` of the form of `part`."""
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
    """Copies `sources` to `targets`, memory of the current stream, on `stream`."""
    stream.wait_stream(torch.cuda.current_stream(device))  # the memory may still be in use there
    with torch.cuda.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=non_blocking)
