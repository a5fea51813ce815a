"""Batches as TorchRec's train pipelines take them."""

import torch
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch as TorchRecBatch

from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.dcnv2.config import ModelConfig


class BatchLayout:
    """The parts of a KJT that every batch of fixed multi-hot sizes shares, computed once as the reference does."""

    def __init__(self, model: ModelConfig, batch_size: int, pin: bool) -> None:
        sizes = torch.tensor(model.multi_hot_sizes, dtype=torch.int32)
        self.keys = list(model.feature_names)
        self.stride = batch_size
        self.lengths = sizes.repeat_interleave(batch_size)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        if pin:
            self.lengths, self.offsets = self.lengths.pin_memory(), self.offsets.pin_memory()
        self.length_per_key = [batch_size * size for size in model.multi_hot_sizes]
        self.offset_per_key = [0, *torch.tensor(self.length_per_key).cumsum(0).tolist()]

    def batch(self, batch: Batch) -> TorchRecBatch:
        """A torchrec Batch over the memory of `batch`."""
        sparse = KeyedJaggedTensor(
            keys=self.keys,
            values=batch.ids,
            lengths=self.lengths,
            offsets=self.offsets,
            stride=self.stride,
            length_per_key=self.length_per_key,
            offset_per_key=self.offset_per_key,
        )
        return InPlaceBatch(dense_features=batch.dense, sparse_features=sparse, labels=batch.labels)


class InPlaceBatch(TorchRecBatch):
    """A torchrec Batch that in-place copies can move: TorchRec's own has no `data_copy_stream`."""

    def to(
        self, device: torch.device, non_blocking: bool = False, data_copy_stream: torch.cuda.Stream | None = None
    ) -> TorchRecBatch:
        """A copy on `device`; with a stream, in memory of the current stream, copied on that one."""
        if data_copy_stream is None:
            return super().to(device, non_blocking)
        dense = torch.empty_like(self.dense_features, device=device)
        sparse = KeyedJaggedTensor.empty_like(self.sparse_features, device=device)
        labels = torch.empty_like(self.labels, device=device)
        data_copy_stream.wait_stream(torch.cuda.current_stream(device))  # the memory may still be in use there
        with torch.cuda.stream(data_copy_stream):
            dense.copy_(self.dense_features, non_blocking=non_blocking)
            sparse.copy_(self.sparse_features, non_blocking=non_blocking)
            labels.copy_(self.labels, non_blocking=non_blocking)
        return InPlaceBatch(dense_features=dense, sparse_features=sparse, labels=labels)
