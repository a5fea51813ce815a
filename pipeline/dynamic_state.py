"""The state of rows that are created when first named, in the form for checkpoints: ids and rows, each as one tensor
over all tables, rank after rank, in the order of a rank's places."""

from itertools import accumulate

import torch
import torch.distributed as dist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import DynamicRows
from dlrm_bench.pipeline.state import RowsByIds, StateBlocks, TensorBlock

ROWS, IDS = "embeddings.rows", "embeddings.ids"
"""Keys of the rows, and of their ids (DynamicRows.entries)."""


def dynamic_blocks(dynamic: DynamicRows, ranks: Ranks) -> StateBlocks:
    """Returns the rows of all ranks, with their ids among the weights. Collective; waits for the device."""
    entries = dynamic.entries()
    of_ranks = [0] * ranks.world_size
    dist.all_gather_object(of_ranks, len(entries))
    by_ids = RowsByIds(IDS, dynamic.choose, {"weights": dynamic.weights, "optimizer": dynamic.state})

    def blocks(memory: torch.Tensor) -> list[TensorBlock]:
        own = memory[: len(entries)]
        return [
            TensorBlock(rank, (start, 0), (rows, memory.shape[1]), own if rank == ranks.rank else None, by_ids=by_ids)
            for rank, (start, rows) in enumerate(zip(accumulate(of_ranks, initial=0), of_ranks, strict=False))
        ]

    ids = entries.view(torch.float32)  # the same bits
    optimizer = {ROWS: blocks(dynamic.state)} if dynamic.state.shape[1] else {}  # SGD has none
    return StateBlocks({IDS: blocks(ids), ROWS: blocks(dynamic.weights)}, optimizer)
