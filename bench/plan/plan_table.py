"""The table of `--print-plan`: each rank's shards of the static pipeline's tables, and the balance of the work; or each
rank's tables, where all pipelines keep them whole."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.plan.tier_table import print_tiers
from dlrm_bench.bench.records.limits import ALL_TO_ALLS, Limits, read_limits
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.runtime.gpu_types import DEFAULT_COSTS, GpuCosts, costs_of
from dlrm_bench.dlrm.runtime.topology import GPUS_PER_NODE, INFINIBAND_400G, Topology
from dlrm_bench.dlrm.tables.dynamic.memory import bytes_of
from dlrm_bench.dlrm.tables.plan.constraints import FLAG, described
from dlrm_bench.dlrm.tables.plan.costs import imbalance, iteration_us, rank_loads
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.plan.planner import plan_for
from dlrm_bench.dlrm.tables.plan.tier_costs import check_tiers_fit
from dlrm_bench.dlrm.tables.table_memory import HEADROOM, refuse_whole_tables, whole_table_bytes
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.pipeline.static.options import StaticOptions


def print_plan(config: RunConfig, topology: Topology, costs: GpuCosts = DEFAULT_COSTS) -> None:
    """Prints the plan of these ranks on GPUs of these costs as a table; ValueError if there is no plan."""
    if config.model.tables.whole:
        print_whole_tables(config, topology, costs)
        return
    if not config.model.tables.pooled:
        print_row_plan(config, topology, costs)
        return
    world_size = topology.world_size
    tables, global_batch_size = config.model.tables, config.local_batch_size * world_size
    options = config.pipeline if isinstance(config.pipeline, StaticOptions) else StaticOptions()
    if not isinstance(config.pipeline, StaticOptions) and config.pipeline.constraints:
        raise ValueError(
            f"{FLAG}: --print-plan shows the static pipeline's plan; add --pipeline static, or leave it out"
        )
    plan = _plan(config, options, topology, costs)
    ids = config.data.id_statistics
    tiers = options.tiers(tables)
    in_tiers, sizes = tiers is not None, (global_batch_size, config.pooled_bytes, costs)
    loads = rank_loads(plan, tables, config.optimizer.tables, *sizes, topology, ids, in_tiers)
    table = Table(
        title=f"{config.preset} with --pipeline static on {world_size} rank(s){_nodes(topology)}, "
        f"global batch {global_batch_size}",
        caption="us: predicted work of an iteration; tables: lookup, sort, update; all: and the all-to-alls. "
        f"By the costs of {costs.measured_on}"
        + (f"; between nodes {topology.network.name}" if topology.nodes > 1 else ""),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("rank", justify="right")
    table.add_column("tables [columns] (part of the rows)")
    for name in ("columns", "tables, us", "all, us", "tables, GB", "state, GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, load in enumerate(loads):
        table.add_row(
            str(rank),
            _names(plan.of_rank(rank), tables),
            str(load.columns),
            f"{load.tables_us:.0f}",
            f"{load.embedding_us:.0f}",
            f"{load.table_bytes / 1e9:.3g}",
            f"{load.state_bytes / 1e9:.3g}",
        )
    if plan.replicated:
        table.add_row("all", " ".join(tables.names[table] for table in plan.replicated), "0", "", "", "", "")
    console = Console(width=120, markup=False, highlight=False)
    console.print(table)
    if options.constraints:
        console.print(f"as asked: {FLAG} {described(options.constraints_on(tables), tables)}")
    console.print(
        f"largest / mean of the ranks: tables {imbalance([load.tables_us for load in loads]):.3f}, "
        f"all {imbalance([load.embedding_us for load in loads]):.3f}"
    )
    iteration = iteration_us(plan.shards, tables, topology, *sizes, ids, in_tiers)
    console.print(f"slowest tables and largest all-to-alls, which all ranks wait for: {iteration:.0f} us")
    if tiers is not None:
        print_tiers(console, config, plan, topology, tiers, costs)
    if options.dynamic_rows is not None:
        hot = max(sum(tables.hot[shard.table] for shard in plan.of_rank(rank)) for rank in range(world_size))
        needed = _places_gb(config, costs, options.dynamic_rows, global_batch_size * hot)
        console.print(
            f"{_share_of_rows(config, world_size, options.dynamic_rows)}; {needed:.1f} GB per rank with state, map "
            "and an evaluation's rows that training has not named. The table shows the memory of all "
            + ("rows" if not tables.raw_ids else "expected rows (--model.num-embeddings)")
        )


def _plan(config: RunConfig, options: StaticOptions, topology: Topology, costs: GpuCosts) -> Plan:
    """Returns the plan of the static pipeline; ValueError if there is no plan."""
    tables = config.model.tables
    tiers = options.tiers(tables)
    memory_bytes = int(costs.memory_bytes * HEADROOM) if options.dynamic_rows is None else None
    if tiers is not None and memory_bytes is not None:
        host_bytes = int(costs.host_memory_bytes * HEADROOM)
        of_node = (memory_bytes, host_bytes * topology.gpus_per_node)
        check_tiers_fit(tables, config.optimizer.tables, tiers, topology, *of_node)
        memory_bytes = tiers.capacity(memory_bytes, host_bytes)
    return plan_for(
        config,
        topology,
        memory_bytes,
        options.replicates(topology.nodes),
        options.splits_rows(topology.nodes),
        costs,
        options.constraints_on(tables),
        options.splits_columns,
        tiers,
    )


def print_row_plan(config: RunConfig, topology: Topology, costs: GpuCosts) -> None:
    """Prints each rank's part of tables that are split by rows over all ranks, and its exchanges per iteration;
    ValueError if the part does not fit."""
    tables, ranks = config.model.tables, topology.world_size
    if isinstance(config.pipeline, StaticOptions) and config.pipeline.dynamic_rows is not None:
        _print_dynamic_rows(config, topology, costs, config.pipeline.dynamic_rows)
        return
    states = config.optimizer.tables.state_columns(tables.columns)
    table = Table(
        title=f"{config.preset} on {ranks} rank(s){_nodes(topology)}, global batch {config.local_batch_size * ranks}: "
        "each table by rows, equally over the ranks",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("table", "rows", "rows per rank", "tables, GB", "state, GB"):
        table.add_column(name, justify="left" if name == "table" else "right", no_wrap=True)
    held = [math.ceil(rows / ranks) for rows in tables.rows]
    weights, state = ([4e-9 * own * columns for own in held] for columns in (tables.columns, states))
    for row in zip(tables.names, tables.rows, held, weights, state, strict=True):
        table.add_row(row[0], f"{row[1]:,}", f"{row[2]:,}", *(f"{gb:.3g}" for gb in row[3:]))
    all_rows = (f"{sum(tables.rows):,}", f"{sum(held):,}", f"{sum(weights):.4g}", f"{sum(state):.3g}")
    table.add_row("all", *all_rows, style="bold")
    needed, available = sum(weights) + sum(state), 1e-9 * costs.memory_bytes * HEADROOM
    if needed > available:
        raise ValueError(
            f"no plan of {ranks} rank(s) fits: tables and optimizer state take {needed:.1f} GB of the {available:.1f} "
            f"GB that a rank has; use more GPUs or {tables.advice}"
        )
    console = Console(width=120, markup=False, highlight=False)
    console.print(table)
    _print_rank(config, topology, costs, needed)


def print_whole_tables(config: RunConfig, topology: Topology, costs: GpuCosts) -> None:
    """Prints each rank's tables and their memory where every pipeline keeps tables whole; ValueError if those of a rank
    do not fit."""
    tables, optimizer, ranks = config.model.tables, config.optimizer.tables, topology.world_size
    if config.pipeline.constraints:
        raise ValueError(f"{FLAG}: this model's tables are assigned round-robin, without a planner; leave it out")
    refuse_whole_tables(tables, optimizer, costs.memory_bytes, ranks)
    pipelines, owners = named(config.benchmark).pipelines, tables.owners(ranks)
    table = Table(
        title=f"{config.preset} with --pipeline {' or '.join(pipelines)} on {ranks} rank(s){_nodes(topology)}, "
        f"global batch {config.local_batch_size * ranks}: whole tables, round-robin",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("rank", justify="right")
    table.add_column("tables")
    for name in ("tables, GB", "state, GB"):
        table.add_column(name, justify="right", no_wrap=True)
    held = whole_table_bytes(tables, optimizer, ranks)
    for rank, (weights, state) in enumerate(held):
        own = " ".join(name for name, owner in zip(tables.names, owners, strict=True) if owner == rank)
        table.add_row(str(rank), own, f"{weights / 1e9:.3g}", f"{state / 1e9:.3g}")
    console = Console(width=120, markup=False, highlight=False)
    console.print(table)
    most, available = max(map(sum, held)) / 1e9, costs.memory_bytes * HEADROOM / 1e9
    console.print(
        f"the fullest rank, with the memory of {costs.measured_on}: {available - most:.1f} of {available:.1f} GB are "
        "left for the dense network"
    )


def _print_dynamic_rows(config: RunConfig, topology: Topology, costs: GpuCosts, places: int) -> None:
    """Prints the memory of each rank if rows are made when they are first named."""
    tables, ranks, needed = config.model.tables, topology.world_size, _places_gb(config, costs, places)
    Console(width=120, markup=False, highlight=False).print(
        f"{config.preset} on {ranks} rank(s){_nodes(topology)}, global batch {config.local_batch_size * ranks}: "
        f"{_share_of_rows(config, ranks, places)}; {needed:.1f} GB per rank with state and map; all rows would "
        f"take {tables.bytes / ranks / 1e9:.1f}. To count the rows of a training: "
        f"dlrm-bench data rows --preset {config.preset}"
    )
    _print_rank(config, topology, costs, needed)


def _places_gb(config: RunConfig, costs: GpuCosts, places: int, unnamed: int = 0) -> float:
    """Returns the GB of a rank with `places`; ValueError if it has less. unnamed: as bytes_of takes it."""
    columns, raw = config.model.tables.columns, config.model.tables.raw_ids
    states = config.optimizer.tables.state_columns(columns)
    needed, available = 1e-9 * bytes_of(places, columns, states, unnamed, raw), 1e-9 * costs.memory_bytes * HEADROOM
    if needed > available:
        raise ValueError(
            f"--dynamic-rows {places}: rows, state and map take {needed:.1f} GB of the {available:.1f} GB that a rank "
            "has; use more ranks with fewer rows each"
        )
    return needed


def _share_of_rows(config: RunConfig, ranks: int, places: int) -> str:
    """Returns the share of all rows that have places, in words."""
    rows = sum(config.model.tables.rows)
    return (
        f"rows are made when they are first named, at most {places:,} per rank, "
        f"{min(1.0, places * ranks / rows):.1%} of all {rows:,}"
        + (" that are expected" if config.model.tables.raw_ids else "")
    )


def _print_rank(config: RunConfig, topology: Topology, costs: GpuCosts, needed: float) -> None:
    """Prints the memory that a rank has left, and the data that leave it per iteration. needed: GB of tables and
    state."""
    ranks, available = topology.world_size, 1e-9 * costs.memory_bytes * HEADROOM
    console = Console(width=120, markup=False, highlight=False)
    console.print(
        f"a rank of {costs.measured_on}: {available - needed:.1f} of {available:.1f} GB are left for the dense network"
    )
    benchmark = named(config.benchmark)
    if benchmark.activation_bytes is not None:
        for flags, kept in benchmark.activation_bytes(config).items():
            console.print(f"{kept / 1e9:.1f} GB of activations are kept for the backward pass {flags}", soft_wrap=True)
    work = benchmark.work
    if work is not None:
        size = 2 if config.precision == "bf16" else 4
        moved, away = work.table_work(config, config.local_batch_size, size), (ranks - 1) / ranks
        console.print(
            f"an iteration: {moved.ids * away:,.0f} ids and {moved.vectors * away * size / 1e6:.1f} MB of rows leave a "
            "rank, and as many bytes of gradients, where each distinct row travels once"
        )


def topology_of(world_size: int, gpus_per_node: int | None, network_gb_s: float | None) -> Topology:
    """Returns the topology that --print-plan's flags describe; ValueError names an invalid flag."""
    if world_size < 1:
        raise ValueError(f"--print-plan {world_size}: a plan is for at least one rank")
    gpus = gpus_per_node if gpus_per_node is not None else GPUS_PER_NODE
    if gpus < 1:
        raise ValueError(f"--gpus-per-node {gpus}: a node has at least one GPU")
    if network_gb_s is None:
        return Topology.of(world_size, gpus)
    if not 0 < network_gb_s < math.inf:
        raise ValueError(f"--network-gb-s {network_gb_s}: give GB/s of one GPU in one direction, above 0")
    network = replace(INFINIBAND_400G, name=f"{network_gb_s:g} GB/s a GPU, given", bytes_per_us=network_gb_s * 1e3)
    return Topology.of(world_size, gpus, network)


