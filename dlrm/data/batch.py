"""One rank's samples of one iteration, in one contiguous buffer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_bench.dlrm.config import ModelConfig

ALIGNMENT = 256  # Bytes; what CUDA allocations guarantee, so parts copied to the GPU stay aligned for any kernel.


@dataclass(slots=True, eq=False)
class Batch:
    """Samples as tensors of fixed shapes; B is the local batch size."""

    dense: Tensor
    """float32 [B, dense_in_features]."""
    labels: Tensor
    """float32 [B], 0 or 1."""
    ids: Tensor
    """int32 [B * ids_per_sample], feature-major: feature f is a row-major [B, multi_hot_sizes[f]] block, the blocks
    in table order. These are the values of a KJT; where lengths vary, bags are padded (capacity.py)."""
    num_valid: int
    """The first num_valid samples are real; the others pad the last evaluation batch."""
    storage: Tensor
    """uint8 [storage_bytes(B, model)], the one buffer that dense, labels and ids are views of."""

    @classmethod
    def empty(cls, batch_size: int, model: ModelConfig, pin: bool = False) -> "Batch":
        """A batch of uninitialised host memory, with num_valid = batch_size.

        pin: page-locked memory. PyTorch's caching host allocator hands it out again only after the non-blocking
        copies from it have finished, so a batch may be dropped as soon as its copy has been enqueued.
        """
        storage = torch.empty(storage_bytes(batch_size, model), dtype=torch.uint8, pin_memory=pin)
        return cls.over(storage, batch_size, model)

    @classmethod
    def over(cls, storage: Tensor, batch_size: int, model: ModelConfig, num_valid: int | None = None) -> "Batch":
        """The batch that `storage` holds, on whatever device: for a copy of another batch's whole buffer."""
        assert storage.shape == (storage_bytes(batch_size, model),)
        dense_end, labels_start, labels_end, ids_start, ids_end = _layout(batch_size, model)
        return cls(
            dense=storage[:dense_end].view(torch.float32).view(batch_size, model.dense_in_features),
            labels=storage[labels_start:labels_end].view(torch.float32),
            ids=storage[ids_start:ids_end].view(torch.int32),
            num_valid=batch_size if num_valid is None else num_valid,
            storage=storage,
        )


def storage_bytes(batch_size: int, model: ModelConfig) -> int:
    """Bytes of a batch's buffer."""
    return _layout(batch_size, model)[-1]


def feature_blocks(ids: Tensor, multi_hot_sizes: Sequence[int]) -> list[Tensor]:
    """Views [B, multi_hot_sizes[f]] of a batch's ids, one for each feature."""
    batch_size = ids.numel() // sum(multi_hot_sizes)
    blocks = ids.split([batch_size * size for size in multi_hot_sizes])
    return [block.view(batch_size, size) for block, size in zip(blocks, multi_hot_sizes, strict=True)]


def _layout(batch_size: int, model: ModelConfig) -> tuple[int, int, int, int, int]:
    """Byte positions: end of dense, start and end of labels, start and end of ids. Dense starts at 0."""
    dense_end = batch_size * model.dense_in_features * 4
    labels_start = _align(dense_end)
    labels_end = labels_start + batch_size * 4
    ids_start = _align(labels_end)
    return dense_end, labels_start, labels_end, ids_start, ids_start + batch_size * model.ids_per_sample * 4


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
