"""Rows for the unused places of a lookup with room: those that the batch names anyway, so that no other row is changed.

An id of weight zero has a gradient of zero. Adam and weight decay change a row for that alone, which nothing else of
the batch may name; to the gradient of a row that is updated anyway it adds zero.
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
    """And the place after its last one."""
    number: Tensor
    """The place's number among those of its feature."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device) -> "NamedRows":
        """lengths: places of each feature, one feature after another."""
        ends = list(accumulate(lengths))
        repeats = torch.tensor(lengths, dtype=torch.int64)
        end = torch.tensor(ends, dtype=torch.int64).repeat_interleave(repeats)
        first = end - repeats.repeat_interleave(repeats)
        return NamedRows(first.to(device), end.to(device), (torch.arange(len(end)) - first).to(device))

    def fill(self, rows: Tensor) -> Tensor:
        """Returns rows [places] in which unused places, -1 in `rows`, name the rows of their feature's used places in
        turn; row 0 where the feature has none."""
        used = rows >= 0
        before = torch.ops.fbgemm.asynchronous_complete_cumsum(used.to(torch.int64))
        count = before[self.end] - before[self.first]
        wanted = before[self.first] + self.number % count.clamp(min=1)
        place = torch.searchsorted(before[1:], wanted, right=True).clamp(max=max(len(rows) - 1, 0))
        return torch.where(used, rows, torch.where(count > 0, rows[place], 0))
