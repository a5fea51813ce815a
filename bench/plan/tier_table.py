"""The part of `--print-plan` about tables in two tiers of memory: each rank's bytes by tier, and the rows that move."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.runtime.gpu_types import GpuCosts
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.constraints import FLAG
from dlrm_bench.dlrm.tables.plan.plan import Plan
from dlrm_bench.dlrm.tables.plan.tier_costs import TierLoad, misses_per_sample, table_rates, tier_loads
from dlrm_bench.dlrm.tables.row_counts import read_counts
from dlrm_bench.dlrm.tables.row_rates import RowRates
from dlrm_bench.dlrm.tables.table_memory import HEADROOM
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory


def print_tiers(
    console: Console, config: RunConfig, plan: Plan, topology: Topology, memory: TableMemory, costs: GpuCosts
) -> None:
    """Prints the tiers of each rank of a plan, and their predicted costs. ValueError if a rank's share is too small, if
    shares of single tables leave too many rows to a tier, or if the counts are another model's."""
    tables, samples = config.model.tables, config.local_batch_size * topology.world_size
    rates, source = _rates(config, memory.counts)
    loads = tier_loads(plan, tables, config.optimizer.tables, memory, samples, rates)
    if memory.shares:
        _check_shares_fit(loads, topology, costs)
    table = Table(
        title="weights and optimizer state on two tiers; a rank and an iteration",
        caption=f"us: at {costs.host_rows_per_us:g} rows per microsecond, both ways, which kernels reach with rows of "
        f"up to 1 KB on {costs.measured_on}. Misses by {source}, with the most frequent rows on the device from the "
        "first iteration on: a placement that learns them during training misses more",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("rank", "on the device, GB", "in host memory, GB", "rows missed", "MB each way", "us"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, load in enumerate(loads):
        table.add_row(
            str(rank),
            f"{load.device_bytes / 1e9:.3g}",
            f"{load.host_bytes / 1e9:.3g}",
            f"{load.missed_rows:,.0f}",
            f"{load.moved_bytes / 1e6:.3g}",
            f"{load.us(costs):.0f}",
        )
    console.print(table)
    for share in sorted(set(memory.shares.values())):
        held = [number for number in range(tables.count) if memory.shares.get(number) == share]
        rows = sum(tables.rows[number] for number in held)
        on_device = sum(memory.own_rows(number, tables.rows[number]) or 0 for number in held)
        names = " ".join(tables.names[number] for number in held)
        console.print(f"on the device at any time: {on_device:,} of the {rows:,} rows of {names}")
    console.print(
        f"a sample misses {misses_per_sample(loads, tables, samples):.3g} rows, counted once per batch, of its "
        f"{tables.ids_per_sample} ids; the busiest rank moves rows for {max(load.us(costs) for load in loads):.0f} "
        "us, during the previous iteration"
    )
    console.print(_host_memory(loads, topology, costs))


def _check_shares_fit(loads: Sequence[TierLoad], topology: Topology, costs: GpuCosts) -> None:
    """Raises ValueError if any rank's device, or any node's host memory, is too small for its tier."""
    limits = int(costs.memory_bytes * HEADROOM), int(costs.host_memory_bytes * HEADROOM) * topology.gpus_per_node
    device, host = max(load.device_bytes for load in loads), max(_host_bytes(loads, topology))
    if device > limits[0] or host > limits[1]:
        raise ValueError(
            f"--table-memory and hbm of {FLAG} put {device / 1e9:.1f} GB of a rank on the device, which has "
            f"{limits[0] / 1e9:.1f}, and {host / 1e9:.1f} GB of a node in host memory, which has "
            f"{limits[1] / 1e9:.1f}: give other shares, or use more GPUs, hosts with more memory (--host-memory-gb) or "
            "smaller tables (--model.table-scale)"
        )


def _host_bytes(loads: Sequence[TierLoad], topology: Topology) -> list[int]:
    """Returns the bytes in host memory of each node."""
    gpus = topology.gpus_per_node
    return [sum(load.host_bytes for load in loads[i : i + gpus]) for i in range(0, len(loads), gpus)]


def _rates(config: RunConfig, counts: Path | None) -> tuple[Sequence[RowRates], str]:
    """Returns the rates at which a sample names the rows of each table, and their source."""
    tables, ids = config.model.tables, config.data.id_statistics
    rates = table_rates(tables, ids, counts)
    if counts is not None:
        return rates, f"{counts.name}, counts of {read_counts(counts, tables).samples:,} samples"
    drawn = "first ids and others by a function of them" if ids.expanded else "first ids, the others uniform"
    return rates, f"the distribution of random ids (Zipf {ids.skew:g} for {drawn})" if ids.skew else "uniform ids"


def _host_memory(loads: Sequence[TierLoad], topology: Topology, costs: GpuCosts) -> str:
    """Returns a line about the node whose tables take the most host memory."""
    available = topology.gpus_per_node * costs.host_memory_bytes
    return f"host memory of a node: {max(_host_bytes(loads, topology)) / 1e9:.1f} of {available / 1e9:.1f} GB"
