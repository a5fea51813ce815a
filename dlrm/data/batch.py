"""One rank's samples of one iteration, in one contiguous buffer with fields named by the benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dlrm_bench.dlrm.data.batch_fields import BatchFields

ALIGNMENT = 256  # Bytes; guaranteed by CUDA allocations, so fields copied to the GPU stay aligned for any kernel.
_DTYPES = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64}


class BatchLayout:
    """The offsets of a batch's fields in its buffer: one after the other, each aligned."""

    def __init__(self, batch_size: int, model: BatchFields) -> None:
        self.batch_size = batch_size
        self.places: dict[str, slice] = {}
        """The bytes of each field."""
        self.dtypes: dict[str, torch.dtype] = {}
        self.end = 0
        """Bytes of the buffer."""
        for field in model.batch_fields:
            start, dtype = -(-self.end // ALIGNMENT) * ALIGNMENT, _DTYPES[field.dtype]
            self.end = start + batch_size * field.columns * dtype.itemsize
            self.places[field.name], self.dtypes[field.name] = slice(start, self.end), dtype


@dataclass(eq=False)
class Batch:
    """Samples as tensors of fixed shapes; B is the local batch size.

    The tensors are created on first use: creating them takes longer than reading a batch.
    """

    storage: Tensor
    """uint8 [storage_bytes(B, model)], the one buffer of which all fields are views."""
    layout: BatchLayout
    """The offsets of the fields."""
    num_valid: int
    """The first num_valid samples are real; the others pad the last evaluation batch."""

    def flat(self, name: str) -> Tensor:
        """Returns a field, [B * its columns]."""
        return self.storage[self.layout.places[name]].view(self.layout.dtypes[name])

    @cached_property
    def dense(self) -> Tensor:
        """float32 [B, columns], for benchmarks with dense features."""
        return self.flat("dense").view(self.layout.batch_size, -1)

    @cached_property
    def labels(self) -> Tensor:
        """float32 [B], 0 or 1."""
        return self.flat("labels")

    @cached_property
    def ids(self) -> Tensor:
        """int32, or int64 if ids are raw, [B * ids_per_sample], feature-major: feature f is a row-major [B,
        multi_hot_sizes[f]] block, blocks in table order. These are the values of a KJT."""
        return self.flat("ids")

    @classmethod
    def empty(cls, batch_size: int, model: BatchFields, pin: bool = False) -> "Batch":
        """Returns a batch of uninitialised host memory, with num_valid = batch_size; see of_layout."""
        return cls.of_layout(BatchLayout(batch_size, model), pin)

    @classmethod
    def of_layout(cls, layout: BatchLayout, pin: bool) -> "Batch":
        """Returns a batch of uninitialised host memory, with num_valid = batch_size.

        pin: page-locked memory. PyTorch's caching host allocator reuses it only after its non-blocking copies have
        finished, so a batch may be dropped as soon as its copy has been enqueued.
        """
        return cls(torch.empty(layout.end, dtype=torch.uint8, pin_memory=pin), layout, layout.batch_size)

    @classmethod
    def over(cls, storage: Tensor, layout: BatchLayout, num_valid: int | None = None) -> "Batch":
        """Returns the batch stored in `storage`, on any device: for a copy of another batch's whole buffer."""
        assert storage.shape == (layout.end,)
        return cls(storage, layout, layout.batch_size if num_valid is None else num_valid)


def storage_bytes(batch_size: int, model: BatchFields) -> int:
    """Returns the number of bytes of a batch's buffer."""
    return BatchLayout(batch_size, model).end


def feature_blocks(ids: Tensor, multi_hot_sizes: Sequence[int]) -> list[Tensor]:
    """Returns views [B, multi_hot_sizes[f]] of a batch's ids, one for each feature."""
    batch_size = ids.numel() // sum(multi_hot_sizes)
    blocks = ids.split([batch_size * size for size in multi_hot_sizes])
    return [block.view(batch_size, size) for block, size in zip(blocks, multi_hot_sizes, strict=True)]
