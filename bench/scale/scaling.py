"""The model fitted to records, and what it says of other numbers of nodes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from dlrm_bench.bench.records.limits import Limits
from dlrm_bench.bench.records.record import Record
from dlrm_bench.bench.records.schema import RunRecord
from dlrm_bench.bench.scale.simulation import Steady, simulate
from dlrm_bench.bench.scale.work import HOST, Fit, Kind, Load, System, load_of, plan_on, tasks_of
from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.runtime.gpu_costs import GpuCosts
from dlrm_bench.dlrm.runtime.topology import INFINIBAND_400G, Network, Topology
from dlrm_bench.dlrm.tables.id_statistics import UNIFORM, IdStatistics
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard

IDEAL = Network(name="a network that takes no time", bytes_per_us=float("inf"), latency_us=0.0)
NEAR_IDEAL = 1.1
"""How near to the ideal network's time is near enough."""
_FASTEST_GB_S = 1000.0
"""No network of today, nor NVLink, brings a GPU so much in one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What the model says of one pipeline on one number of nodes."""

    topology: Topology
    global_batch_size: int
    steady: Steady
    stages_us: dict[str, float]
    """Time of each stage's tasks, on whatever resource; stages overlap."""
    needed_gb_s: float | None
    """GB/s a GPU at which an iteration is within NEAR_IDEAL of the ideal network's; 0 on one node, None where none of
    up to 1000 is enough, because the latencies take too long."""
    needed_us: float | None
    """Where no rate is enough: microseconds of a collective between two nodes with which one is, were the rate without
    limit; further nodes' messages shorten with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The model of one pipeline, fitted to one record."""

    kind: Kind
    model: ModelConfig
    local_batch_size: int
    exchanged_bytes: int
    system: System
    fit: Fit
    fitted_to: str
    ids: IdStatistics = UNIFORM
    peer_memory: bool = False
    """Whether what the ranks of a node exchange goes through peer memory."""

    def load(self, topology: Topology, local_batch_size: int | None = None) -> Load:
        """Returns the load on these nodes by the plan that the pipeline would make of them."""
        batch = local_batch_size or self.local_batch_size
        of = (topology, self.model, batch, self.exchanged_bytes, self.system.costs, self.ids, self.peer_memory)
        return load_of(plan_on(*of), *of)

    def load_in(self, record: RunRecord, topology: Topology) -> Load:
        """Returns the load in a record, whose plan a planner of today may not make."""
        plan, batch = plan_in(record), record["config"]["local_batch_size"]
        if plan is None:
            return self.load(topology, batch)
        of = (topology, self.model, batch, self.exchanged_bytes, self.system.costs, self.ids, self.peer_memory)
        return load_of(plan, *of)

    def steady(self, load: Load, topology: Topology) -> Steady:
        """Returns an iteration as the model has it."""
        return simulate(tasks_of(self.kind, load, topology, self.system, self.fit))

    def point(self, topology: Topology, local_batch_size: int | None = None) -> Point:
        """Returns what the model says of these nodes."""
        load = self.load(topology, local_batch_size)
        stages: dict[str, float] = {}
        needed_gb_s, needed_us = self._needed(load, topology)
        for task in tasks_of(self.kind, load, topology, self.system, self.fit):
            if task.stage is not None and task.resource != HOST:
                stages[task.stage] = stages.get(task.stage, 0.0) + task.us
        return Point(
            topology=topology,
            global_batch_size=load.local_batch_size * topology.world_size,
            steady=self.steady(load, topology),
            stages_us=stages,
            needed_gb_s=needed_gb_s,
            needed_us=needed_us,
        )

    def _needed(self, load: Load, topology: Topology) -> tuple[float | None, float | None]:
        """Returns the rate, or the latency, of Point."""
        if topology.nodes == 1:
            return 0.0, None
        stated = topology.network

        def us(network: Network) -> float:
            return self.steady(load, replace(topology, network=network)).iteration_us

        def at_rate(gb_s: float) -> bool:
            return us(replace(stated, bytes_per_us=gb_s * 1e3)) <= enough

        def at_latency(shorter: float) -> bool:
            latency, message = stated.latency_us / shorter, stated.message_us / shorter
            network = Network(name="", bytes_per_us=float("inf"), latency_us=latency, message_us=message)
            return us(network) <= enough

        enough = NEAR_IDEAL * us(IDEAL)
        if at_rate(_FASTEST_GB_S):
            return round(_smallest(at_rate, 0.1, _FASTEST_GB_S), 1), None
        return None, round(stated.latency_us / _smallest(at_latency, 1.0, 1e4), 1)


