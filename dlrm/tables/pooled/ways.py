"""The ways in which a static EBC's ranks exchange ids, pooled vectors and gradients: values with all their inputs."""

from dataclasses import dataclass

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.runtime.peer_memory import Barrier, PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.plan import Plan
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.kernels.peer_tensors import PeerTensors


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that determines the shapes of an EBC's exchanges."""

    tables: Tables
    plan: Plan
    ranks: Ranks
    shape: BatchShape

    @property
    def in_row_parts(self) -> bool:
        """Whether any rank has part of any table's rows."""
        return any(shard.row_parts > 1 for shard in self.plan.shards)


@dataclass(frozen=True, slots=True)
class EmbeddingBarriers:
    """The barriers that peer-memory exchanges launch themselves, and the requirements on each."""

    ids: Barrier
    """Comes after every rank has written the ids of its samples to their owners, and before an owner reads them."""
    pooled: tuple[Barrier, ...]
    """One per part of the batch. Comes after every rank has written the part's pooled vectors, to the ranks of the
    samples or, over nodes, to the stage of the exchange between nodes, and before they are read."""
    gradients: tuple[Barrier, ...]
    """One per part of the batch. The same for the gradients of its pooled vectors, written to the owners of the
    tables."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """All-to-alls of NCCL or gloo between all ranks."""


@dataclass(frozen=True, slots=True)
class InPeerMemory:
    """One node, whose ranks write to the reader's memory."""

    memory: PeerMemory
    barriers: EmbeddingBarriers
    inputs: PeerTensors
    """The dense network's inputs on all ranks, [local batch, columns]."""
    first_column: int
    """Column of the first table's pooled vectors in `inputs`; those of the other tables follow in table order."""


@dataclass(frozen=True, slots=True)
class OverNodes:
    """Several nodes: writes to peer memory within each, collectives between ranks of equal local rank."""

    memory: PeerMemory
    barriers: EmbeddingBarriers


Way = Collectives | InPeerMemory | OverNodes
