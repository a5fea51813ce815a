"""Warm-up of the static pipeline before the first batch: moves captures, compilation and set-up out of the training,
and restores weights and optimizer state."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist

from dlrm_bench.dlrm.data.batch import Batch, BatchLayout, feature_blocks
from dlrm_bench.dlrm.dense.buckets import Bucket
from dlrm_bench.dlrm.dense.loss_guard import LossGuard
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.pooled.static_ebc import TableShard
from dlrm_bench.dlrm.tables.tables import Tables

ROWS = 4096
"""Maximum number of rows of each table that a warm-up batch names; its ids are smaller. Few enough to keep copies of,
and many enough that no row is named more often than in a usual batch."""


def warm_up_batch(layout: BatchLayout, tables: Tables, pin: bool, named: int = ROWS) -> Batch:
    """Returns a batch whose ids cycle through the first `named` rows of each table; everything else is zero."""
    batch = Batch.of_layout(layout, pin)
    batch.storage.zero_()
    for rows, block in zip(tables.rows, feature_blocks(batch.ids, tables.hot), strict=True):
        block.copy_((torch.arange(block.numel()) % min(rows, named)).view_as(block))
    return batch


@contextmanager
def unchanged(
    tables: Sequence[TableShard],
    rows: AbstractContextManager[None],
    buckets: Sequence[Bucket],
    guard: LossGuard,
    ranks: Ranks,
) -> Iterator[None]:
    """Restores weights and optimizer state bitwise after training on warm-up batches in the body.

    Also restores the guard's flags, which a loss may have raised, and tallies. rows: on exit, restores rows of tables
    without shards. Collective.
    """
    kept = [tensor[:ROWS] for table in tables for tensor in (table.weights, table.state)]
    kept += [tensor for bucket in buckets for tensor in (bucket.working, bucket.master, bucket.state)]
    kept += [guard.watch.stopped, guard.tallies.counts]
    copies = [tensor.detach().clone() for tensor in kept]
    with rows:
        yield
        _wait_for_all(ranks)  # with peer memory, other ranks write this rank's weights and flags
    with torch.no_grad():
        for tensor, copy in zip(kept, copies, strict=True):
            tensor.copy_(copy)
    _wait_for_all(ranks)


def _wait_for_all(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
