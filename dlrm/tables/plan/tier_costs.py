"""Costs of tables in two tiers of memory (--table-memory): each rank's part in each tier, and the traffic between them.

The prediction assumes the best fixed placement, with the most frequently named rows on the device, of each table with a
share of its own and over all other tables of a rank. A placement that learns during training misses more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.optimizers import TableOptimizer
from dlrm_bench.dlrm.runtime.gpu_types import GpuCosts
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.id_statistics import IdStatistics
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard, bytes_of_rank
from dlrm_bench.dlrm.tables.row_counts import read_counts
from dlrm_bench.dlrm.tables.row_rates import RowRates, random_rates
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import DeviceRows, TableMemory

_GB, _KB = 1e9, 1024
_BINS = 1000
_LACKING_US = 1e6
"""Cost of each row by which --table-memory is too small: above all times, and less if the plan is nearer to one that
fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoad:
    """One rank's tiers, and its traffic from host memory in an iteration."""

    device_bytes: int
    """Weights and optimizer state on the device, replicated tables included."""
    host_bytes: int
    missed_rows: float
    """Distinct rows in host memory that a global batch names; the same number leaves the device. Those of tables that
    are all in host memory are used there instead, which counts the same."""
    missed_columns: float
    """Columns of all those rows, without their state."""
    moved_bytes: float
    """Bytes that move to the device; the same number leaves it."""

    def us(self, costs: GpuCosts) -> float:
        """Returns the microseconds of the exchanges."""
        return _exchange_us(self.missed_rows, self.moved_bytes, costs)


def tier_loads(
    plan: Plan,
    tables: Tables,
    optimizer: TableOptimizer,
    memory: TableMemory,
    global_batch_size: int,
    rates: Sequence[RowRates],
) -> list[TierLoad]:
    """Returns the load of each rank. rates: of each table."""
    loads = []
    for rank in range(plan.world_size):
        shards = plan.of_rank(rank)
        columns = shards[0].columns
        row_bytes = 4 * (columns + optimizer.state_columns(columns))
        on_device = memory.checked_rows(rank, shards, tables, row_bytes)
        missed = _missed_rows(shards, on_device, global_batch_size, rates)
        replicated = sum(bytes_of_rank((), plan.replicated, tables, optimizer.state_columns))
        loads.append(
            TierLoad(
                device_bytes=on_device.total * row_bytes + replicated,
                host_bytes=(sum(shard.rows(tables) for shard in shards) - on_device.total) * row_bytes,
                missed_rows=missed,
                missed_columns=missed * columns,
                moved_bytes=missed * row_bytes,
            )
        )
    return loads


def _missed_rows(shards: Sequence[Shard], on_device: DeviceRows, samples: int, rates: Sequence[RowRates]) -> float:
    """Returns `missed_rows` of a rank: of each shard with rows of its own, and of the others together."""
    with_rates = [(shard, rates[shard.table]) for shard in shards]
    own = [([one], rows) for one, rows in zip(with_rates, on_device.of_shards, strict=True) if rows is not None]
    others = [one for one, rows in zip(with_rates, on_device.of_shards, strict=True) if rows is None]
    together = [(others, on_device.shared)] if others else []
    return sum(missed_rows(some, rows, samples) for some, rows in own + together)


def missed_rows(shards: Sequence[tuple[Shard, RowRates]], device_rows: int, samples: int) -> float:
    """Returns the number of distinct rows that `samples` samples name outside the `device_rows` most frequent rows."""
    rates = np.concatenate([of.rates for _, of in shards])
    rows = np.concatenate([of.rows / shard.row_parts for shard, of in shards])
    order = np.argsort(-rates, kind="stable")
    rates, rows = rates[order], rows[order]
    in_host = np.clip(np.cumsum(rows) - device_rows, 0, rows)
    return float(-(in_host * np.expm1(-samples * rates)).sum())


