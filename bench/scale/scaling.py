"""The model fitted to records, and its predictions for other numbers of nodes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast, get_args

import numpy as np

from dlrm_bench.bench.records.limits import Limits
from dlrm_bench.bench.records.record import Record
from dlrm_bench.bench.records.schema import RunRecord
from dlrm_bench.bench.scale.simulation import Steady, Task, simulate
from dlrm_bench.bench.scale.work import HOST, Fit, Kind, Load, System, load_of, plan_on, tasks_of
from dlrm_bench.dlrm.benchmark import Benchmark
from dlrm_bench.dlrm.benchmarks import BENCHMARKS, benchmark_of, restored
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.gpu_types import GpuCosts
from dlrm_bench.dlrm.runtime.topology import INFINIBAND_400G, Network, Topology
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.pipeline.static.options import StaticOptions

IDEAL = Network(name="a network that takes no time", bytes_per_us=float("inf"), latency_us=0.0)
NEAR_IDEAL = 1.1
"""Largest ratio of an iteration's time to the ideal network's that counts as near ideal."""
_MOST_TIMES = 10.0
"""Largest factor on the GPU's work that a fit may find."""
_FASTEST_GB_S = 1000.0
"""GB/s per GPU in one direction, above what any current network, or NVLink, reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The prediction for one pipeline on one number of nodes."""

    topology: Topology
    global_batch_size: int
    steady: Steady
    stages_us: dict[str, float]
    """Time of each stage's tasks, on all resources; stages overlap."""
    needed_gb_s: float | None
    """GB/s per GPU at which an iteration takes NEAR_IDEAL times the ideal network's; 0 on one node, None if 1000 GB/s
    are not enough, because the latencies are too long."""
    needed_us: float | None
    """Microseconds of a collective between two nodes that are enough at an unlimited rate, if no rate alone is enough;
    the time of messages to further nodes shrinks in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The model of one pipeline, fitted to one record."""

    kind: Kind
    benchmark: Benchmark
    training: TrainingConfig
    """The configuration that the record trained."""
    system: System
    fit: Fit
    fitted_to: str
    peer_memory: bool
    """Whether the ranks of a node exchange through peer memory."""

    @property
    def costs(self) -> GpuCosts:
        """The costs of the GPUs."""
        return self.system.costs

    def load(self, topology: Topology, local_batch_size: int | None = None) -> Load:
        """Returns the load on these nodes by the plan that the pipeline makes for them."""
        training = replace(self.training, local_batch_size=local_batch_size or self.training.local_batch_size)
        options = StaticOptions(presort_ids=True, peer_memory=self.peer_memory)
        plan = plan_on(topology, training, self.system.costs, options)
        return load_of(plan, topology, training, self.system.costs, self.peer_memory)

    def load_in(self, record: RunRecord, topology: Topology) -> Load:
        """Returns the load of a record by its own plan, which the current planner may not make."""
        plan, batch = plan_in(record), record["config"]["local_batch_size"]
        if plan is None:
            return self.load(topology, batch)
        training = replace(self.training, local_batch_size=batch)
        return load_of(plan, topology, training, self.system.costs, self.peer_memory)

    def tasks(self, load: Load, topology: Topology) -> list[Task]:
        """Returns the tasks of an iteration of a load."""
        parts = 1
        if self.kind == "static":
            assert self.benchmark.static_parts is not None  # the static pipeline trained it
            options = StaticOptions(presort_ids=True, peer_memory=self.peer_memory)
            parts = self.benchmark.static_parts(load.local_batch_size, options.dense)
        return tasks_of(self.kind, load, topology, self.system, self.fit, parts)

    def steady(self, load: Load, topology: Topology) -> Steady:
        """Returns the steady state of a load."""
        return simulate(self.tasks(load, topology))

    def point(self, topology: Topology, local_batch_size: int | None = None) -> Point:
        """Returns the prediction for these nodes."""
        load = self.load(topology, local_batch_size)
        stages: dict[str, float] = {}
        needed_gb_s, needed_us = self._needed(load, topology)
        for task in self.tasks(load, topology):
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

    def ms_of(self, record: RunRecord, network: Network = INFINIBAND_400G) -> float:
        """Returns the milliseconds that the model predicts for another record's nodes, joined by this network, and for
        its configuration and plan."""
        topology = topology_of(record, network)
        of_record = replace(self, training=restored(record["config"]), peer_memory=peer_memory_of(record))
        return of_record.steady(of_record.load_in(record, topology), topology).iteration_us / 1e3

    def _needed(self, load: Load, topology: Topology) -> tuple[float | None, float | None]:
        """Returns needed_gb_s and needed_us of Point."""
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


