"""The exchange of pooled vectors: to the ranks of their samples, and their gradients back to the tables.

Shapes are those of StaticEBC. Columns of the interaction's input, [B, num_features * dim], are in table order; a rank's
pooled columns are in the order of its shards.
"""

from typing import Protocol

import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.all_to_all import AllToAlls
from dlrm_bench.dlrm.tables.plan.plan import Plan
from dlrm_bench.dlrm.tables.pooled.tbe import FixedTBE
from dlrm_bench.dlrm.tables.pooled.ways import Collectives, InPeerMemory, Layout, OverNodes
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.kernels.embedding.pooled_lookup import LookupTable, PooledTable, pooled_lookup
from dlrm_bench.kernels.embedding.push_columns import PushTable, push_columns
from dlrm_bench.kernels.embedding.regroup import (
    RegroupSumTable,
    RegroupTable,
    Run,
    regroup_backward,
    regroup_forward,
    regroup_sum,
)


class PooledExchange(Protocol):
    """Embedding forward and backward without the tables' update. Methods launch on the current stream."""

    gradients: Tensor
    """Gradients of the pooled vectors of this rank's shards: [part, G, T * C], G of a part."""

    def lookup(self, ids: Tensor, part: int) -> Tensor | None:
        """Looks up a part; returns the argument for `forward`. ids: as for FixedTBE.lookup."""

    def forward(self, pooled: Tensor | None, out: Tensor, part: int) -> None:
        """Sends the pooled vectors of a part to the ranks of their samples, into `out`, the part's rows. Collective."""

    def backward(self, grad: Tensor, part: int) -> None:
        """Sends the gradient of `out` to the ranks of the tables, into the part's `gradients`. Collective."""


class CollectiveExchange:
    """An exchange by FBGEMM's lookup and an all-to-all each way."""

    def __init__(self, layout: Layout, tbe: FixedTBE, way: Collectives | OverNodes, autograd: bool) -> None:
        """Collective. autograd: whether `lookup` builds an autograd graph, whose backward updates the tables."""
        plan, ranks, shape = layout.plan, layout.ranks, layout.shape
        self._tbe, self._autograd, self._dtype, batch_size = tbe, autograd, shape.dtype, shape.part_samples
        widths, runs = _columns(layout.tables, plan)
        own, world_size, dtype, parts = widths[ranks.rank], ranks.world_size, shape.dtype, range(shape.parts)
        barriers = way.barriers if isinstance(way, OverNodes) else None
        make = AllToAlls(ranks, way.memory if isinstance(way, OverNodes) else None).make
        forward, backward = (barriers.pooled, barriers.gradients) if barriers else ([None] * shape.parts,) * 2
        self._forward = [make(forward[p], lambda s, _: batch_size * widths[s], dtype) for p in parts]
        self._backward = [make(backward[p], lambda _, d: batch_size * widths[d], dtype) for p in parts]
        self._regroup = RegroupTable(batch_size, widths, runs, ranks.device)
        self._regroup_sum = RegroupSumTable(batch_size, widths, runs, ranks.device) if layout.in_row_parts else None
        self.gradients = torch.zeros(shape.parts, world_size * batch_size, own, dtype=shape.dtype, device=ranks.device)

    def lookup(self, ids: Tensor, part: int) -> Tensor:
        """Returns the pooled vectors of a part of the global batch, [G, T * C]."""
        with torch.set_grad_enabled(self._autograd):
            return self._tbe.lookup(ids, part)

    def forward(self, pooled: Tensor | None, out: Tensor, part: int) -> None:
        """Exchanges [rank s][B, T_s * C_s], and regroups into `out`, of any row stride; sums the pooled vectors of row
        parts of a table there. Collective."""
        assert pooled is not None
        received = torch.empty(self._regroup.flat_size, dtype=self._dtype, device=out.device)
        self._forward[part].exchange(received, pooled.detach().view(-1))
        if self._regroup_sum is not None:
            regroup_sum(received, self._regroup_sum, out)
        else:
            regroup_forward(received, self._regroup, out)

    def backward(self, grad: Tensor, part: int) -> None:
        """Regroups and exchanges. Collective."""
        sent = torch.empty(self._regroup.flat_size, dtype=self._dtype, device=grad.device)
        regroup_backward(grad, self._regroup, sent)
        self._backward[part].exchange(self.gradients[part].view(-1), sent)


class PeerExchange:
    """An exchange by kernels that write to the reader's memory: a lookup that writes to the other ranks' interaction
    inputs, and one copy of gradients to the other ranks.

    The barriers `pooled` and `gradients` of a part, which `forward` and `backward` launch, must come after all ranks'
    writes of the part and before its reads. The caller launches another barrier of all ranks between the last read of
    a part's inputs and the next lookup, and one between the last read of its gradients and the next `backward`.
    """

    def __init__(self, layout: Layout, tbe: FixedTBE, way: InPeerMemory) -> None:
        """Collective."""
        tables, plan, ranks, shape = layout.tables, layout.plan, layout.ranks, layout.shape
        parts, batch_size = shape.parts, shape.part_samples
        self._tbe, self._way, self._batch_size = tbe, way, batch_size
        dim, world_size = tables.columns, ranks.world_size
        looked_up = [
            PooledTable(
                tables.hot[shard.table],
                0 if tbe.by_places else first_row,  # places do not belong to a table
                way.first_column + shard.table * dim + shard.column,
            )
            for shard, first_row in zip(plan.of_rank(ranks.rank), tbe.first_row, strict=True)
        ]
        self._table = LookupTable(looked_up, batch_size, world_size, ranks.device)
        widths, runs = _columns(tables, plan)
        global_batch, own = world_size * batch_size, widths[ranks.rank]
        rows_before = [part * global_batch + ranks.rank * batch_size for part in range(parts)]
        self._push = [
            PushTable(batch_size, widths, [rows * width for width in widths], runs, ranks.device)
            for rows in rows_before
        ]
        # The same size on all ranks; a rank with fewer columns leaves some unused.
        self._received = way.memory.zeros(parts * global_batch * max(widths), dtype=way.inputs.own.dtype)
        self.gradients = self._received.own[: parts * global_batch * own].view(parts, global_batch, own)

    def lookup(self, ids: Tensor, part: int) -> None:
        """Writes a part's pooled vectors to all ranks."""
        tbe, first_row = self._tbe, part * self._batch_size
        pooled_lookup(tbe.weights, tbe.of_part(ids, part), self._table, self._way.inputs, first_row, tbe.host)

    def forward(self, pooled: Tensor | None, out: Tensor, part: int) -> None:
        """Waits for the other ranks' writes."""
        self._way.memory.barrier(self._way.barriers.pooled[part])

    def backward(self, grad: Tensor, part: int) -> None:
        """Writes the gradients to all ranks, and waits for the other ranks' gradients."""
        push_columns(grad, self._push[part], self._received)
        self._way.memory.barrier(self._way.barriers.gradients[part])


def _columns(tables: Tables, plan: Plan) -> tuple[list[int], list[Run]]:
    """Returns the number of pooled columns of each rank, and their positions among the columns of all tables; a run's
    block is the rank."""
    widths, runs = [], []
    for rank in range(plan.world_size):
        column = 0
        for shard in plan.of_rank(rank):
            runs.append(Run(rank, column, shard.table * tables.columns + shard.column, shard.columns))
            column += shard.columns
        widths.append(column)
    return widths, runs
