"""The state of rows that are created when first named, in the form for checkpoints: ids and rows, each as one tensor
over all tables, rank after rank, in the order of a rank's places. A snapshot in memory, whose layout is fixed, has all
places, and ids of no table for those without a row."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import NO_TABLE, DynamicRows
from dlrm_bench.pipeline.state import RowsByIds, StateBlocks, TensorBlock

ROWS, IDS = "embeddings.rows", "embeddings.ids"
"""Keys of the rows, and of their ids (DynamicRows.entries)."""
_TABLE = 2
"""Column of an id's table."""


def dynamic_blocks(dynamic: DynamicRows, ranks: Ranks) -> StateBlocks:
    """Returns the rows of all ranks, with their ids among the weights. Collective; waits for the device."""
    ids = dynamic.entries().view(torch.float32)  # the same bits
    used, of_ranks = dynamic.map.used, [0] * ranks.world_size
    dist.all_gather_object(of_ranks, used)
    memory = {IDS: ids, "weights": dynamic.weights, "optimizer": dynamic.state}
    by_ids = RowsByIds(IDS, partial(_choose, dynamic), memory)

    def blocks(memory: torch.Tensor) -> list[TensorBlock]:
        return _blocks(memory[:used], of_ranks, ranks.rank, by_ids)

    optimizer = {ROWS: blocks(dynamic.state)} if dynamic.state.shape[1] else {}  # SGD has none
    return StateBlocks({IDS: blocks(ids), ROWS: blocks(dynamic.weights)}, optimizer)


def of_all_places(blocks: StateBlocks, ranks: Ranks) -> StateBlocks:
    """Returns the blocks with all places of rows that are created when first named, instead of those with a row: the
    shapes are then constant throughout a run, given equal places on all ranks."""

    def fixed(kind: str, key: str, of_key: list[TensorBlock]) -> list[TensorBlock]:
        by_ids = of_key[0].by_ids
        if by_ids is None:
            return of_key
        memory = by_ids.memory[key if key == by_ids.key else kind]
        return _blocks(memory, [len(memory)] * ranks.world_size, ranks.rank, by_ids)

    kinds = zip(StateBlocks._fields, blocks, strict=True)
    return StateBlocks(*({key: fixed(kind, key, of_key) for key, of_key in of_kind.items()} for kind, of_kind in kinds))


def _blocks(own: torch.Tensor, of_ranks: Sequence[int], rank: int, by_ids: RowsByIds) -> list[TensorBlock]:
    """Returns the blocks of all ranks. own: this rank's. of_ranks: number of rows of each rank."""
    return [
        TensorBlock(of, (start, 0), (rows, own.shape[1]), own if of == rank else None, by_ids=by_ids)
        for of, (start, rows) in enumerate(zip(accumulate(of_ranks, initial=0), of_ranks, strict=False))
    ]


def _choose(dynamic: DynamicRows, entries: torch.Tensor) -> torch.Tensor:
    """Returns DynamicRows.choose among the places that have a row."""
    with_row = (entries[:, _TABLE] != NO_TABLE).nonzero().flatten()
    return with_row[dynamic.choose(entries[with_row])]
