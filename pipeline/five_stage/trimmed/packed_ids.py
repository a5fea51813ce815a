"""Ids of bags with their weights: rows of one tensor, so that one all-to-all, and one gather, moves both."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

_UNITS = {4: torch.int32, 8: torch.int64}
"""Types, by size in bytes, that ids and weights are reinterpreted as: NCCL can send them."""


@dataclass(frozen=True, slots=True)
class IdFormat:
    """The types of a batch's ids and of their weights, if they have any."""

    ids: torch.dtype
    weights: torch.dtype | None

    @staticmethod
    def of(features: KeyedJaggedTensor) -> "IdFormat":
        """Returns the format of a KJT."""
        weights = features.weights_or_none()
        return IdFormat(features.values().dtype, None if weights is None else weights.dtype)

    def pack(self, ids: Tensor, weights: Tensor | None) -> Tensor:
        """Returns ids [n] as they are; with weights [n], their bits and those of the weights side by side, [n, k]."""
        if weights is None:
            return ids
        unit = _UNITS.get(min(ids.element_size(), weights.element_size()), torch.uint8)
        return torch.cat([ids.unsqueeze(1).view(unit), weights.unsqueeze(1).view(unit)], dim=1)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the ids and weights of a result of `pack`, or of some of its rows."""
        if self.weights is None:
            return rows, None
        wide = self.ids.itemsize // rows.element_size()
        ids, weights = (part.reshape(-1).contiguous() for part in (rows[:, :wide], rows[:, wide:]))
        return ids.view(self.ids), weights.view(self.weights)