def fit(read: Record, limits: Limits, costs: GpuCosts) -> Scaling:
    """Returns the model of a record's pipeline, fitted to its `period_ms`.

    The model of the static pipeline, which replays a graph, is fitted by a factor on the GPU's work; the other models
    are fitted by the host time, because the GPU waits for the host. ValueError if the links alone take longer than the
    record, or if _MOST_TIMES the GPU's work takes less.
    """
    record = read.run
    kind, benchmark = kind_of(record), benchmark_of(record["config"])
    if benchmark is None:
        raise ValueError(f"record {record['id']} is of a benchmark that this version does not have")
    training = benchmark.restored(record["config"])
    _check_same_dense(record, benchmark, training, limits)
    scaling = Scaling(
        kind=kind,
        benchmark=benchmark,
        training=training,
        system=System(limits=limits, costs=costs),
        fit=Fit(),
        fitted_to=record["id"],
        peer_memory=peer_memory_of(record),
    )
    topology, target = topology_of(record), period_ms(read) * 1e3
    load = scaling.load_in(record, topology)

    def us(value: float) -> float:
        fitted = Fit(gpu=value) if kind == "static" else Fit(host_us=value * target)
        return replace(scaling, fit=fitted).steady(load, topology).iteration_us

    if us(1e-3) > target:
        raise ValueError(
            f"record {record['id']} takes {target:.0f} us per iteration, but links alone take {us(1e-3):.0f} us by "
            "these limits: give limits of its machine"
        )
    if (most := us(_MOST_TIMES)) < target:
        raise ValueError(
            f"record {record['id']} takes {target:.0f} us per iteration, but {_MOST_TIMES:g} times the GPU's work only "
            f"{most:.0f} us by these limits: it waits for something that scale does not model, such as data"
        )
    value = _smallest(lambda value: us(value) >= target, 1e-3, _MOST_TIMES)
    return replace(scaling, fit=Fit(gpu=value) if kind == "static" else Fit(host_us=value * target))


def _check_same_dense(record: RunRecord, benchmark: Benchmark, training: TrainingConfig, limits: Limits) -> None:
    """Raises ValueError if the limits are of another dense network than the record's. Tables, batch and ranks may
    differ."""
    config = {"benchmark": BENCHMARKS[0].name, **limits["config"]}  # older limits name none, and are the first one's
    if benchmark_of(config) is benchmark and benchmark.work is not None:
        products = benchmark.work.products
        if products(training, 1) == products(benchmark.restored(config), 1):
            return
    raise ValueError(
        f"limits {limits['id']} are of another dense network than that of record {record['id']}, {benchmark.title}: "
        "measure limits with its flags"
    )


def kind_of(record: RunRecord) -> Kind:
    """Returns the pipeline of a record; ValueError if it is unknown."""
    name = record["config"]["pipeline"]["name"]
    if name not in get_args(Kind):
        raise ValueError(f"record {record['id']} is of pipeline {name!r}: scale knows torchrec, five-stage and static")
    return cast(Kind, name)


def peer_memory_of(record: RunRecord) -> bool:
    """Whether a record's ranks exchange through peer memory."""
    return bool(record["config"]["pipeline"].get("peer_memory"))


def period_ms(read: Record) -> float:
    """Returns the milliseconds between iterations, which the model predicts: the median over iterations of the mean
    over ranks.

    An iteration's latency, that of its slowest rank, is longer: the slowest rank of one iteration is the fastest of the
    next, the more so with more ranks (3 % longer on four in record 40, 1 % on two). ValueError if the record has too
    few iterations.
    """
    times = read.iterations_ms[:, read.run["warmup_iterations"] :]
    if times.size == 0:
        raise ValueError(f"record {read.run['id']} has no latency: its run ended in the warm-up")
    return float(np.median(times.mean(axis=0)))


def plan_in(record: RunRecord) -> Plan | None:
    """Returns the plan of a record of the static pipeline; None for another pipeline. ValueError if its tables are not
    pooled, and so have no plan."""
    if kind_of(record) != "static":
        return None
    if "plan" not in record["pipeline"]:
        raise ValueError(
            f"record {record['id']} is of the static pipeline with tables that are not pooled, which scale does not "
            "model: give a record of a model with pooled tables"
        )
    place = {name: table for table, name in enumerate(restored(record["config"]).model.tables.names)}
    shards = sorted(
        Shard(rank, place[s["table"]], s["column"], s["columns"], s.get("row_part", 0), s.get("row_parts", 1))
        for rank, of_rank in enumerate(record["pipeline"]["plan"])
        for s in of_rank
    )
    replicated = set(place.values()) - {shard.table for shard in shards}
    return Plan(world_size=record["config"]["world_size"], shards=tuple(shards), replicated=tuple(sorted(replicated)))


def topology_of(record: RunRecord, network: Network = INFINIBAND_400G) -> Topology:
    """Returns the nodes and ranks of a record, with this network between the nodes."""
    world_size, nodes = record["config"]["world_size"], record["machine"]["nodes"]
    return Topology.of(world_size, world_size // nodes, network)


def _smallest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Returns the smallest value, within a thousandth, from which on `holds` is true; `high` if it never is."""
    if holds(low):
        return low
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
