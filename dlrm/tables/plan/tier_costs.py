"""The costs of tables in two tiers of memory (--table-memory): what each rank has in each, and what moves between them.

Predicted for the best placement that stays as it is, the rows that are named most, over all tables of a rank, being on
the device. One that learns while it trains misses more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_bench.dlrm.optimizers import TableOptimizer
from dlrm_bench.dlrm.runtime.gpu_types import GpuCosts
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard, bytes_of_rank
from dlrm_bench.dlrm.tables.row_rates import RowRates
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory

_GB, _KB = 1e9, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoad:
    """One rank's tiers, and what comes from host memory in an iteration."""

    device_bytes: int
    """Weights and optimizer state on the device, replicated tables included."""
    host_bytes: int
    missed_rows: float
    """Distinct rows in host memory that a global batch names; as many leave the device."""
    missed_columns: float
    """Columns of all those rows, without their state."""
    moved_bytes: float
    """Bytes that come to the device, and as many that leave it."""

    def us(self, costs: GpuCosts) -> float:
        """Returns the microseconds of the exchanges: a row up to 1 KB takes the same time, a larger one more."""
        return max(self.missed_rows, self.moved_bytes / _KB) / costs.host_rows_per_us


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
        rows = sum(shard.rows(tables) for shard in shards)
        memory.check_rows(rank, rows, row_bytes)
        device_rows = memory.device_rows(rows, row_bytes)
        missed = missed_rows([(shard, rates[shard.table]) for shard in shards], device_rows, global_batch_size)
        replicated = sum(bytes_of_rank((), plan.replicated, tables, optimizer.state_columns))
        loads.append(
            TierLoad(
                device_bytes=device_rows * row_bytes + replicated,
                host_bytes=(rows - device_rows) * row_bytes,
                missed_rows=missed,
                missed_columns=missed * columns,
                moved_bytes=missed * row_bytes,
            )
        )
    return loads


def missed_rows(shards: Sequence[tuple[Shard, RowRates]], device_rows: int, samples: int) -> float:
    """Returns how many distinct rows `samples` samples name beyond the `device_rows` rows that are named most."""
    rates = np.concatenate([of.rates for _, of in shards])
    rows = np.concatenate([of.rows / shard.row_parts for shard, of in shards])
    order = np.argsort(-rates, kind="stable")
    rates, rows = rates[order], rows[order]
    in_host = np.clip(np.cumsum(rows) - device_rows, 0, rows)
    return float(-(in_host * np.expm1(-samples * rates)).sum())


def misses_per_sample(loads: Sequence[TierLoad], tables: Tables, samples: int) -> float:
    """Returns the rows in host memory that a sample adds to those of its batch, all columns of a row together."""
    return sum(load.missed_columns for load in loads) / tables.columns / samples


def check_tiers_fit(
    tables: Tables,
    optimizer: TableOptimizer,
    memory: TableMemory,
    topology: Topology,
    device_bytes: int,
    host_bytes: int,
) -> None:
    """Raises ValueError, with the numbers, where device and host memory of all nodes are too small for the tables.

    device_bytes: what one GPU has for them. host_bytes: what one node has.
    """
    states = sum(tables.rows) * optimizer.state_columns(tables.columns) * 4
    needed, gpus = tables.bytes + states, topology.gpus_per_node
    if needed <= topology.world_size * memory.capacity(device_bytes, host_bytes // gpus):
        return
    share = f"share {memory.share:g}" if memory.share is not None else f"{(memory.device_bytes or 0) / _GB:g} GB a rank"
    raise ValueError(
        f"--table-memory ({share}): tables and optimizer state take {needed / _GB:.1f} GB, and {topology.nodes} "
        f"node(s) of {gpus} GPU(s) have {topology.world_size * device_bytes / _GB:.1f} GB of device memory for them "
        f"and {topology.nodes * host_bytes / _GB:.1f} GB of host memory, of which this uses "
        f"{topology.world_size * memory.capacity(device_bytes, host_bytes // gpus) / _GB:.1f} GB at most: give another "
        "share, or use more GPUs, hosts of more memory (--host-memory-gb) or smaller tables (--model.table-scale)"
    )
