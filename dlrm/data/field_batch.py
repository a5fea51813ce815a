"""Batches that are dataclasses of tensors and KJTs, as TorchRec's train pipelines take them."""

from dataclasses import fields
from typing import Self

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dlrm_bench.dlrm.data.in_place import empty_like, fill_on


class FieldBatch(Pipelineable):
    """Base of dataclasses whose fields are all Tensors or KeyedJaggedTensors."""

    def to(
        self, device: torch.device, non_blocking: bool = False, data_copy_stream: torch.cuda.Stream | None = None
    ) -> Self:
        """Returns a copy on `device`; with `data_copy_stream`, in the current stream's memory but copied on that
        one."""
        if data_copy_stream is None:
            return type(self)(*(part.to(device=device, non_blocking=non_blocking) for part in self.parts()))
        targets = [empty_like(part, device) for part in self.parts()]
        fill_on(data_copy_stream, device, targets, self.parts(), non_blocking)
        return type(self)(*targets)

    def record_stream(self, stream: torch.Stream) -> None:
        """Applies Tensor.record_stream to all parts."""
        for part in self.parts():
            part.record_stream(stream)

    def pin_memory(self) -> Self:
        """Returns a copy in page-locked memory."""
        return type(self)(*(part.pin_memory() for part in self.parts()))

    def untouched(self) -> Self:
        """Returns the batch over the same memory with KJTs without cached values, as in a batch that has just been
        read."""
        parts = (plain(part) if isinstance(part, KeyedJaggedTensor) else part for part in self.parts())
        return type(self)(*parts)

    def parts(self) -> list[Tensor | KeyedJaggedTensor]:
        """Returns the fields, in their order."""
        return [getattr(self, field.name) for field in fields(self)]


def plain(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the KJT with its values, weights and lengths alone."""
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride=features.stride(),
    )
