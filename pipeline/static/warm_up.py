"""Warm-up of the static pipeline before the first batch: what is captured, compiled and set up then takes no time of
the training, and leaves no trace in weights and optimizer state."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dlrm_bench.dlrm.data.batch import Batch, feature_blocks
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dense.buckets import Bucket
from dlrm_bench.dlrm.dense.loss_guard import LossGuard
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.pooled.static_ebc import TableShard

ROWS = 4096
"""Rows of each table that a warm-up batch names: its ids are below this. Few enough to keep copies of, many enough that
no row takes longer than those of a usual batch."""


def warm_up_batch(batch_size: int, model: ModelConfig, pin: bool) -> Batch:
    """Returns a batch of dense features 0 and labels 0, whose ids go through the first ROWS rows of each table."""
    batch = Batch.empty(batch_size, model, pin)
    batch.storage.zero_()
    for rows, block in zip(model.rows, feature_blocks(batch.ids, model.multi_hot_sizes), strict=True):
        block.copy_((torch.arange(block.numel()) % min(rows, ROWS)).view_as(block))
    return batch


@contextmanager
def unchanged(
    tables: Sequence[TableShard], buckets: Sequence[Bucket], guard: LossGuard, ranks: Ranks
) -> Iterator[None]:
    """Whatever is trained inside, on warm-up batches, weights and optimizer state are bit for bit as before after it.

    So are the guard's flags, which a loss may have raised, and tallies. Collective.
    """
    kept = [tensor[:ROWS] for table in tables for tensor in (table.weights, table.state)]
    kept += [tensor for bucket in buckets for tensor in (bucket.working, bucket.master, bucket.state)]
    kept += [guard.watch.stopped, guard.tallies.counts]
    copies = [tensor.detach().clone() for tensor in kept]
    yield
    _wait_for_all(ranks)  # in peer memory other ranks write this one's weights and flags
    with torch.no_grad():
        for tensor, copy in zip(kept, copies, strict=True):
            tensor.copy_(copy)
    _wait_for_all(ranks)


def _wait_for_all(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
