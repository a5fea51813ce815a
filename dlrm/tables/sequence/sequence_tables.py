"""Embedding tables with unpooled rows, each distinct row of a batch looked up once, in fixed shapes.

A batch has K places for ids, table after table; many ids repeat. No stage depends on the host, so that all stages can
be captured in a CUDA graph. For W ranks, lists of E entries and C columns:

    ids                 [K]         rows of their table, -1 in unused places
    keys                [K]         the rank that owns the row, and its number there; sorted, with the place of each
    distinct rows       [W, E]      of each owner, in ascending order, -1 after the last; an all-to-all of them
    received            [W, E]      rows of this rank that each rank requests; also sorted, for the update
    rows                [W, E, C]   read by their owner; an all-to-all of them
    out                 [K, C]      each place's, from the entry of its distinct row
    gradients           [K, C]
    sums                [W, E, C]   of the places of each distinct row; an all-to-all of them
    update              row-wise Adagrad of each row that any rank requested, by the sum over ranks

A single rank reads and updates its rows directly by keys, without lists. A batch overflows if, on any rank, it has more
distinct rows of one owner than a list takes: see `eager_rows`.

An owner has all of its rows in memory, or only rows that batches have named (dynamic/). In the second case stage 1
looks up the received row numbers in a map, once they are sorted, and makes the new rows. Sums keep their order, so that
both cases train bit-identically.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_bench.dlrm.optimizers import RowWiseAdagrad
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import DynamicRows
from dlrm_bench.dlrm.tables.overflows import Overflows
from dlrm_bench.dlrm.tables.row_numbers import RowNumbers
from dlrm_bench.dlrm.tables.sequence.capacity import IdCapacity
from dlrm_bench.dlrm.tables.sequence.owned_rows import OwnedRows, TableShard
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.kernels.embedding.distinct_rows import DistinctRows, distinct_rows, owner_keys
from dlrm_bench.kernels.embedding.distinct_sums import distinct_sums
from dlrm_bench.kernels.embedding.gather_rows import gather_rows
from dlrm_bench.kernels.embedding.id_map import Keys
from dlrm_bench.kernels.embedding.row_wise_adagrad import row_wise_adagrad
from dlrm_bench.kernels.input_dist.sort_ids import SortTable, sort_ids
from dlrm_bench.kernels.non_finite import Watch


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in ascending order, -1 of unused places first."""

    rows: Tensor
    """int32 [N]."""
    places: Tensor
    """int32 [N]: position of each row before the sort."""


@dataclass(frozen=True, slots=True)
class ExchangedRows:
    """The exchange of one batch's rows between ranks."""

    distinct: DistinctRows
    """The rows that this rank requests."""
    received: Tensor
    """int32 [W, E]: the rows of this rank that each rank requests; -1 after the last row of each list."""
    owned: SortedRows | None
    """`received` in ascending order, for the update; None for evaluation."""

    @property
    def entries(self) -> int:
        """Entries of one owner's list: E."""
        return self.received.shape[1]


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The places of one batch's dynamic rows at their owner; -1 for a row without a place."""

    read: Tensor
    """int32: places of the rows that the lookup reads, in its order; on a single rank, in the order of sorted keys."""
    updated: Tensor | None
    """int32: places of the rows that the update writes; None for evaluation, which makes no rows either."""


@dataclass(frozen=True, slots=True)
class DistributedRows:
    """The ids of one batch in flight: the output of stage 1, for lookup and update."""

    sorted: SortedRows
    """Sorted keys, see owner_keys; on a single rank, its row numbers."""
    exchanged: ExchangedRows | None
    """The exchange between ranks; None for a single rank."""
    placed: PlacedRows | None = None
    """Places of dynamic rows; None if the owner has all rows in memory."""
    excess: Tensor | None = None
    """int32 [1] on the host: the value that ranks agree on for this batch, see Overflows; None without agreement."""


