"""A sharded embedding-bag collection of fixed shapes, straight on FBGEMM's table-batched embeddings (TBE).

Local batch, multi-hot sizes and plan are constants, and therefore every split, offset and layout: no part of an
iteration depends on the host, and all of it can be captured in a CUDA graph. One rank's ids and vectors, for W ranks, B
local samples, G = W * B, and the rank's T shards of C columns each:

    local ids      [feature][B, hot]            as a Batch has them
    sent           [rank][its shards][B, hot]   one all-to-all with constant splits
    received       [rank][T][B, hot]
    looked up      [T][G, hot]                  TBE's order: by table, then by sample of the global batch
    pooled         [G, T * C]                   rows r * B .. (r + 1) * B belong to rank r: the all-to-all sends as is
    output         [rank s][B, T_s * C_s]       regrouped into the columns of the interaction input

A rank that holds part of a table's rows picks its ids out of `looked up`, see row_parts.py, and its pooled vectors are
summands of the output. Batches with too many ids for its lists run eagerly, on all ranks.

If rows have places, on two tiers of memory or created when first named (placed_rows.py), lookup and update use places
instead of rows.

With peer memory, the ids of local samples are written straight to the memory where they are looked up, on all ranks,
and the lookup itself writes `output`, of all ranks: neither ids nor pooled vectors have an intermediate buffer.

Pooled vectors and their gradients can be exchanged in several parts, equal ranges of each rank's local samples, so that
one part's exchange overlaps with other work on another. From `looked up` on, the table above then describes one part,
with B its local samples; ids and gradients of the parts follow one another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlrm_bench.dlrm.optimizers import Adagrad, TableOptimizer
from dlrm_bench.dlrm.tables.dynamic.memory import RowPlaces
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.overflows import Overflows
from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.pooled import placed_rows
from dlrm_bench.dlrm.tables.pooled.distributed_ids import DistributedIds, SortedIds
from dlrm_bench.dlrm.tables.pooled.ids_exchange import ids_exchange
from dlrm_bench.dlrm.tables.pooled.pooled_exchange import CollectiveExchange, PeerExchange, PooledExchange
from dlrm_bench.dlrm.tables.pooled.replicated import ReplicatedTables
from dlrm_bench.dlrm.tables.pooled.row_parts import RowParts
from dlrm_bench.dlrm.tables.pooled.shared_sort import SharedSort, sorts_are_shared
from dlrm_bench.dlrm.tables.pooled.tbe import FixedTBE, TBEShape
from dlrm_bench.dlrm.tables.pooled.ways import InPeerMemory, Layout, Way
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory
from dlrm_bench.dlrm.tables.tiers.tiered_rows import StoredRows
from dlrm_bench.kernels.embedding.sorted_adagrad import sorted_adagrad
from dlrm_bench.kernels.input_dist.sort_ids import sort_rows
from dlrm_bench.kernels.non_finite import Watch, clear_gradients


@dataclass(frozen=True, slots=True)
class TableShard:
    """A view of one shard's memory."""

    shard: Shard
    weights: Tensor | StoredRows
    """fp32 [rows of the shard, columns]."""
    state: Tensor | StoredRows
    """fp32, Adagrad's sum of squared gradients: [rows, columns], or row-wise [rows, 1]; for SGD [rows, 0]."""


@dataclass(frozen=True, slots=True)
class TableUpdates:
    """The update of a rank's tables."""

    optimizer: TableOptimizer
    learning_rate: Tensor
    """fp32 [1] on the device; our updates read it. FBGEMM's update has a copy, see `set_learning_rate`."""
    presort: bool
    """Whether ids are sorted after the input dist and tables updated from sorted ids, with exact Adagrad only;
    otherwise FBGEMM's fused backward sorts and updates."""


