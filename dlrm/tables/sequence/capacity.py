"""The room for a batch's ids, and a check of ids."""

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dlrm_bench.dlrm.tables.tables import Tables

# Ratio of a list's entries to the expected number. Row i belongs to rank i % W, which spreads distinct rows evenly.
_SLACK = 1.25
# Granularity of list sizes, and their minimum excess over the expected number: for small batches, where chance matters.
_LEAST_SLACK = 256


@dataclass(frozen=True, slots=True)
class IdCapacity:
    """The places for ids of a rank's batch, table by table; unused places are -1. The same on all ranks."""

    places: tuple[int, ...]
    """Number of places of each table."""
    distinct: int | None = None
    """Expected number of distinct rows in a rank's batch, over all tables, which sets the size of exchanges. A batch
    with more rows is still trained, by larger exchanges that are launched eagerly. None: the number of places."""

    def __post_init__(self) -> None:
        assert self.places, "places of each table"
        assert min(self.places) >= 0 < sum(self.places), "places for ids"
        assert self.distinct is None or self.distinct > 0, "distinct rows: at least one"

    @property
    def count(self) -> int:
        """Places of all tables: K."""
        return sum(self.places)

    def list_entries(self, ranks: int) -> int:
        """Returns the distinct rows of one owner that a rank's list takes, where rows are spread over `ranks` > 1."""
        expected = min(self.distinct or self.count, self.count) / ranks
        return min(self.count, math.ceil(expected * _SLACK / _LEAST_SLACK + 1) * _LEAST_SLACK)


def check_ids(ids: Tensor, capacity: IdCapacity, tables: Tables, rank: int, iteration: int) -> None:
    """Raises ValueError that names the first id that is neither a row of its table nor -1. Waits for the device.

    ids: int32 [K]. rank, iteration: for the message.
    """
    ends = list(accumulate(capacity.places))
    rows = torch.tensor(tables.rows, device=ids.device).repeat_interleave(
        torch.tensor(capacity.places, device=ids.device)
    )
    bad = (ids < -1) | (ids >= rows)
    if not bool(bad.any()):
        return
    place = int(bad.nonzero()[0])
    table = next(number for number, end in enumerate(ends) if place < end)
    raise ValueError(
        f"--check-ids: iteration {iteration}, rank {rank}: id {int(ids[place])} at place "
        f"{place - ends[table] + capacity.places[table]} of {tables.names[table]} is outside its table of "
        f"{tables.rows[table]} rows, on {ids.device}"
    )