class SequenceTables:
    """The embedding stages of one rank. Methods launch work and do not wait for it, except `eager_rows`.

    Stages 2 and 4 run one after another, for whichever batch; stage 1 of the next batch may run beside them.
    """

    def __init__(
        self,
        tables: Tables,
        capacity: IdCapacity,
        ranks: Ranks,
        optimizer: RowWiseAdagrad,
        rate: Tensor,
        seed: int,
        exchange: torch.dtype = torch.float32,
        dynamic: DynamicRows | None = None,
    ) -> None:
        """rate: learning rate, fp32 [1] on the device, which every update reads. exchange: number format of rows and
        gradient sums between ranks. dynamic: this rank's dynamic rows, of the same tables and seed; None: all rows are
        in memory. ValueError if the tables have too many rows. Collective: makes process groups."""
        assert tables.columns & (tables.columns - 1) == 0, "checked with the configuration"
        assert not tables.raw_ids, "no model of sequences has raw ids"
        self.tables, self._rate, self._eps, self._dtype = tables, rate, optimizer.eps, exchange
        self._ranks, self._device = ranks.world_size, ranks.device
        self.dynamic = dynamic
        self._numbers = RowNumbers.of_parts(tables, ranks)
        self._owned: OwnedRows | DynamicRows = dynamic or OwnedRows(tables, ranks, seed)
        self._ids_group = self._rows_group = None
        self._overflows: Overflows | None = None
        if self._ranks > 1:
            self._ids_group, self._rows_group = ranks.new_group(), ranks.new_group()
        if self._ranks > 1 or dynamic is not None:
            self._overflows = Overflows(ranks)
        self._set_capacity(capacity)

    def sized(self, capacity: IdCapacity) -> "SequenceTables":
        """Returns the same tables, in the same memory, for batches of another capacity."""
        other = copy.copy(self)
        other._set_capacity(capacity)
        return other

    def _set_capacity(self, capacity: IdCapacity) -> None:
        assert len(capacity.places) == self.tables.count, "places of each table"
        self.capacity = capacity
        places = torch.tensor(capacity.places)
        first_rows = torch.tensor(self._numbers.first_rows, dtype=torch.int32).repeat_interleave(places)
        self._first_rows = first_rows.to(self._device)
        self._keys = torch.empty_like(self._first_rows)
        """Keys of the batch that is being distributed."""
        self._sort = self._sort_table(capacity.count, self._ranks * self._numbers.count)
        self._entries = capacity.list_entries(self._ranks) if self._ranks > 1 else 0
        self._sort_owned: SortTable | None = None
        """Sort of lists of `_entries`."""
        self._lists: tuple[Tensor, Tensor] | None = None

    def _sort_table(self, count: int, rows: int) -> SortTable:
        places = torch.arange(count, dtype=torch.int32, device=self._device)
        return SortTable(torch.zeros_like(places), places, rows)

    def empty_ids(self, updates: bool = True) -> DistributedRows:
        """Returns memory for one batch's ids, initially empty.

        updates: whether the ids are also for an update; `backward` takes only such ids.
        """
        unused = torch.full((self.capacity.count,), -1, dtype=torch.int32, device=self._device)
        ordered = SortedRows(unused, torch.arange(self.capacity.count, dtype=torch.int32, device=self._device))
        exchanged, excess = None, None
        if self._ranks > 1:
            self._lists = self._lists or self._empty_lists(self._entries)
            if updates and self._sort_owned is None:
                self._sort_owned = self._sort_table(self._ranks * self._entries, self._numbers.count)
            exchanged = self._empty_exchanged(self._entries, updates)
        placed = self._empty_placed(self._ranks * self._entries or self.capacity.count, updates)
        if self._overflows is not None and (exchanged is not None or updates):
            excess = self._overflows.empty()
        return DistributedRows(ordered, exchanged, placed, excess)

    def _empty_placed(self, count: int, updates: bool) -> PlacedRows | None:
        """count: rows that the lookup reads."""
        if self.dynamic is None:
            return None
        read = torch.full((count,), -1, dtype=torch.int32, device=self._device)
        if not updates:
            return PlacedRows(read, None)
        return PlacedRows(read, read if self._ranks == 1 else read.clone())

    def _empty_exchanged(self, entries: int, updates: bool) -> ExchangedRows:
        slots = torch.full((self.capacity.count,), -1, dtype=torch.int32, device=self._device)
        lists = torch.full((4, self._ranks, entries), -1, dtype=torch.int32, device=self._device)
        distinct = DistinctRows(lists[0], slots, torch.zeros(1, dtype=torch.int32, device=self._device))
        owned = SortedRows(lists[2].view(-1), lists[3].view(-1)) if updates else None
        return ExchangedRows(distinct, lists[1], owned)

    def _empty_lists(self, entries: int) -> tuple[Tensor, Tensor]:
        """Returns the buffers of the exchanges in stages 2 and 4: the row owner's buffer and the requesting rank's
        buffer."""
        lists = torch.zeros(2, self._ranks * entries, self.tables.columns, dtype=self._dtype, device=self._device)
        return lists[0], lists[1]

    # Stage 1

    def expect(self, rows: DistributedRows) -> None:
        """Announces an input dist into `rows` before it is launched or replayed, so that `eager_rows` waits for it."""
        if self._overflows is not None and rows.excess is not None:
            self._overflows.reset(rows.excess)

    def input_dist(self, ids: Tensor, into: DistributedRows, is_new: Tensor | None = None) -> None:
        """Sends the numbers of the batch's distinct rows to their owners, which make new rows unless the batch is for
        evaluation. Collective.

        ids: int32 [K], rows of their table (not checked), -1 in unused places. into: from `empty_ids`. is_new: int32
        [1] on the device, 0 for a batch that is distributed again; None means 1.
        """
        count = self._numbers.count
        owner_keys(ids, self._first_rows, self._ranks, count, self._keys)
        sort_ids(self._keys, self._sort, into.sorted.rows, into.sorted.places)
        if into.exchanged is not None:
            self._exchange_ids(into.sorted, into.exchanged)
        if self.dynamic is not None and into.placed is not None and into.placed.updated is not None:
            self.dynamic.map.next_batch(is_new)
        self._agree(into, self._place(into))

    def _agree(self, rows: DistributedRows, lacking: Tensor | None) -> None:
        """Launches the all-reduce of a batch's excess, which all ranks need. lacking: the result of `_place`."""
        if self._overflows is None or rows.excess is None:
            return
        excess = None
        if rows.exchanged is not None:
            excess = rows.exchanged.distinct.longest - rows.exchanged.entries
        if lacking is not None:
            excess = lacking if excess is None else torch.maximum(excess, lacking)
        self._overflows.exchange(excess, rows.excess)

    def _place(self, rows: DistributedRows) -> Tensor | None:
        """Finds the places of a batch's rows at their owner, and makes rows that are new where they are to be updated.
        Returns what DynamicRows.place does; None where every row has a place."""
        if self.dynamic is None or rows.placed is None:
            return None
        placed, exchanged = rows.placed, rows.exchanged
        if placed.updated is None:
            self.dynamic.map.find(Keys(self._read_of(rows)), placed.read)
            return None
        if exchanged is None:
            return self.dynamic.place(Keys(rows.sorted.rows), placed.updated)
        assert exchanged.owned is not None, "rows that are updated are sorted"
        lacking = self.dynamic.place(Keys(exchanged.owned.rows), placed.updated)
        placed.read.index_copy_(0, exchanged.owned.places.long(), placed.updated)
        return lacking

    @staticmethod
    def _read_of(rows: DistributedRows) -> Tensor:
        """Returns the owner's numbers of the rows that the lookup reads, in its order."""
        return rows.sorted.rows if rows.exchanged is None else rows.exchanged.received.view(-1)

    def _exchange_ids(self, ordered: SortedRows, out: ExchangedRows) -> None:
        distinct_rows(ordered.rows, self._numbers.count, out.distinct)
        dist.all_to_all_single(out.received, out.distinct.rows, group=self._ids_group)
        if out.owned is not None:
            sort_ids(out.received.view(-1), self._sort_of(out), out.owned.rows, out.owned.places)

    def _sort_of(self, exchanged: ExchangedRows) -> SortTable:
        if self._sort_owned is None or exchanged.entries != self._entries:  # of one batch that overflowed
            return self._sort_table(exchanged.received.numel(), self._numbers.count)
        return self._sort_owned

    def eager_rows(self, rows: DistributedRows) -> DistributedRows | None:
        """Returns, after a batch's input dist, longer lists that all ranks use eagerly instead of `rows` if a list
        overflows on any rank; None, on all ranks, if no list overflows. Collective. ValueError, on all ranks, if any
        rank has no place for the batch's new rows; the batch has not been trained on then.

        The lists of all ranks then have the length of the longest one, so that results do not depend on the capacity.
        The host waits for the device. RuntimeError if the device has failed.
        """
        if self._overflows is None or rows.excess is None:
            return None
        excess = self._overflows.largest(rows.excess)
        if self.dynamic is not None:
            self.dynamic.check_places(excess)
        usual = rows.exchanged
        if excess <= 0 or usual is None:
            return None
        updates, entries = usual.owned is not None, usual.entries + excess
        placed = self._empty_placed(self._ranks * entries, updates)
        longer = replace(rows, exchanged=self._empty_exchanged(entries, updates), placed=placed)
        assert longer.exchanged is not None
        self._exchange_ids(rows.sorted, longer.exchanged)
        lacking = self._place(longer)
        if self.dynamic is not None and lacking is not None:
            self._overflows.reset(rows.excess)
            self._agree(longer, lacking)
            self.dynamic.check_places(self._overflows.largest(rows.excess))
        return longer

    # Stage 2

    def forward(self, rows: DistributedRows, out: Tensor) -> None:
        """Writes each place's row to `out`, and zeros to unused places. Collective.

        out: fp32, bf16 or fp16 [K, columns].
        """
        if rows.exchanged is None:
            self._read(rows, out, rows.sorted.places)
            return
        owned, asked = self._lists_of(rows.exchanged)
        self._read(rows, owned, None)
        dist.all_to_all_single(asked, owned, group=self._rows_group)
        gather_rows(asked, rows.exchanged.distinct.slots, out, rows.sorted.places)

    def _read(self, rows: DistributedRows, out: Tensor, places: Tensor | None) -> None:
        """Reads a batch's rows from this owner's memory, see gather_rows."""
        read = self._read_of(rows) if rows.placed is None else rows.placed.read
        gather_rows(self._owned.weights, read, out, places)
        if self.dynamic is not None and rows.placed is not None and rows.placed.updated is None:
            targets = torch.arange(len(read), dtype=torch.int32, device=self._device) if places is None else places
            self.dynamic.write_unnamed(Keys(self._read_of(rows)), read, out, targets)

    def _lists_of(self, exchanged: ExchangedRows) -> tuple[Tensor, Tensor]:
        if self._lists is None or exchanged.entries != self._entries:
            return self._empty_lists(exchanged.entries)
        return self._lists

    # Stage 4

    def backward(self, rows: DistributedRows, gradients: Tensor, watch: Watch | None = None) -> None:
        """Updates each row that any rank's batch names by the mean over ranks of the row's gradient; on each rank, the
        gradient is the sum over the row's places. Collective.

        gradients: fp32, bf16 or fp16 [K, columns]; gradients of unused places are ignored. watch: a LossGuard's; if a
        flag is raised, no weight or state changes.
        """
        places, update = gradients, rows.sorted
        if rows.exchanged is not None:
            assert rows.exchanged.owned is not None, "ids of an evaluation update nothing"
            owned, asked = self._lists_of(rows.exchanged)
            distinct_sums(gradients, rows.exchanged.distinct.slots, rows.sorted.places, asked)
            dist.all_to_all_single(owned, asked, group=self._rows_group)
            places, update = owned, rows.exchanged.owned
        named = update.rows if rows.placed is None else rows.placed.updated
        assert named is not None, "ids of an evaluation update nothing"
        row_wise_adagrad(
            self._owned.weights,
            self._owned.state,
            places,
            named,
            update.places,
            self._rate,
            self._eps,
            1 / self._ranks,
            watch,
        )

    # State

    def table_shards(self) -> Iterator[TableShard]:
        """Yields this rank's part of each table, in order, as views of weights and optimizer state. Requires all rows
        in memory."""
        assert isinstance(self._owned, OwnedRows), "dynamic rows have no order"
        return self._owned.shards()

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """All weights and optimizer state of this rank, fp32 [R, columns] and [R, 1]."""
        return self._owned.weights, self._owned.state

    def unchanged(self, rows: int) -> AbstractContextManager[None]:
        """Restores all rows bit for bit after the body, which trains only on the first `rows` rows of this rank's part
        of each table. The body ends after its training has ended."""
        return self._owned.unchanged(rows)
