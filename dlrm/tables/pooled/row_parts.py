"""Picks the ids of a rank's rows out of all ids of its tables.

A rank that holds part of a table's rows receives all ids of the table, in the exchange's fixed shape, and picks its own
ids: their number is known only on the device. They go into a list of fixed capacity, one table after another, with bags
of any length. A batch that names more of the rank's rows than the list can hold overflows: the host, which reads the
number from `count`, picks again into a list as long as all ids, and runs that batch's lookup and update from there.
Both give the same numbers.

Such a batch is launched eagerly, while others replay a graph. All ranks must then launch eagerly: NCCL forbids some
ranks to replay a collective that others launch. So the ranks exchange on the device, with the ids, whether the batch
overflows on any of them, and their hosts read the result before the batch trains, an iteration later: see overflows.py.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.tables.overflows import NOT_YET, arrived
from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.kernels.input_dist.pick_rows import PickedTable, Picks, PickTable, pick_rows

# Ratio of capacity to expected number of ids. Rows of a part are interleaved, so all but the hottest ids spread evenly.
_SLACK = 1.25
# Minimum excess capacity. Large batches exceed the expected number of a part's ids by at most this number; for small
# ones, where chance matters more, the ratio applies.
_LEAST_SLACK = 256


@dataclass(slots=True)
class PickedIds:
    """One batch's ids of this rank's rows, in the order of the exchange: [part][T][bags of G samples]."""

    rows: Tensor
    """int32 [capacity]: row number within the rank's rows of its table; 0 after the last id."""
    sort_rows: Tensor
    """int32 [capacity]: rows counted one table after another, as `sort_rows` takes them; -1 after the last id."""
    bags: Tensor
    """int32 [capacity]: the bag of each id, as FixedTBE numbers them."""
    offsets: Tensor
    """int32 [parts * T * G + 1]: where each bag's ids start."""
    counted: Tensor
    """int32 [1] on the device: the number of ids, even if it exceeds the capacity."""
    count: Tensor
    """The same, int32 [1] on the host, pinned if there is a GPU; NOT_YET until it is known."""

    @property
    def capacity(self) -> int:
        """Number of ids that the list can hold."""
        return len(self.rows)

    @property
    def excess(self) -> Tensor:
        """Number of ids beyond the list's capacity, int32 [1] on the device; negative if capacity is left."""
        return self.counted - self.capacity

    def reset(self) -> None:
        """Clears the count, before that of the next batch is launched."""
        self.count.fill_(NOT_YET)

    def overflows(self) -> bool:
        """Whether the batch has more ids than the list can hold; waits until the device has counted. RuntimeError if
        the device has failed."""
        return arrived(self.count) > self.capacity


class RowParts:
    """Picks one rank's ids; a rank with part of any table's rows picks the ids of all its tables."""

    def __init__(
        self, tables: Tables, shards: tuple[Shard, ...], ranks: int, shape: BatchShape, device: torch.device
    ) -> None:
        """ranks: number of all ranks. device: the ids' device."""
        samples, before, picked = shape.part_samples * ranks, 0, []
        for shard in shards:
            picked.append(PickedTable(tables.hot[shard.table], shard.row_part, shard.row_parts, before))
            before += shard.rows(tables)
        self._cuda, self._device = device.type == "cuda", device
        self._table = PickTable(tuple(picked), samples, shape.parts, device)
        self.num_ids = self._table.num_ids
        expected = shape.parts * sum(samples * table.hot / table.row_parts for table in picked)
        self._capacity = min(self.num_ids, math.ceil(expected * _SLACK / _LEAST_SLACK + 1) * _LEAST_SLACK)

    def empty(self, whole: bool = False) -> PickedIds:
        """Returns memory for one batch's ids; whole: with capacity for any batch."""
        capacity = self.num_ids if whole else self._capacity
        rows = torch.zeros(capacity, dtype=torch.int32, device=self._device)
        offsets = torch.zeros(self._table.num_bags + 1, dtype=torch.int32, device=self._device)
        count = torch.zeros(1, dtype=torch.int32, pin_memory=self._cuda)
        counted = torch.zeros(1, dtype=torch.int32, device=self._device)
        return PickedIds(rows, torch.full_like(rows, -1), rows.clone(), offsets, counted, count)

    def pick(self, ids: Tensor, out: PickedIds) -> None:
        """Launches the picking. ids: int32 [part][T][G, hot], flat.

        If the ids overflow, `out` holds the first ones.
        """
        pick_rows(ids, self._table, Picks(out.rows, out.sort_rows, out.bags, out.offsets, out.counted))
        out.count.copy_(out.counted, non_blocking=True)
