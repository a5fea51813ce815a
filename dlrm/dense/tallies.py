"""Device-side counts of saturated and non-finite numbers; read together with the losses, so that nothing waits."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
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

    def describe(self) -> dict[str, dict[str, int]]:
        """Returns, for a pipeline's description, the numbers that were too large for 8 bits and saturated, including
        those in evaluations, by tensor, over all ranks; nothing if no tensor has 8 bits. Collective."""
        rounded = self.names[1:]
        if not rounded:
            return {}
        counts = self.counts.clone()
        dist.all_reduce(counts)
        large = zip(rounded, counts[1:, 0].tolist(), strict=True)
        return {"too_large_for_eight_bits": {name: count for name, count in large if count}}

    @property
    def not_finite(self) -> Tensor:
        """The counts of non-finite numbers, a view int64 [rows]."""
        return self.counts[:, 1]
