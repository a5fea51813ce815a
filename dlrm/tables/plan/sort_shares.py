"""Tables whose ids each rank sorts, where the ranks of a node that hold columns of the same tables share the sort.

A table is sorted as a whole. Of MLPerf's, one has 100 of the 214 ids of a sample: its rank, of four, would sort 1.87
times a quarter of the ids, and send them to three others. So the largest tables may be sorted by every rank itself.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from dlrm_bench.dlrm.runtime.gpu_types import DEFAULT_COSTS, GpuCosts
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.tables import Tables

_SENT_BYTES = 8
"""A sorted id and its bag."""


class Share(NamedTuple):
    """The part of a shared sort that one rank does, as positions of tables, ascending."""

    for_all: list[int]
    """Tables that this rank alone sorts, and sends to the others."""
    for_itself: list[int]
    """Tables that every rank sorts."""


def divide(ids: Sequence[int], ranks: int, costs: GpuCosts = DEFAULT_COSTS) -> list[Share]:
    """Returns each rank's share of a sort of tables with these numbers of ids: of all numbers of largest tables that
    every rank sorts itself, the one whose slowest rank is predicted to be the fastest."""
    largest_first = sorted(range(len(ids)), key=lambda place: -ids[place])

    def with_own(own: int) -> list[Share]:
        shared = _share_out(largest_first[own:], ids, ranks)
        return [Share(places, sorted(largest_first[:own])) for places in shared]

    return min(map(with_own, range(len(ids) + 1)), key=lambda shares: max(_us(ids, shares, costs)))


def _share_out(largest_first: Sequence[int], ids: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns the positions of the tables that each rank sorts: each table to the rank with the fewest ids so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for place in largest_first:
        busy, rank = heapq.heappop(load)
        shares[rank].append(place)
        heapq.heappush(load, (busy + ids[place], rank))
    return [sorted(places) for places in shares]


def _us(ids: Sequence[int], shares: Sequence[Share], costs: GpuCosts) -> list[float]:
    """Returns the predicted microseconds in which each rank sorts and exchanges, without the fixed part of a sort."""
    for_all = [sum(ids[place] for place in share.for_all) for share in shares]
    for_itself = sum(ids[place] for place in shares[0].for_itself)
    sent = [max(own * (len(shares) - 1), sum(for_all) - own) for own in for_all]
    return [
        (own + for_itself) * costs.sort_us_per_million_ids / 1e6 + _SENT_BYTES * moved / costs.all_to_all_bytes_per_us
        for own, moved in zip(for_all, sent, strict=True)
    ]


def sort_sharers(by_rank: Sequence[Sequence[Shard]], topology: Topology, in_tiers: bool = False) -> list[int]:
    """Returns, for each rank, the number of ranks that share the sort of its ids: all with the same tables, if on one
    node, as in dlrm/tables/pooled/shared_sort.py with peer memory; only itself if rows are on two tiers."""
    if in_tiers or topology.nodes > 1 or any(shard.row_parts > 1 for own in by_rank for shard in own):
        return [1] * len(by_rank)
    held = [_held(own) for own in by_rank]
    return [held.count(own) for own in held]


class SavedBySharing:
    """The predicted time that ranks save by sharing their sorts, remembered for the sets of tables that were asked."""

    def __init__(self, tables: Tables, global_batch_size: int, costs: GpuCosts) -> None:
        self._tables, self._global_batch_size, self._costs = tables, global_batch_size, costs
        self._of: dict[tuple[tuple[int, ...], int], list[float]] = {}

    def us(self, by_rank: Sequence[Sequence[Shard]], topology: Topology, in_tiers: bool = False) -> list[float]:
        """Returns microseconds for each rank; 0 if it sorts alone. in_tiers: as for `sort_sharers`."""
        held, saved = [_held(own) for own in by_rank], []
        for rank, sharers in enumerate(sort_sharers(by_rank, topology, in_tiers)):
            saved.append(self._shared(held[rank], sharers)[held[:rank].count(held[rank])] if sharers > 1 else 0.0)
        return saved

    def _shared(self, held: tuple[int, ...], sharers: int) -> list[float]:
        if (held, sharers) not in self._of:
            ids = [self._global_batch_size * self._tables.hot[table] for table in held]
            alone = sum(ids) * self._costs.sort_us_per_million_ids / 1e6
            shares = divide(ids, sharers, self._costs)
            self._of[held, sharers] = [alone - us for us in _us(ids, shares, self._costs)]
        return self._of[held, sharers]


def most_saved_us(table: int, tables: Tables, global_batch_size: int, costs: GpuCosts) -> float:
    """Returns the predicted microseconds that a rank saves on a table whose ids another rank sorts and sends; it then
    receives eight bytes for each id."""
    num_ids = global_batch_size * tables.hot[table]
    return num_ids * (costs.sort_us_per_million_ids / 1e6 - _SENT_BYTES / costs.all_to_all_bytes_per_us)


def _held(own: Sequence[Shard]) -> tuple[int, ...]:
    return tuple(sorted(shard.table for shard in own))
