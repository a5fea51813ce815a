"""The ids of one batch on the rank that owns their tables, in the forms that lookup and table update take."""

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
    """int32, flat: rows of all tables, counted one table after another, in ascending order; of picked ids, -1 after the
    last."""
    bags: Tensor
    """int32, flat: the row of all parts' pooled gradients, viewed as [part * G * T, C], of each sorted id."""
    peers: PeerTensors | None = None
    """The memory of `ids` and `bags` on all ranks, where these share the sort: see SharedSort."""


@dataclass(frozen=True, slots=True)
class PlacedIds:
    """The places of one batch's rows, where these are on two tiers of memory, or made when they are first named."""

    lookup: Tensor
    """int32, in the order of the ids."""
    sorted: Tensor | None
    """int32, in the order of the sorted ids; equal rows are runs of equal places."""
    lacking: Tensor | None = None
    """int32 [1] where there is `sorted`: of rows that are made, whether any has no place, see DynamicRows.place."""


@dataclass(slots=True)
class DistributedIds:
    """Model-parallel ids of one batch: the result of the input dist, for lookup and update."""

    received: IdsBuffer
    sorted: SortedIds | None = None
    """Sorted ids, where this batch is for an update, and that or the making of rows takes such; else None."""
    replicated: ReplicatedIds | None = None
    """Ids of the local batch for the plan's replicated tables, where it has any."""
    picked: PickedIds | None = None
    """The ids of this rank's rows, where it has a part of any table's rows; lookup and sort then take these."""
    overflow: Tensor | None = None
    """The ranks' agreement on this batch, see Overflows; where ids are for an update, and the plan splits rows, or rows
    are made when they are first named."""
    placed: PlacedIds | None = None
    """Places of the rows where they have such, which lookup and update then take; else None."""

    @property
    def ids(self) -> Tensor:
        """int32 [part][T][G, hot], flat; rows of their table."""
        return self.received.own