class StaticEBC:
    """The embedding stages of one rank. Its methods launch work and do not wait for it."""

    def __init__(
        self, layout: Layout, updates: TableUpdates, way: Way, seed: int, memory: TableMemory | RowPlaces | None = None
    ) -> None:
        """Collective: makes the process groups of its all-to-alls. memory: the device's part of the sharded tables, or
        places for named rows; None: all rows are on the device. ValueError, on every rank, if `memory` is too small or
        cannot be allocated on any rank.

        Replicated tables and sorted updates need exact Adagrad. Several parts need sorted updates, because FBGEMM's
        backward would update once for each part; so does peer memory on one node.
        """
        tables, plan, ranks, shape = layout.tables, layout.plan, layout.ranks, layout.shape
        optimizer, in_peer_memory = updates.optimizer, isinstance(way, InPeerMemory)
        exact = isinstance(optimizer, Adagrad)
        assert exact or not (updates.presort or plan.replicated), "presort and replicated tables: exact Adagrad only"
        assert updates.presort or (shape.parts == 1 and not in_peer_memory)
        assert not layout.in_row_parts or (updates.presort and not in_peer_memory), (
            "row parts: need sorted updates and collectives"
        )
        if isinstance(way, InPeerMemory):
            samples, columns = way.inputs.own.shape
            assert samples == shape.samples
            assert columns >= way.first_column + tables.count * tables.columns, "inputs take all pooled vectors"
            assert way.inputs.own.dtype == shape.dtype, "inputs: in the dtype of pooled vectors"
        self.tables, self.plan, self.shape = tables, plan, shape
        self.device, self.presort = ranks.device, updates.presort
        self._rate = updates.learning_rate
        self._eps = optimizer.eps if isinstance(optimizer, Adagrad) else 0.0
        self.shards = plan.of_rank(ranks.rank)
        self.columns = self.shards[0].columns
        self._rank, self._part_samples = ranks.rank, shape.part_samples * ranks.world_size
        self._row_parts: RowParts | None = None
        if any(shard.row_parts > 1 for shard in self.shards):
            self._row_parts = RowParts(tables, self.shards, ranks.world_size, shape, ranks.device)
        places = memory if isinstance(memory, RowPlaces) else None
        self._overflows = Overflows(ranks) if layout.in_row_parts or places is not None else None
        tbe_shape = TBEShape(
            rows=tuple(shard.rows(tables) for shard in self.shards),
            hot=tuple(tables.hot[shard.table] for shard in self.shards),
            columns=self.columns,
            samples=self._part_samples,
            dtype=shape.dtype,
            parts=shape.parts,
            raw_ids=tables.raw_ids,
        )
        self._tiers = placed_rows.rows_on_tiers(layout, tbe_shape, memory) if isinstance(memory, TableMemory) else None
        rate = float(updates.learning_rate)
        rows = None if places is None else placed_rows.rows_in_memory(tbe_shape, places)
        of_tbe = (tbe_shape, optimizer, rate, ranks.device, updates.presort)
        self._tbe = FixedTBE(*of_tbe, fbgemm=not in_peer_memory, tiers=self._tiers, places=rows)
        self.dynamic = None if places is None else placed_rows.named_rows(layout, self._tbe, seed, places)
        """The rows of all tables, if they are created when first named; else None."""
        self._ids_exchange = ids_exchange(layout, way)
        self._shared_sort: SharedSort | None = None
        self._exchange: PooledExchange
        if isinstance(way, InPeerMemory):
            self._exchange = PeerExchange(layout, self._tbe, way)
            # Places are known long before the barrier that a shared sort needs.
            if sorts_are_shared(plan) and self._tiers is None:
                self._shared_sort = SharedSort(layout, self._tbe, way.memory)
        else:
            self._exchange = CollectiveExchange(layout, self._tbe, way, autograd=not updates.presort)
        self._replicated: ReplicatedTables | None = None
        self._fill(seed)
        if plan.replicated and isinstance(optimizer, Adagrad):
            self._replicated = ReplicatedTables(layout, optimizer, updates.learning_rate, seed)

    # Stage 1

    @property
    def agrees(self) -> bool:
        """Whether ranks must agree on each batch before it trains: any may have too many picked ids or too few
        places."""
        return self._overflows is not None

    def input_dist(self, ids: Tensor, out: DistributedIds) -> None:
        """Sends the ids of this rank's samples, and receives the ids of this rank's shards in `out`; `sort` follows.
        Collective.

        ids: the flat ids of one Batch, on the device: int32, or raw ids, int64. out: from `empty_ids`; with peer memory
        the other ranks write to it, see PeerIdsExchange.
        """
        self._ids_exchange.exchange(ids, out.received)
        if self._row_parts is not None and out.picked is not None:
            self._row_parts.pick(out.ids, out.picked)
        if self._replicated is not None and out.replicated is not None:
            self._replicated.input_dist(ids, out.replicated)

    def agree(self, ids: DistributedIds) -> None:
        """Tells all ranks, after the input dist and `bring_rows`, whether there are more picked ids than `ids` can
        hold, or rows without places, for `eager_ids`. Launches nothing unless `agrees`. Collective."""
        if self._overflows is not None and ids.overflow is not None:
            excess = ids.picked.excess if ids.picked is not None else None
            self._overflows.exchange(ids.placed.lacking if ids.placed is not None else excess, ids.overflow)

    def sort(self, ids: DistributedIds) -> None:
        """Fills `sorted`, if present, from `ids`, for the update; ranks that share the sort write to one another, see
        SharedSort. If rows are `dynamic`, it follows `bring_rows`, and sorts their places: the order of rows changes no
        bit of an update."""
        if ids.sorted is None:
            return
        if self._shared_sort is not None and ids.sorted.peers is not None:
            self._shared_sort.sort(ids.ids, ids.sorted.peers)
        elif ids.picked is not None:
            sort_rows(ids.picked.sort_rows, ids.picked.bags, ids.sorted.ids, ids.sorted.bags)
        else:
            rows = ids.ids if self.dynamic is None or ids.placed is None else ids.placed.lookup
            self._tbe.sort(rows, ids.sorted.ids, ids.sorted.bags)

    def empty_ids(self, sorts: bool = True) -> DistributedIds:
        """Returns memory for one batch's ids, all zero. Collective with peer memory.

        sorts: whether the ids are also for an update; otherwise lists of picked ids can hold any batch.
        """
        received = self._ids_exchange.empty()
        assert received.own.numel() == self._tbe.num_ids
        replicated = self._replicated.empty_ids() if self._replicated is not None else None
        ids = DistributedIds(received, replicated=replicated)
        if self._row_parts is not None:
            ids.picked = self._row_parts.empty(whole=not sorts)
        if self._overflows is not None and sorts:
            ids.overflow = self._overflows.empty()
        if sorts and self.presort:
            ids.sorted = self._empty_sorted(ids)
        if self._tbe.by_places:
            makes = sorts and self.dynamic is not None
            ids.placed = placed_rows.empty_placed(received.own, makes, ids.sorted is not None and self.in_tiers)
        return ids

    def _empty_sorted(self, ids: DistributedIds) -> SortedIds:
        if self._shared_sort is not None:
            peers = self._shared_sort.empty()
            return SortedIds(*self._shared_sort.views(peers), peers)
        size = ids.received.own if ids.picked is None else ids.picked.rows
        return SortedIds(torch.zeros_like(size, dtype=torch.int32), torch.zeros_like(size, dtype=torch.int32))

    def expect(self, ids: DistributedIds) -> None:
        """Announces an input dist into `ids` and its `agree`, before their launch: `eager_ids` waits for them."""
        if ids.picked is not None:
            ids.picked.reset()
        if self._overflows is not None and ids.overflow is not None:
            self._overflows.reset(ids.overflow)

    def eager_ids(self, ids: DistributedIds) -> DistributedIds | None:
        """Returns, after the input dist of a batch, the ids with which this rank runs the batch eagerly, as all ranks
        do; None, on all ranks, if no rank has more picked ids than its list can hold. ValueError, on all ranks, if any
        rank lacks places for rows that the batch names: nothing of the batch has trained then.

        On a rank whose list holds its picked ids, the result is `ids` itself. The host waits for the device only if
        `agrees`.
        """
        if self._overflows is None or ids.overflow is None:
            return None
        excess = self._overflows.largest(ids.overflow)
        if self.dynamic is not None:
            self.dynamic.check_places(excess)
        if excess <= 0:
            return None
        if self._row_parts is None or ids.picked is None or not ids.picked.overflows():
            return ids
        whole = replace(ids, picked=self._row_parts.empty(whole=True))
        whole.sorted = self._empty_sorted(whole)
        assert whole.picked is not None
        self._row_parts.pick(whole.ids, whole.picked)
        self.sort(whole)
        return whole

    @property
    def in_tiers(self) -> bool:
        """Whether rows are on two tiers of memory."""
        return self._tiers is not None

    def bring_rows(self, ids: DistributedIds, is_new: Tensor) -> None:
        """Assigns places to the rows of `ids`, and creates new rows, or moves to the device those that it can while the
        previous batch trains, after `sort`, see TieredRows; ids of an evaluation use rows where they are. Fills
        `placed`, if present.

        is_new: int32 [1] on the device, 0 for a batch that is distributed again.
        """
        if ids.placed is None:
            return
        if self.dynamic is not None:
            placed_rows.make_rows(self.dynamic, self._tbe.keys_of(ids.ids), ids.placed, is_new)
        if self._tiers is not None:
            placed_rows.bring_rows(self._tiers, self._tbe.rows_of(ids.ids), ids.sorted, ids.placed)

    def bring_late_rows(self, ids: DistributedIds) -> None:
        """Moves the remaining rows of `ids` to the device, after the previous batch's update and `bring_rows`."""
        if self._tiers is not None and ids.sorted is not None:
            self._tiers.bring_late()

    # Stage 2

    def place_unnamed(self, ids: DistributedIds) -> None:
        """Creates the rows of an evaluation that no batch has named, in separate memory, until the next evaluated
        batch. Launches nothing unless rows are `dynamic`."""
        if self.dynamic is not None and ids.placed is not None:
            self.dynamic.place_unnamed(self._tbe.keys_of(ids.ids), ids.placed.lookup)

    def lookup(self, ids: DistributedIds, part: int = 0) -> Tensor | None:
        """Looks up a part of the global batch; returns the argument for `output_dist`."""
        if ids.picked is not None:
            bags = len(self.shards) * self._part_samples
            return self._tbe.lookup_bags(ids.picked.rows, ids.picked.offsets[part * bags :][: bags + 1])
        return self._exchange.lookup(ids.ids if ids.placed is None else ids.placed.lookup, part)

    def output_dist(self, pooled: Tensor | None, out: Tensor, part: int = 0) -> None:
        """Sends the pooled vectors of a part to the ranks of their samples, into `out`: [B, num_features * dim], any
        row stride, in table order; with peer memory, exactly these rows of the interaction's input. Collective."""
        self._exchange.forward(pooled, out, part)

    def lookup_replicated(self, ids: DistributedIds, out: Tensor) -> None:
        """Writes the replicated tables' pooled vectors into their columns of `out`, shaped as for `output_dist`."""
        if self._replicated is not None and ids.replicated is not None:
            self._replicated.lookup(ids.replicated, out)

    # Stage 4

    @property
    def gradients(self) -> Tensor:
        """Memory for the gradients of all parts' pooled vectors, [part, G, T * C] in the shape's dtype."""
        return self._exchange.gradients

    def gradient_dist(self, grad: Tensor, part: int = 0) -> None:
        """Sends the gradient of a part's `out`, shaped like it, to the part's `gradients`. Collective."""
        self._exchange.backward(grad, part)

    def update(self, ids: DistributedIds, pooled: Tensor | None, watch: Watch | None = None) -> None:
        """Updates the rows that `ids` named by `gradients`. pooled: the result of `lookup` for the first part.

        watch: a LossGuard's; if a flag is raised, no weight or state changes.
        """
        if self.presort:
            assert ids.sorted is not None, "ids of an evaluation update nothing"
            found = None if ids.placed is None else ids.placed.sorted
            rows = ids.sorted.ids if found is None else found
            sorted_adagrad(
                self._tbe.weights,
                self._tbe.state,
                self.gradients.view(-1, self.columns),
                rows,
                ids.sorted.bags,
                self._rate,
                self._eps,
                watch,
                self._tbe.host,
            )
        else:
            assert pooled is not None
            if watch is not None:  # gradients of zero change nothing under any of the optimizers
                clear_gradients(watch, self.gradients)
            pooled.backward(self.gradients.view_as(pooled))

    def update_replicated(self, ids: DistributedIds, grad: Tensor, watch: Watch | None = None) -> None:
        """Updates the replicated tables by exact Adagrad. grad: of all parts' `out`. watch: as in `update`.
        Collective."""
        if self._replicated is not None and ids.replicated is not None:
            self._replicated.update(ids.replicated, grad, watch)

    # State

    def set_learning_rate(self, value: float) -> None:
        """Sets the rate of FBGEMM's update, which reads no tensor, starting with the next update; a graph keeps the
        rate of its capture."""
        self._tbe.set_learning_rate(value)

    def table_shards(self) -> Iterator[TableShard]:
        """Yields every shard of this rank, including replicated tables, with its weights and optimizer state, as views;
        none if rows are `dynamic`, because these have no order."""
        if self.dynamic is not None:
            return
        for shard, start in zip(self.shards, self._tbe.first_row, strict=True):
            rows = slice(start, start + shard.rows(self.tables))
            if self._tiers is not None:
                yield TableShard(shard, *self._tiers.of_table(start, rows.stop - start))
            else:
                yield TableShard(shard, self._tbe.weights[rows], self._tbe.state[rows])
        if self._replicated is not None:
            dim = self.tables.columns
            for table, (weights, state) in self._replicated.parts().items():
                yield TableShard(Shard(self._rank, table, 0, dim), weights, state)

    def memory(self) -> dict[str, Sequence[object]]:
        """Returns the memory of tables and optimizer state, and of the places of rows, by its name in the record."""
        if self.dynamic is not None:
            places = self.dynamic.map.memory()
            return {"tables": [self._tbe.weights], "optimizer_state": [self._tbe.state], "row_places": places}
        if self._tiers is None:
            shards = list(self.table_shards())
            return {"tables": [of.weights for of in shards], "optimizer_state": [of.state for of in shards]}
        replicated = self._replicated.parts().values() if self._replicated is not None else ()
        (device, host), of_rows = self._tiers.memory, self._tiers.placement.state
        rows = [device, *(tensor for of in replicated for tensor in of)]
        return {"table_rows": rows, "table_rows_in_host_memory": [host], "row_places": of_rows}

    def describe_tiers(self) -> dict[str, int | float] | None:
        """Returns this rank's tier data for the record; None without tiers. Waits for the device."""
        return None if self._tiers is None else self._tiers.describe()

    def forget_moves(self) -> None:
        """Sets the counters of `describe_tiers` to zero."""
        if self._tiers is not None:
            self._tiers.placement.forget()

    # Construction

    def _fill(self, seed: int) -> None:
        for part in self.table_shards():
            shard, weights = part.shard, part.weights
            numbers = {"seed": seed, "table": shard.table, "num_embeddings": self.tables.rows[shard.table]}
            if isinstance(weights, Tensor):
                offsets = {"row_offset": shard.row_part, "column_offset": shard.column, "row_step": shard.row_parts}
                fill_initial_weights(weights, **numbers, **offsets)
                continue
            for rows, piece in weights.pieces():
                values = torch.empty(piece.shape, device=self.device)
                fill_initial_weights(values, **numbers, row_offset=rows.start, column_offset=shard.column)
                piece.copy_(values)
