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
    """The places of one batch's rows in two tiers of memory."""

    lookup: Tensor
    """int32, in the order of the ids."""
    sorted: Tensor | None
    """int32, in the order of the sorted ids; equal rows are runs of equal places."""


@dataclass(slots=True)
class DistributedIds:
    """Model-parallel ids of one batch: the result of the input dist, for lookup and update."""

    received: IdsBuffer
    sorted: SortedIds | None = None
    """Sorted ids, where the table update takes such and this batch is for an update; else None."""
    replicated: ReplicatedIds | None = None
    """Ids of the local batch for the plan's replicated tables, where it has any."""
    picked: PickedIds | None = None
    """The ids of this rank's rows, where it has a part of any table's rows; lookup and sort then take these."""
    overflow: Tensor | None = None
    """The ranks' agreement on this batch, see Overflows; where the plan splits rows, and ids are for an update."""
    placed: PlacedIds | None = None
    """Places of the rows that are on two tiers, which lookup and update then take; else None."""

    @property
    def ids(self) -> Tensor:
        """int32 [part][T][G, hot], flat; rows of their table."""
        return self.received.own
