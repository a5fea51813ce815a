"""The sort of ids for the table update, divided among ranks of a node that hold columns of the same tables.

These ranks receive the same ids, and need them in the same order. Rows are counted one table after another, and each
table has a constant number of ids, so the offset of a table's ids among all sorted ids is constant, and their order
depends on no other table: each rank sorts the ids of some tables, and writes them to the others. Tables with too many
ids for one rank are sorted by every rank itself (dlrm/tables/plan/sort_shares.py).
"""

import torch
from torch import Tensor

from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.tables.plan.plan import Plan
from dlrm_bench.dlrm.tables.plan.sort_shares import divide
from dlrm_bench.dlrm.tables.pooled.tbe import FixedTBE
from dlrm_bench.dlrm.tables.pooled.ways import Layout
from dlrm_bench.kernels.input_dist.gather_segments import Segment, SegmentTable, gather_segments
from dlrm_bench.kernels.input_dist.push_segments import SegmentPushTable, push_segments
from dlrm_bench.kernels.input_dist.sort_ids import sort_ids
from dlrm_bench.kernels.peer_tensors import PeerTensors


def sorts_are_shared(plan: Plan) -> bool:
    """Whether any ranks can share a sort."""
    tables = [_tables(plan, rank) for rank in range(plan.world_size)]
    return len(set(tables)) < len(tables)


class SharedSort:
    """Gives the same result as `FixedTBE.sort`, bit by bit, together with the other ranks that hold the same tables.

    For each buffer the caller launches two barriers of all ranks: one between the sorts that write it and the update
    that reads it, and one between that update and the next sorts that write it.
    """

    def __init__(self, layout: Layout, tbe: FixedTBE, memory: PeerMemory) -> None:
        tables, plan, ranks, shape = layout.tables, layout.plan, layout.ranks, layout.shape
        held = [_tables(plan, rank) for rank in range(ranks.world_size)]
        sharers = [rank for rank, of_rank in enumerate(held) if of_rank == held[ranks.rank]]
        self._memory = memory
        samples = shape.part_samples * ranks.world_size
        ids = [[samples * tables.hot[table] for table in of_rank] for of_rank in held]
        """Number of ids of a part of the batch, by rank and table."""
        self._longest = shape.parts * max(map(sum, ids))
        own, before = ids[ranks.rank], [sum(ids[ranks.rank][:place]) for place in range(len(ids[ranks.rank]))]
        shares = divide(own, len(sharers))  # by one type of GPU's costs, as all ranks must divide alike
        self._alone = not any(share.for_all for share in shares) or len(sharers) == 1
        share = shares[sharers.index(ranks.rank)]
        places = sorted(share.for_all + share.for_itself)
        self._count, count = shape.parts * sum(own), shape.parts * sum(own[place] for place in places)

        gathered: list[Segment] = []
        pushed: dict[int, list[Segment]] = {}
        at = 0
        for part in range(shape.parts):
            for place in places:
                gathered.append(Segment(part * sum(own) + before[place], at, own[place]))
                at += own[place]
        at = 0
        for place in places:
            length, to = shape.parts * own[place], shape.parts * before[place]
            pushed[place] = [Segment(at, to, length), Segment(count + at, self._longest + to, length)]
            at += length
        self._table = tbe.sort_table(places)
        self._gather = SegmentTable(gathered, ranks.device)
        to_ranks: list[list[Segment]] = [[] for _ in range(ranks.world_size)]
        for rank in sharers:
            sent = places if rank == ranks.rank else share.for_all
            to_ranks[rank] = [segment for place in sent for segment in pushed[place]]
        self._push = SegmentPushTable(to_ranks, ranks.device)
        self._ids = torch.zeros(count, dtype=torch.int32, device=ranks.device)
        self._sorted = torch.zeros(2, count, dtype=torch.int32, device=ranks.device)

    def empty(self) -> PeerTensors:
        """Returns buffers of zeros, int32, flat: sorted ids, then their bags, each with the capacity that the rank with
        the most ids needs. Collective."""
        return self._memory.zeros(2 * self._longest, dtype=torch.int32)

    def views(self, buffers: PeerTensors) -> tuple[Tensor, Tensor]:
        """Returns this rank's sorted ids and their bags."""
        sorted_ids, sorted_bags = buffers.own.view(2, -1)[:, : self._count].unbind()
        return sorted_ids, sorted_bags

    def sort(self, ids: Tensor, buffers: PeerTensors) -> None:
        """Sorts this rank's share of `ids`, int32 [part][T][G, hot], flat, into the buffers of all sharing ranks."""
        if self._alone:
            sort_ids(ids, self._table, *self.views(buffers))
            return
        gather_segments(ids, self._gather, self._ids)
        sort_ids(self._ids, self._table, *self._sorted.unbind())
        push_segments(self._sorted.view(-1), self._push, buffers)


def _tables(plan: Plan, rank: int) -> tuple[int, ...]:
    return tuple(shard.table for shard in plan.of_rank(rank))
