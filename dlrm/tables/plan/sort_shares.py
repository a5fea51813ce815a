"""The tables whose ids each rank sorts, where ranks of a node that hold columns of the same tables share the sort."""

import heapq
from collections.abc import Sequence

from dlrm_bench.dlrm.runtime.gpu_types import GpuCosts
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.costs import sort_sharers
from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.tables import Tables

_SENT_BYTES = 8
"""A sorted id and its bag."""


def share_out(ids: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns the positions of the tables that each rank sorts: most ids first, each to the rank with the fewest
    ids."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for place in sorted(range(len(ids)), key=lambda place: -ids[place]):
        busy, rank = heapq.heappop(load)
        shares[rank].append(place)
        heapq.heappush(load, (busy + ids[place], rank))
    return [sorted(places) for places in shares]


def saved_by_sharing_us(
    by_rank: Sequence[Sequence[Shard]], topology: Topology, tables: Tables, global_batch_size: int, costs: GpuCosts
) -> list[float]:
    """Returns the predicted microseconds that each rank saves by sharing its sort; 0 if it sorts alone, below 0 if
    sending takes longer than the others' sorts.

    `table_times` with `sharers` takes equal shares, as the planner does. But a table is sorted as a whole: of MLPerf's,
    one has 100 of the 214 ids of a sample, so that its rank, of four, sorts 1.87 times a quarter.
    """
    held = [tuple(shard.table for shard in own) for own in by_rank]
    saved = []
    for rank, sharers in enumerate(sort_sharers(by_rank, topology)):
        ids = [global_batch_size * tables.hot[table] for table in held[rank]]
        own = ids
        if sharers > 1:
            own = [ids[place] for place in share_out(ids, sharers)[held[:rank].count(held[rank])]]
        others = sum(ids) - sum(own)
        moved = _SENT_BYTES * max(sum(own) * (sharers - 1), others)
        saved.append(others * costs.sort_us_per_million_ids / 1e6 - moved / costs.all_to_all_bytes_per_us)
    return saved
