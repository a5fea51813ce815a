"""The order of a rank's raw ids for creating rows and updating tables: by table, then by id.

Each table has a constant number of ids in a batch, so that only the ids' own order depends on the batch: the sorted
ids of a table begin at a constant offset.
"""

import torch
from torch import Tensor

from dlrm_bench.kernels.embedding.id_map import Keys


class RawOrder:
    """Sorts the ids of batches of one shape."""

    def __init__(self, tables: Tensor, bags: Tensor) -> None:
        """tables: int32 [N], the place of each id's table among the rank's tables. bags: int32 [N], the bag of each."""
        self._tables, self._bags = tables, bags
        self._sorted_tables = tables.sort(stable=True).values
        self._short = tables.to(torch.int16)  # a sort of fewer bits
        assert len(tables) == 0 or int(tables.max()) < 1 << 15, "tables: counted with 15 bits"

    def keys(self, ids: Tensor) -> Keys:
        """Returns the keys of a batch's ids. ids: int64 [N]."""
        return Keys(ids, self._tables)

    def sorted_keys(self, sorted_ids: Tensor) -> Keys:
        """Returns the keys of ids that `sort` has sorted. sorted_ids: int64 [N]."""
        return Keys(sorted_ids, self._sorted_tables)

    def sort(self, ids: Tensor, sorted_ids: Tensor, sorted_bags: Tensor) -> None:
        """Sorts a batch's ids, stably, with the bag of each. ids, sorted_ids: int64 [N]; sorted_bags: int32 [N]."""
        order = ids.sort(stable=True).indices
        order = order[self._short[order].sort(stable=True).indices]
        torch.index_select(ids, 0, order, out=sorted_ids)
        torch.index_select(self._bags, 0, order, out=sorted_bags)
