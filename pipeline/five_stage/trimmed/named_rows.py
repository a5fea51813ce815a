"""Rows for the unused places of a lookup with a capacity: rows that the batch names anyway, so that no other changes.

An id of weight zero has a gradient of zero. Adam and weight decay change a row even with a zero gradient, although the
batch may not name the row otherwise; to the gradient of a row that is updated anyway it adds zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NamedRows:
    """The places of a lookup, int64 [places] each."""

    first: Tensor
    """The first place of each place's feature."""
    end: Tensor
    """The place after its last one."""
    number: Tensor
    """The place's index among those of its feature."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> "NamedRows":
        """lengths: number of places of each feature, one feature after another."""
        ends = list(accumulate(lengths))
        repeats = torch.tensor(lengths, dtype=torch.int64)
        end = torch.tensor(ends, dtype=torch.int64).repeat_interleave(repeats)
        first = end - repeats.repeat_interleave(repeats)
        return NamedRows(first.to(device), end.to(device), (torch.arange(len(end)) - first).to(device))

    def fill(self, rows: Tensor) -> Tensor:
        """Returns rows [places] in which unused places, -1 in `rows`, cycle through the rows of their feature's used
        places; row 0 if the feature has none."""
        used = rows >= 0
        before = torch.ops.fbgemm.asynchronous_complete_cumsum(used.to(torch.int64))
        count = before[self.end] - before[self.first]
        wanted = before[self.first] + self.number % count.clamp(min=1)
        place = torch.searchsorted(before[1:], wanted, right=True).clamp(max=max(len(rows) - 1, 0))
        return torch.where(used, rows, torch.where(count > 0, rows[place], 0))
