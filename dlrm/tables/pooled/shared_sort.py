"""The sort of ids for the table update, shared out among ranks of a node that hold columns of the same tables.

These ranks get the same ids, and need them in the same order. Rows are counted one table after another, and each table
has a constant number of ids, so where a table's ids stand among all sorted ids is constant, and their order depends on
no other table: each rank sorts the ids of some tables, and writes them to where the others need them.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.plan import Plan
from dlrm_bench.dlrm.tables.pooled.tbe import FixedTBE
from dlrm_bench.kernels.input_dist.gather_segments import Segment, SegmentTable, gather_segments
from dlrm_bench.kernels.input_dist.push_segments import SegmentPushTable, push_segments
from dlrm_bench.kernels.input_dist.sort_ids import sort_ids
from dlrm_bench.kernels.peer_tensors import PeerTensors


def sorts_are_shared(plan: Plan, shape: BatchShape) -> bool:
    """Whether any ranks have a sort to share. Padding, which comes first among sorted ids, has no constant number."""
    tables = [_tables(plan, rank) for rank in range(plan.world_size)]
    return not shape.padded and len(set(tables)) < len(tables)


class SharedSort:
    """What `FixedTBE.sort` does, to the bit, with the other ranks that hold the same tables.

    It writes to other ranks' buffers, and needs no barrier of its own in the pipeline. A slot's buffer is written in
    the iteration before the one whose update reads it: after that writing every rank comes to the barriers "gradients"
    of the latter, which the update waits for. The next writing to it comes after the barrier "ids" of the same input
    dist, to which its reader comes when that update is through, as the streams of an iteration join before the next.
    """

    def __init__(
        self, model: ModelConfig, plan: Plan, tbe: FixedTBE, ranks: Ranks, shape: BatchShape, memory: PeerMemory
    ) -> None:
        tables = [_tables(plan, rank) for rank in range(ranks.world_size)]
        sharers = [rank for rank, of_rank in enumerate(tables) if of_rank == tables[ranks.rank]]
        self._memory, self._alone = memory, len(sharers) == 1
        samples = shape.part_samples * ranks.world_size
        ids = [[samples * model.multi_hot_sizes[table] for table in of_rank] for of_rank in tables]
        """Of a part of the batch, by rank and table."""
        self._longest = shape.parts * max(map(sum, ids))
        own, before = ids[ranks.rank], [sum(ids[ranks.rank][:place]) for place in range(len(ids[ranks.rank]))]
        mine = _share_out(own, len(sharers))[sharers.index(ranks.rank)]
        self._count, count = shape.parts * sum(own), shape.parts * sum(own[place] for place in mine)

        gathered: list[Segment] = []
        pushed: list[Segment] = []
        at = 0
        for part in range(shape.parts):
            for place in mine:
                gathered.append(Segment(part * sum(own) + before[place], at, own[place]))
                at += own[place]
        at = 0
        for place in mine:
            length, to = shape.parts * own[place], shape.parts * before[place]
            pushed += [Segment(at, to, length), Segment(count + at, self._longest + to, length)]
            at += length
        self._table = tbe.sort_table(mine)
        self._gather = SegmentTable(gathered, ranks.device)
        to_sharers = [pushed if rank in sharers else [] for rank in range(ranks.world_size)]
        self._push = SegmentPushTable(to_sharers, ranks.device)
        self._ids = torch.zeros(count, dtype=torch.int32, device=ranks.device)
        self._sorted = torch.zeros(2, count, dtype=torch.int32, device=ranks.device)

    def empty(self) -> PeerTensors:
        """Returns buffers of zeros, int32, flat: sorted ids, then their bags, each with room for those of the rank that
        has most. Collective."""
        return self._memory.zeros(2 * self._longest, dtype=torch.int32)

    def views(self, buffers: PeerTensors) -> tuple[Tensor, Tensor]:
        """Returns this rank's sorted ids and their bags."""
        sorted_ids, sorted_bags = buffers.own.view(2, -1)[:, : self._count].unbind()
        return sorted_ids, sorted_bags

    def sort(self, ids: Tensor, buffers: PeerTensors) -> None:
        """Sorts this rank's share of `ids`, int32 [part][T][G, hot], flat, into the buffers of all that share it."""
        if self._alone:
            sort_ids(ids, self._table, *self.views(buffers))
            return
        gather_segments(ids, self._gather, self._ids)
        sort_ids(self._ids, self._table, *self._sorted.unbind())
        push_segments(self._sorted.view(-1), self._push, buffers)


def _tables(plan: Plan, rank: int) -> tuple[int, ...]:
    return tuple(shard.table for shard in plan.of_rank(rank))


def _share_out(ids: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns the places of the tables that each rank sorts: most ids first, each to the rank of fewest."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for place in sorted(range(len(ids)), key=lambda place: -ids[place]):
        busy, rank = heapq.heappop(load)
        shares[rank].append(place)
        heapq.heappush(load, (busy + ids[place], rank))
    return [sorted(places) for places in shares]