class Exchanges:
    """The times that ranks exchange rows with host memory: as `tier_loads`, computed in a thousandth of the time.

    Rows whose rates differ by a few percent share a bin, so that the bins of several tables can be added.
    """

    def __init__(
        self,
        tables: Tables,
        optimizer: TableOptimizer,
        memory: TableMemory,
        global_batch_size: int,
        rates: Sequence[RowRates],
        costs: GpuCosts,
        world_size: int,
    ) -> None:
        """rates: of each table. world_size: number of ranks, each with the device memory of `memory`."""
        self._tables, self._optimizer, self._memory, self._costs = tables, optimizer, memory, costs
        self._rows = np.zeros((tables.count, _BINS))
        self._named = np.zeros((tables.count, _BINS))
        """Expected number of rows of each table in a batch, by bin of their rate."""
        least = min(of.rates[of.rates > 0].min(initial=1.0) for of in rates)
        highest = max(least, *(of.rates[0] for of in rates))
        width = max(math.log(highest / least), 1.0) / (_BINS - 1)
        for table, of in enumerate(rates):
            bins = np.minimum(np.log(highest / np.maximum(of.rates, least)) / width, _BINS - 1).astype(np.int64)
            np.add.at(self._rows[table], bins, of.rows)
            np.add.at(self._named[table], bins, -of.rows * np.expm1(-global_batch_size * of.rates))
        own = {table: memory.own_rows(table, rows) for table, rows in enumerate(tables.rows)}
        on_device = {table: rows for table, rows in own.items() if rows is not None}
        self._own = {table: self._missed([table], rows).sum() for table, rows in on_device.items()}
        """Missed rows of each table that has its own share."""
        self._of_table = self._table_us(world_size, sum(on_device.values()))

    def us(self, shards: Sequence[Shard]) -> float:
        """Returns the microseconds of a rank with these shards (whole tables or column shards of one width); far more
        than any exchange if its device would hold too few rows."""
        row_bytes = self._row_bytes(shards[0].columns)
        on_device = self._memory.device_rows(shards, self._tables, row_bytes)
        if on_device.lacking:
            return _LACKING_US * on_device.lacking
        others = [shard.table for shard in shards if shard.table not in self._own]
        missed = float(self._missed(others, on_device.shared).sum())
        missed += sum(self._own.get(shard.table, 0.0) for shard in shards)
        return _exchange_us(missed, missed * row_bytes, self._costs)

    def table_us(self, table: int) -> float:
        """Returns the microseconds of a table's rows if the device's memory is divided among all tables without a share
        of their own."""
        return self._of_table[table]

    def _table_us(self, world_size: int, taken: int) -> list[float]:
        """Returns `table_us` of all tables. taken: rows on the device by shares of single tables."""
        tables, row_bytes = self._tables, self._row_bytes(self._tables.columns)
        others = [table for table in range(tables.count) if table not in self._own]
        device_rows = world_size * self._memory.most_rows(sum(tables.rows) // world_size, row_bytes) - taken
        missed, named = self._missed(others, max(0, device_rows)), self._named[others].sum(0)
        part = np.divide(missed, named, out=np.zeros(_BINS), where=missed > 0)
        of_tables = [self._own.get(table, (self._named[table] * part).sum()) for table in range(tables.count)]
        return [_exchange_us(float(n), float(n) * row_bytes, self._costs) for n in of_tables]

    def _missed(self, tables: Sequence[int], device_rows: int) -> NDArray[np.float64]:
        """Returns the missed rows by bin, of tables that together have `device_rows` rows on the device."""
        rows, named = self._rows[tables].sum(0), self._named[tables].sum(0)
        in_host = np.clip(np.cumsum(rows) - device_rows, 0, rows)
        return named * np.divide(in_host, rows, out=np.zeros_like(rows), where=rows > 0)

    def _row_bytes(self, columns: int) -> int:
        return 4 * (columns + self._optimizer.state_columns(columns))


def _exchange_us(rows: float, moved_bytes: float, costs: GpuCosts) -> float:
    """Returns the microseconds of exchanges: a row up to 1 KB takes the same time, a larger one more."""
    return max(rows, moved_bytes / _KB) / costs.host_rows_per_us


def table_rates(tables: Tables, ids: IdStatistics, counts: Path | None) -> list[RowRates]:
    """Returns the rates at which a sample names the rows of each table: from a file of counts, or else for random data
    with these statistics. ValueError if the counts belong to another model."""
    if counts is not None:
        file = read_counts(counts, tables)
        return [file.rates(table) for table in range(tables.count)]
    return [random_rates(rows, hot, ids) for rows, hot in zip(tables.rows, tables.hot, strict=True)]


def misses_per_sample(loads: Sequence[TierLoad], tables: Tables, samples: int) -> float:
    """Returns a sample's share of the batch's distinct rows in host memory, all columns of a row counted together."""
    return sum(load.missed_columns for load in loads) / tables.columns / samples


def check_tiers_fit(
    tables: Tables,
    optimizer: TableOptimizer,
    memory: TableMemory,
    topology: Topology,
    device_bytes: int,
    host_bytes: int,
) -> None:
    """Raises ValueError, with the numbers, if device and host memory of all nodes are too small for the tables.

    device_bytes: available for them on one GPU. host_bytes: available on one node.
    """
    states = sum(tables.rows) * optimizer.state_columns(tables.columns) * 4
    needed, gpus = tables.bytes + states, topology.gpus_per_node
    if needed <= topology.world_size * memory.capacity(device_bytes, host_bytes // gpus):
        return
    share = f"share {memory.share:g}" if memory.share is not None else f"{(memory.device_bytes or 0) / _GB:g} GB a rank"
    raise ValueError(
        f"--table-memory ({share}): tables and optimizer state take {needed / _GB:.1f} GB, but {topology.nodes} "
        f"node(s) of {gpus} GPU(s) have {topology.world_size * device_bytes / _GB:.1f} GB of device memory for them "
        f"and {topology.nodes * host_bytes / _GB:.1f} GB of host memory, of which this share can use "
        f"{topology.world_size * memory.capacity(device_bytes, host_bytes // gpus) / _GB:.1f} GB at most: give another "
        "share, or use more GPUs, hosts with more memory (--host-memory-gb) or smaller tables (--model.table-scale)"
    )
