"""A tensor on every rank, as seen by one rank: for kernels that read and write other GPUs' memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PeerTensors:
    """One tensor of each rank, with equal shape, strides and dtype; this rank may read and write all of them.

    Kernels find them through `addresses`, int64 [ranks], on the device. Users must order their writes after other
    ranks' reads.
    """

    def __init__(self, tensors: Sequence[Tensor], rank: int) -> None:
        """tensors: of all ranks, in rank order; tensors[rank] is this rank's own."""
        first = tensors[0]
        assert all(t.shape == first.shape and t.stride() == first.stride() for t in tensors), "equal on all ranks"
        assert all(t.dtype == first.dtype for t in tensors), "one dtype"
        self.tensors, self.rank = tuple(tensors), rank
        self.addresses = torch.tensor([t.data_ptr() for t in tensors], device=tensors[rank].device)

    def viewed(self, dtype: torch.dtype) -> PeerTensors:
        """Returns the same memory in another dtype."""
        return PeerTensors([tensor.view(dtype) for tensor in self.tensors], self.rank)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def own(self) -> Tensor:
        """This rank's tensor."""
        return self.tensors[self.rank]
