"""Rows of a rank's pooled tables whose memory is not indexed by row number: rows on two tiers of memory (tiers/), or
created when first named (dynamic/). Lookup and update then use places."""

from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import DynamicRows
from dlrm_bench.dlrm.tables.dynamic.memory import RowPlaces
from dlrm_bench.dlrm.tables.pooled.distributed_ids import PlacedIds, SortedIds
from dlrm_bench.dlrm.tables.pooled.tbe import FixedTBE, TBEShape
from dlrm_bench.dlrm.tables.pooled.ways import Layout
from dlrm_bench.dlrm.tables.row_counts import read_counts
from dlrm_bench.dlrm.tables.row_numbers import RawIds, RowNumbers
from dlrm_bench.dlrm.tables.row_rates import assumed_rates
from dlrm_bench.dlrm.tables.tiers.placement import Pool
from dlrm_bench.dlrm.tables.tiers.table_memory import DeviceRows, TableMemory
from dlrm_bench.dlrm.tables.tiers.tiered_rows import TieredRows, check_host_memory
from dlrm_bench.kernels.embedding.id_map import Keys


def rows_on_tiers(layout: Layout, shape: TBEShape, memory: TableMemory) -> TieredRows:
    """Returns memory for this rank's rows. Collective. ValueError, on every rank, if `memory` is too small for any, or
    a node has too little host memory for its ranks."""
    tables, plan, ranks = layout.tables, layout.plan, layout.ranks
    if layout.in_row_parts:
        raise ValueError("--table-memory cannot be used with row-wise sharding: shard by tables or columns")
    of_ranks, host_bytes = [], []
    for rank, shards in enumerate(map(plan.of_rank, range(plan.world_size))):  # all check all, so that they agree
        row_bytes = 2 * 4 * shards[0].columns
        of_ranks.append(memory.checked_rows(rank, shards, tables, row_bytes))
        host_bytes.append((sum(shard.rows(tables) for shard in shards) - of_ranks[-1].total) * row_bytes)
    first = ranks.node * ranks.local_world_size
    check_host_memory(sum(host_bytes[first : first + ranks.local_world_size]))
    counts = None if memory.counts is None else read_counts(memory.counts, tables)
    expected, start = np.empty(sum(shape.rows), np.float32), 0
    for shard in plan.of_rank(ranks.rank):
        of_table, hot = tables.rows[shard.table], tables.hot[shard.table]
        rates = assumed_rates(of_table, hot) if counts is None else counts.row_rates(shard.table)
        expected[start : start + of_table] = rates
        start += of_table
    expected *= shape.parts * shape.samples
    return TieredRows(_pools(shape, of_ranks[ranks.rank]), shape.columns, ranks.device, expected)


def _pools(shape: TBEShape, on_device: DeviceRows) -> list[Pool]:
    """Returns the pools of a rank's rows: of each table with a share of its own, and of the others together."""
    rows = [range(*ends) for ends in pairwise(accumulate(shape.rows, initial=0))]
    hot = (shape.parts * shape.samples * hot for hot in shape.hot)
    ids = [range(*ends) for ends in pairwise(accumulate(hot, initial=0))]
    pools = [
        Pool.of_batches([rows[table]], [ids[table]], own)
        for table, own in enumerate(on_device.of_shards)
        if own is not None
    ]
    others = [table for table, own in enumerate(on_device.of_shards) if own is None]
    if others:
        pools.append(Pool.of_batches([rows[i] for i in others], [ids[i] for i in others], on_device.shared))
    return pools


def empty_placed(ids: Tensor, makes: bool, sorts: bool) -> PlacedIds:
    """Returns memory for the places of one batch's rows. ids: give the shape. makes: whether rows are created. sorts:
    whether ids are sorted by row, and their places are not."""
    lookup = torch.zeros_like(ids, dtype=torch.int32)
    of_sorted = torch.zeros_like(lookup) if sorts else None
    return PlacedIds(lookup, of_sorted, torch.full_like(lookup[:1], -1) if makes else None)


def bring_rows(tiers: TieredRows, rows: Tensor, ordered: SortedIds | None, placed: PlacedIds) -> None:
    """Moves a batch's rows to the device, as far as possible while the previous batch trains, and fills `placed`.

    rows: int32, in the order of the ids. ordered: the same rows, sorted; None for an evaluation, which moves none.
    """
    if ordered is not None and placed.sorted is not None:
        tiers.bring(ordered.ids)
        tiers.placement.places(ordered.ids, placed.sorted)
    tiers.placement.places(rows, placed.lookup)


def make_rows(dynamic: DynamicRows, rows: Keys, placed: PlacedIds, is_new: Tensor) -> None:
    """Creates a batch's new rows, except for an evaluation, and fills `placed`.

    rows: in the order of the ids. is_new: int32 [1] on the device, 0 for a batch that is distributed again.
    """
    if placed.lacking is None:
        dynamic.map.find(rows, placed.lookup)
        return
    dynamic.map.next_batch(is_new)
    placed.lacking.copy_(dynamic.place(rows, placed.lookup))


def rows_in_memory(shape: TBEShape, places: RowPlaces) -> int:
    """Returns the number of rows in a rank's memory if rows are created when first named: its places, plus one row per
    id of a batch, from which an evaluation reads rows that no batch has named."""
    return places.count + shape.ids


def named_rows(layout: Layout, tbe: FixedTBE, seed: int, places: RowPlaces) -> DynamicRows:
    """Returns this rank's rows, none created yet, in the memory of `tbe`, of `rows_in_memory` rows."""
    plan, rank = layout.plan, layout.ranks.rank
    assert all(shard.row_parts == 1 and shard.columns == layout.tables.columns for shard in plan.shards), "whole tables"
    assert not plan.replicated, "each table on one rank"
    held = tuple(shard.table for shard in plan.of_rank(rank))
    numbers = RawIds(held) if layout.tables.raw_ids else RowNumbers.of_whole(layout.tables, held)
    return DynamicRows(numbers, layout.tables, seed, places, (tbe.weights, tbe.state))
