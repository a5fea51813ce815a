"""Device-side counts of saturated and non-finite numbers; read together with the losses, so that nothing waits."""

from collections.abc import Sequence

import torch
from torch import Tensor

GRADIENTS = "gradients"
"""Name of the first row's tally: whether an update of weights met a non-finite gradient; 0 or 1 on each rank."""


class Tallies:
    """Two counts for each of several tensors: numbers too large for the tensor's format, and numbers that were not
    finite before rounding."""

    def __init__(self, tensors: Sequence[str], device: torch.device) -> None:
        self.names = (GRADIENTS, *tensors)
        """The names of the rows."""
        self.counts = torch.zeros(len(self.names), 2, dtype=torch.int64, device=device)

    def of(self, name: str) -> Tensor:
        """Returns the counts of one tensor, a view int64 [2]."""
        return self.counts[self.names.index(name)]

    @property
    def not_finite(self) -> Tensor:
        """The counts of non-finite numbers, a view int64 [rows]."""
        return self.counts[:, 1]