def fit(read: Record, limits: Limits, costs: GpuCosts, model: ModelConfig) -> Scaling:
    """Returns the model of a record's pipeline, fitted to its `period_ms`.

    The static pipeline's, which replays a graph, by a factor on the GPU's work; the others' by their host time, as the
    GPU waits for the host. ValueError where that cannot be: the model then takes longer without any.
    """
    record = read.run
    config = record["config"]
    kind = kind_of(record)
    scaling = Scaling(
        kind=kind,
        model=model,
        local_batch_size=config["local_batch_size"],
        exchanged_bytes=exchanged_bytes_of(record),
        system=System(limits=limits, costs=costs),
        fit=Fit(),
        fitted_to=record["id"],
        ids=ids_of(record),
        peer_memory=peer_memory_of(record),
    )
    topology, target = topology_of(record), period_ms(read) * 1e3
    load = scaling.load_in(record, topology)

    def us(value: float) -> float:
        fitted = Fit(gpu=value) if kind == "static" else Fit(host_us=value * target)
        return replace(scaling, fit=fitted).steady(load, topology).iteration_us

    if us(1e-3) > target:
        raise ValueError(
            f"record {record['id']}: it takes {target:.0f} us an iteration, and links alone {us(1e-3):.0f} us by these "
            "limits: give limits of its machine"
        )
    value = _smallest(lambda value: us(value) >= target, 1e-3, 10.0)
    return replace(scaling, fit=Fit(gpu=value) if kind == "static" else Fit(host_us=value * target))


def kind_of(record: RunRecord) -> Kind:
    """Returns the pipeline of a record, which older ones call by other names; ValueError where it is none of ours."""
    options = record["config"]["pipeline"]
    name, ebc = options["name"], options.get("ebc")
    if name == "static" or ebc == "static":
        return "static"
    if name in ("torchrec", "stock", "sparse-dist"):
        return "torchrec"
    if name == "five-stage":
        return "five-stage"
    raise ValueError(f"record {record['id']} is of pipeline {name!r}: scale knows torchrec, five-stage and static")


def exchanged_bytes_of(record: RunRecord) -> int:
    """Returns the bytes of an element of pooled vectors and gradients: the static pipeline's in bf16 are 2."""
    return 2 if record["config"]["precision"] == "bf16" else 4


def peer_memory_of(record: RunRecord) -> bool:
    """Returns whether a record's ranks exchange through peer memory."""
    return bool(record["config"]["pipeline"].get("peer_memory"))


def period_ms(read: Record) -> float:
    """Returns how far apart iterations are: the median over iterations of the mean over ranks.

    It is what the model has. An iteration's latency, that of its slowest rank, is more: the slowest rank of one is the
    fastest of the next, and the more ranks there are, the more so (by 3 % on four in record 40, 1 % on two).
    ValueError where the record has too few iterations.
    """
    times = read.iterations_ms[:, read.run["warmup_iterations"] :]
    if times.size == 0:
        raise ValueError(f"record {read.run['id']} has no latency: its run ended in the warm-up")
    return float(np.median(times.mean(axis=0)))


def plan_in(record: RunRecord) -> Plan | None:
    """Returns the plan that a record of the static pipeline trained by; None of another pipeline."""
    if kind_of(record) != "static":
        return None
    model = model_of(record)
    place = {name: table for table, name in enumerate(model.feature_names)}
    shards = sorted(
        Shard(rank, place[s["table"]], s["column"], s["columns"], s.get("row_part", 0), s.get("row_parts", 1))
        for rank, of_rank in enumerate(record["pipeline"]["plan"])
        for s in of_rank
    )
    replicated = set(place.values()) - {shard.table for shard in shards}
    return Plan(world_size=record["config"]["world_size"], shards=tuple(shards), replicated=tuple(sorted(replicated)))


def topology_of(record: RunRecord, network: Network = INFINIBAND_400G) -> Topology:
    """Returns the nodes of a record, joined by this network."""
    world_size, nodes = record["config"]["world_size"], record["machine"]["nodes"]
    return Topology.of(world_size, world_size // nodes, network)


def model_of(record: RunRecord) -> ModelConfig:
    """Returns the model of a record."""
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in record["config"]["model"].items()}
    return ModelConfig(**cast(dict[str, object], fields))  # type: ignore[arg-type]


def ids_of(record: RunRecord) -> IdStatistics:
    """Returns how often a record's ids name the same rows; those of older records were drawn anew for each sample."""
    data = record["config"]["data"]
    expanded = data["source"] != "random" or data.get("random_ids", "uniform") == "expanded"
    return IdStatistics(skew=data["random_skew"], expanded=expanded)


def prediction(scaling: Scaling, record: RunRecord, network: Network = INFINIBAND_400G) -> float:
    """Returns the milliseconds that the model says of another record's nodes, joined by this network, batch, tables,
    plan and ids."""
    topology = topology_of(record, network)
    of_record = replace(scaling, model=model_of(record), ids=ids_of(record), peer_memory=peer_memory_of(record))
    return of_record.steady(of_record.load_in(record, topology), topology).iteration_us / 1e3


def _smallest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Returns the smallest value, within a thousandth, from which on `holds` does; `high` where it never does."""
    if holds(low):
        return low
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
