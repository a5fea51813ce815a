"""The work of candidate plans, for comparing thousands of them: the functions of costs.py, cached."""

from collections.abc import Sequence

from dlrm_bench.dlrm.runtime.gpu_types import GpuCosts
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.id_statistics import IdStatistics
from dlrm_bench.dlrm.tables.plan.costs import (
    all_to_alls_us,
    imbalance,
    picking_us,
    shard_us,
)
from dlrm_bench.dlrm.tables.plan.plan import Shard, shards_by_rank
from dlrm_bench.dlrm.tables.plan.sort_shares import SavedBySharing, most_saved_us
from dlrm_bench.dlrm.tables.plan.tier_costs import Exchanges
from dlrm_bench.dlrm.tables.tables import Tables

# Many ranks with little work are not worth a few percent: predictions err as much, and the other ranks get their work.
# Plans that split rows count as slower if the largest table work exceeds the mean by more than this factor.
_MOST_IMBALANCE = 1.15
_IMBALANCED = 1.25
# Embedding work and exchanges with host memory overlap; the shorter one counts a little too: predictions of both err,
# and neither is free.
_BESIDE = 0.1


class Work:
    """The common inputs of all candidates, and the costs of their shards; a shard's cost does not depend on its first
    column."""

    def __init__(
        self,
        tables: Tables,
        topology: Topology,
        global_batch_size: int,
        pooled_bytes: int,
        costs: GpuCosts,
        ids: IdStatistics,
        exchanges: Exchanges | None = None,
    ) -> None:
        """exchanges: of rows with host memory; None if all rows are on the device."""
        self.tables, self.world_size, self.dim = tables, topology.world_size, tables.columns
        self.exchanges = exchanges
        self._sizes, self._costs, self._ids = (tables, global_batch_size, costs), costs, ids
        self._topology, self._exchange = topology, (topology, global_batch_size, pooled_bytes, costs)
        # Caches: thousands of candidates need the same few values.
        self._tables_us: dict[tuple[int, int, int], float] = {}
        self._exchange_us: dict[float, float] = {}
        self._shard_us: dict[tuple[int, int, int], float] = {}
        self.picking_us = [picking_us(table, *self._sizes) for table in range(tables.count)]
        """Time to find the ids of a table on a rank with parts of its rows, by table."""
        self._saved = SavedBySharing(*self._sizes)
        self._most_saved_us = [most_saved_us(table, *self._sizes) for table in range(tables.count)]
        """Time that a rank saves if another rank sorts a table's ids, by table."""

    def tables_us(self, shard: Shard) -> float:
        """Returns the cost of a shard for its rank without all-to-alls."""
        key = (shard.table, shard.columns, shard.row_parts)
        if key not in self._tables_us:
            self._tables_us[key] = shard_us(shard, *self._sizes, self._ids)
        picked = self.picking_us[shard.table] if shard.row_parts > 1 else 0.0
        return self._tables_us[key] + picked

    def exchange_us(self, columns: float) -> float:
        """Returns the microseconds of the all-to-alls of a rank with `columns` columns."""
        if columns not in self._exchange_us:
            self._exchange_us[columns] = all_to_alls_us(columns, *self._exchange)
        return self._exchange_us[columns]

    def shard_us(self, shard: Shard) -> float:
        """Returns the cost of a shard for its rank: tables, all-to-alls and exchanges with host memory."""
        key = (shard.table, shard.columns, shard.row_parts)
        if key not in self._shard_us:
            self._shard_us[key] = self.tables_us(shard) + self.exchange_us(shard.columns) - self.exchange_us(0)
            if self.exchanges is not None:
                self._shard_us[key] += self.exchanges.table_us(shard.table)
        return self._shard_us[key]

    def iteration_us(self, shards: Sequence[Shard]) -> float:
        """Returns costs.py's `iteration_us` of these shards, or more if row parts leave the tables imbalanced;
        includes the exchanges of rows with host memory if rows are on two tiers."""
        ranks = shards_by_rank(shards, self.world_size)
        columns = max(sum(shard.columns for shard in own) for own in ranks)
        saved = self._saved.us(ranks, self._topology, self.exchanges is not None)
        tables = [self.rank_us(own) - us for own, us in zip(ranks, saved, strict=True)]
        time = max(tables) + self.exchange_us(columns)
        if self.exchanges is not None:
            return beside(time, max(self.exchanges.us(own) for own in ranks))
        imbalanced = any(shard.row_parts > 1 for shard in shards) and imbalance(tables) > _MOST_IMBALANCE
        return _IMBALANCED * time if imbalanced else time

    def rank_us(self, own: Sequence[Shard]) -> float:
        """Returns the cost of a rank's shards without all-to-alls, if it shares its sort with no other rank."""
        time = sum(self.tables_us(shard) for shard in own)
        if any(shard.row_parts > 1 for shard in own):
            picked = sum(self.picking_us[shard.table] for shard in own if shard.row_parts == 1)
            time += self._costs.picking_us + picked
        return self._costs.tables_us + time

    def least_us(self, grids: Sequence[tuple[Shard, int]]) -> float:
        """Returns a lower bound for all placements of these shards, given with their number: all ranks with equal work,
        and on one node no id sorted twice."""
        tables = sum(count * self.tables_us(shard) for shard, count in grids)
        if self._topology.nodes == 1 and self.exchanges is None:
            copies = ((shard.table, self.dim // shard.columns) for shard, _ in grids)
            tables -= sum((ranks - 1) * max(0.0, self._most_saved_us[table]) for table, ranks in copies)
        columns = sum(count * shard.columns for shard, count in grids)
        mean = self._costs.tables_us + tables / self.world_size
        return mean + self.exchange_us(columns / self.world_size)


def beside(embedding_us: float, exchanges_us: float) -> float:
    """Returns the time of embedding work and the overlapping exchanges with host memory, for comparisons.

    The whole iteration hides the exchanges, but the planner knows only the tables' part of it. MLPerf's dense network
    takes about as long again, and a placement that learns misses up to twice the rows of the best one, which the
    prediction of exchanges assumes: so the two compare as their predictions do.
    """
    return max(embedding_us, exchanges_us) + _BESIDE * min(embedding_us, exchanges_us)