def costs_at(limits: Path | None, host_memory_gb: float | None, topology: Topology) -> GpuCosts:
    """Returns the costs of the GPU that a limits.json was measured on, or default ones, on nodes with host_memory_gb GB
    of host memory, which a node's GPUs share; ValueError names a bad file or number."""
    costs = DEFAULT_COSTS if limits is None else measured_costs(read_limits(limits))
    if host_memory_gb is None:
        return costs
    if not 0 < host_memory_gb < math.inf:
        raise ValueError(f"--host-memory-gb {host_memory_gb}: give GB of a node, above 0")
    return replace(costs, host_memory_bytes=int(host_memory_gb * 1e9 / topology.gpus_per_node))


def measured_costs(limits: Limits) -> GpuCosts:
    """Returns the costs of the GPU that `limits` were measured on. Costs that the limits lack are those of the GPU's
    type, or of a default type.

    An all-to-all's latency and rate are those of the line through the measured exchanges, by bytes that leave a rank.
    Times of lookup and update are proportional to the memory rate. ValueError if the measurement had fewer than two
    GPUs, or if its exchanges do not lie on a rising line.
    """
    machine, world_size = limits["machine"], limits["config"]["world_size"]
    name, memory_gb, host_gb = machine["gpu"], machine["gpu_memory_gb"], machine.get("memory_gb")
    if name is None or memory_gb is None or world_size < 2:
        raise ValueError(
            f"limits {limits['id']} were measured on {world_size} rank(s) with {machine['gpus']} GPU(s): a plan's "
            "costs need at least two GPUs, run `dlrm-bench limits` on them"
        )
    exchanges = [ceiling for ceiling in limits["ceilings"] if ceiling["name"] in ALL_TO_ALLS]
    leaving = [ceiling["amount"] * (world_size - 1) / world_size for ceiling in exchanges]
    us_per_byte, all_to_all_us = statistics.linear_regression(leaving, [ceiling["ms"] * 1e3 for ceiling in exchanges])
    if us_per_byte <= 0 or all_to_all_us < 0:
        raise ValueError(
            f"limits {limits['id']}: the all-to-alls took no more time for more bytes: measure a "
            "larger --local-batch-size"
        )
    memory = [c["amount"] / (c["ms"] * 1e3) for c in limits["ceilings"] if c["name"].startswith("memory: ")]
    base, rate, gpus_of_node = costs_of(name), max(memory), machine["gpus"] / machine["nodes"]
    measured_on = f"{name} (limits {limits['id']}; tables scaled from {base.measured_on}'s by the memory rate)"
    return replace(
        base.at_memory_rate(rate, measured_on),
        memory_bytes=int(memory_gb * 1e9),
        host_memory_bytes=int(host_gb * 1e9 / gpus_of_node) if host_gb else base.host_memory_bytes,
        all_to_all_us=all_to_all_us,
        all_to_all_bytes_per_us=1 / us_per_byte,
    )


def _names(shards: Sequence[Shard], tables: Tables) -> str:
    """Returns the tables' names by feature; for a split table also its columns, and the part of its rows."""
    return " ".join(
        tables.names[shard.table]
        + ("" if shard.columns == tables.columns else f"[{shard.column}:{shard.column + shard.columns}]")
        + ("" if shard.row_parts == 1 else f"({shard.row_part + 1}/{shard.row_parts})")
        for shard in shards
    )


def _nodes(topology: Topology) -> str:
    return f" of {topology.nodes} nodes" if topology.nodes > 1 else ""
