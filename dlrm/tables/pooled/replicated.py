"""Tables so small that every rank holds them whole: data-parallel, like dense weights.

A pooled vector of a tiny table costs the all-to-all as much as one of a large table. If the table is replicated, its
lookup is local, and its gradient, a few thousand rows, is summed over the ranks and applied to all rows: rows that no
id named have a zero gradient, which leaves them unchanged under Adagrad. Under other optimizers no table is replicated.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.optimizers import Adagrad
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.pooled.tbe import FixedTBE, TBEShape
from dlrm_bench.dlrm.tables.pooled.ways import Layout
from dlrm_bench.kernels.dense.flat_adagrad import flat_adagrad
from dlrm_bench.kernels.embedding.regroup import RegroupTable, Run, regroup_backward, regroup_forward
from dlrm_bench.kernels.embedding.row_sums import row_starts, row_sums
from dlrm_bench.kernels.input_dist.gather_segments import Segment, SegmentTable, gather_segments
from dlrm_bench.kernels.non_finite import Watch


@dataclass(slots=True)
class ReplicatedIds:
    """Ids of the local batch for the replicated tables, [table][B, hot] flat and in ascending order; all int32."""

    ids: Tensor
    sorted_ids: Tensor
    sorted_bags: Tensor
    starts: Tensor
    """[rows + 1]: offsets of each row's ids among the sorted ones."""


class ReplicatedTables:
    """Lookup, gradient and update of the replicated tables of one rank."""

    def __init__(self, layout: Layout, optimizer: Adagrad, learning_rate: Tensor, seed: int) -> None:
        """Collective. layout: its plan names these tables; its parts do not matter, because lookup and update are
        local. learning_rate: fp32 [1] on the device; every update reads it."""
        tables, ranks, shape, replicated = layout.tables, layout.ranks, layout.shape, layout.plan.replicated
        batch_size = shape.samples
        self._tables, self._eps, self._rate = replicated, optimizer.eps, learning_rate
        dim = tables.columns
        rows = self._rows = [tables.rows[table] for table in replicated]
        hot = [tables.hot[table] for table in replicated]
        tbe_shape = TBEShape(rows=tuple(rows), hot=tuple(hot), columns=dim, samples=batch_size, dtype=shape.dtype)
        self._tbe = FixedTBE(tbe_shape, optimizer, float(learning_rate), ranks.device, sorted_updates=True)
        for table, part in self.parts().items():
            fill_initial_weights(part[0], seed=seed, table=table, num_embeddings=tables.rows[table])
        self._grad = torch.zeros_like(self._tbe.weights)
        self._group = ranks.new_group()
        start, segments = 0, []
        for table, size in zip(replicated, hot, strict=True):
            before = batch_size * sum(tables.hot[:table])
            segments.append(Segment(before, start, batch_size * size))
            start += batch_size * size
        self._segments = SegmentTable(segments, ranks.device)
        runs = [Run(0, position * dim, table * dim, dim) for position, table in enumerate(replicated)]
        self._regroup = RegroupTable(batch_size, [len(replicated) * dim], runs, ranks.device)

    def parts(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Returns weights and Adagrad state of each table, fp32 [rows, dim] views."""
        return {
            table: (self._tbe.weights[start : start + rows], self._tbe.state[start : start + rows])
            for table, start, rows in zip(self._tables, self._tbe.first_row, self._rows, strict=True)
        }

    def empty_ids(self) -> ReplicatedIds:
        """Returns memory for one batch's ids, all zero."""
        ids = torch.zeros(self._tbe.num_ids, dtype=torch.int32, device=self._grad.device)
        return ReplicatedIds(ids, ids.clone(), ids.clone(), ids.new_zeros(len(self._grad) + 1))

    def input_dist(self, ids: Tensor, out: ReplicatedIds) -> None:
        """Picks out and sorts these tables' ids. ids: the flat ids of one Batch, on the device."""
        gather_segments(ids, self._segments, out.ids)
        self._tbe.sort(out.ids, out.sorted_ids, out.sorted_bags)
        out.starts.copy_(row_starts(out.sorted_ids, len(self._grad)))

    def lookup(self, ids: ReplicatedIds, out: Tensor) -> None:
        """Writes pooled vectors into these tables' columns of `out`, [B, num_features * dim]."""
        with torch.no_grad():
            regroup_forward(self._tbe.lookup(ids.ids).view(-1), self._regroup, out)

    def update(self, ids: ReplicatedIds, grad: Tensor, watch: Watch | None = None) -> None:
        """Updates by exact Adagrad, identically on all ranks. grad: [B, num_features * dim]. watch: a LossGuard's; if
        a flag is raised, nothing changes. Collective."""
        flat = torch.empty(self._regroup.flat_size, dtype=grad.dtype, device=grad.device)
        regroup_backward(grad, self._regroup, flat)
        row_sums(flat.view(-1, self._grad.shape[1]), ids.sorted_bags, ids.starts, self._grad)
        dist.all_reduce(self._grad, group=self._group)
        tables = (self._tbe.weights.view(-1), self._tbe.state.view(-1), self._grad.view(-1))
        flat_adagrad(*tables, self._rate, self._eps, watch=watch)
