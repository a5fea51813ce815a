"""The ids of one batch on the rank that owns their tables, in the forms that lookup and table update need."""

from dataclasses import dataclass

from torch import Tensor

from dlrm_bench.dlrm.tables.pooled.ids_exchange import IdsBuffer
from dlrm_bench.dlrm.tables.pooled.replicated import ReplicatedIds
from dlrm_bench.dlrm.tables.pooled.row_parts import PickedIds
from dlrm_bench.kernels.peer_tensors import PeerTensors


@dataclass(frozen=True, slots=True)
class SortedIds:
    """One batch's ids in the order of the table update."""

    ids: Tensor
    """int32, flat: rows of all tables, counted one table after another, in ascending order; for picked ids, -1 after
    the last. If rows are created when first named: their places, in ascending order."""
    bags: Tensor
    """int32, flat: the row of all parts' pooled gradients, viewed as [part * G * T, C], of each sorted id."""
    peers: PeerTensors | None = None
    """The memory of `ids` and `bags` on all ranks, if the ranks share the sort: see SharedSort."""


@dataclass(frozen=True, slots=True)
class PlacedIds:
    """The places of one batch's rows, if rows are on two tiers of memory, or created when first named."""

    lookup: Tensor
    """int32, in the order of the ids."""
    sorted: Tensor | None = None
    """int32, in the order of the sorted ids, if rows are on two tiers and ids are sorted; equal rows are runs of equal
    places."""
    lacking: Tensor | None = None
    """int32 [1] for a batch that creates rows: how many of them have no place, see DynamicRows.place."""


@dataclass(slots=True)
class DistributedIds:
    """Model-parallel ids of one batch: the result of the input dist, for lookup and update."""

    received: IdsBuffer
    sorted: SortedIds | None = None
    """Sorted ids, if this batch is for an update that needs them; else None."""
    replicated: ReplicatedIds | None = None
    """Ids of the local batch for the plan's replicated tables, if there are any."""
    picked: PickedIds | None = None
    """The ids of this rank's rows, if it has part of any table's rows; lookup and sort then use these."""
    overflow: Tensor | None = None
    """The ranks' agreement on this batch, see Overflows; set if ids are for an update, and the plan splits rows or rows
    are created when first named."""
    placed: PlacedIds | None = None
    """Places of the rows, if rows have places; lookup and update then use these. Else None."""

    @property
    def ids(self) -> Tensor:
        """int32 [part][T][G, hot], flat; rows of their table; raw ids are int64."""
        return self.received.own
