"""One rank's samples of one iteration, in one contiguous buffer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dlrm_bench.dlrm.config import ModelConfig

ALIGNMENT = 256  # Bytes; what CUDA allocations guarantee, so parts copied to the GPU stay aligned for any kernel.


class BatchLayout:
    """Where the parts of a batch lie in its buffer, in bytes. Dense features start at 0."""

    def __init__(self, batch_size: int, model: ModelConfig) -> None:
        self.batch_size = batch_size
        self.dense_columns = model.dense_in_features
        self.dense_end = batch_size * self.dense_columns * 4
        self.labels_start = _align(self.dense_end)
        self.labels_end = self.labels_start + batch_size * 4
        self.ids_start = _align(self.labels_end)
        self.end = self.ids_start + batch_size * model.ids_per_sample * 4


@dataclass(eq=False)
class Batch:
    """Samples as tensors of fixed shapes; B is the local batch size.

    The tensors are made when they are first asked for: making them takes longer than reading a batch.
    """

    storage: Tensor
    """uint8 [storage_bytes(B, model)], the one buffer that dense, labels and ids are views of."""
    layout: BatchLayout
    """Where these lie in it."""
    num_valid: int
    """The first num_valid samples are real; the others pad the last evaluation batch."""

    @cached_property
    def dense(self) -> Tensor:
        """float32 [B, dense_in_features]."""
        return self.storage[: self.layout.dense_end].view(torch.float32).view(-1, self.layout.dense_columns)

    @cached_property
    def labels(self) -> Tensor:
        """float32 [B], 0 or 1."""
        return self.storage[self.layout.labels_start : self.layout.labels_end].view(torch.float32)

    @cached_property
    def ids(self) -> Tensor:
        """int32 [B * ids_per_sample], feature-major: feature f is a row-major [B, multi_hot_sizes[f]] block, the blocks
        in table order. These are the values of a KJT; where lengths vary, bags are padded (padding.py)."""
        return self.storage[self.layout.ids_start :].view(torch.int32)

    @classmethod
    def empty(cls, batch_size: int, model: ModelConfig, pin: bool = False) -> "Batch":
        """A batch of uninitialised host memory, with num_valid = batch_size, as of_layout makes it."""
        return cls.of_layout(BatchLayout(batch_size, model), pin)

    @classmethod
    def of_layout(cls, layout: BatchLayout, pin: bool) -> "Batch":
        """A batch of uninitialised host memory, with num_valid = batch_size.

        pin: page-locked memory. PyTorch's caching host allocator hands it out again only after the non-blocking
        copies from it have finished, so a batch may be dropped as soon as its copy has been enqueued.
        """
        return cls(torch.empty(layout.end, dtype=torch.uint8, pin_memory=pin), layout, layout.batch_size)

    @classmethod
    def over(cls, storage: Tensor, batch_size: int, model: ModelConfig, num_valid: int | None = None) -> "Batch":
        """The batch that `storage` holds, on whatever device: for a copy of another batch's whole buffer."""
        layout = BatchLayout(batch_size, model)
        assert storage.shape == (layout.end,)
        return cls(storage, layout, batch_size if num_valid is None else num_valid)


def storage_bytes(batch_size: int, model: ModelConfig) -> int:
    """Bytes of a batch's buffer."""
    return BatchLayout(batch_size, model).end


def feature_blocks(ids: Tensor, multi_hot_sizes: Sequence[int]) -> list[Tensor]:
    """Views [B, multi_hot_sizes[f]] of a batch's ids, one for each feature."""
    batch_size = ids.numel() // sum(multi_hot_sizes)
    blocks = ids.split([batch_size * size for size in multi_hot_sizes])
    return [block.view(batch_size, size) for block, size in zip(blocks, multi_hot_sizes, strict=True)]


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
