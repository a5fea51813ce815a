"""The work of one iteration on one GPU of many, from measured rates of one node and stated ones of a network.

GPU work is that of the rank with most to do: the static pipeline's by the planner's costs, which are its kernels', the
others' by FBGEMM's. One factor on it makes the model agree with a record, `Fit.gpu`. Host work is what a record's
host does, whatever the number of nodes.
"""

from dataclasses import dataclass
from typing import Literal

from dlrm_bench.bench.profile.kernel_names import STAGES
from dlrm_bench.bench.records.limits import ADAGRAD, ALL_REDUCE, BATCH_COPY, Limits
from dlrm_bench.bench.scale.kernel_times import elementwise_us, fbgemm_us
from dlrm_bench.bench.scale.simulation import Task
from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.runtime.gpu_costs import GpuCosts
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.id_statistics import IdStatistics
from dlrm_bench.dlrm.tables.plan.costs import TableTimes, sort_sharers, table_times
from dlrm_bench.dlrm.tables.plan.plan import Plan
from dlrm_bench.dlrm.tables.plan.planner import make_plan

Kind = Literal["torchrec", "five-stage", "static"]
INPUT_DIST, FORWARD, DENSE, BACKWARD, UPDATE = STAGES
HOST, GPU, NVLINK, NETWORK, PCIE = "host", "GPU", "NVLink", "network", "PCIe"

# FBGEMM's forward of forward and backward together: 203 of 993 us at 6912 samples a GPU (8 x H200). Its backward sorts.
_LOOKUP_SHARE = 0.2
# Of a layer's three products one gives its weight gradients.
_WEIGHT_GRADIENTS = 1 / 3
# Three cross layers, two MLPs.
_BUCKETS = 5
# From here on the static pipeline's batches go in two halves.
_FILLING_BATCH = 2048
# Stages before which TorchRec's pipelines launch so much of their host time: stock's, traced on 4 x H200.
_HOST_SHARES = {INPUT_DIST: 0.39, FORWARD: 0.19, DENSE: 0.33, BACKWARD: 0.07, UPDATE: 0.02}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What the model knows of the machines."""

    limits: Limits
    costs: GpuCosts

    def us(self, name: str) -> float:
        """Returns the measured microseconds of the ceilings whose names begin so, at the limits' batch."""
        return sum(c["ms"] for c in self.limits["ceilings"] if c["name"].startswith(name)) * 1e3

    @property
    def dense_bytes(self) -> float:
        """Bytes of the dense gradients, in the format that they travel in."""
        return next(c["amount"] for c in self.limits["ceilings"] if c["name"] == ALL_REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What makes the model agree with a record."""

    gpu: float = 1.0
    """Factor on the GPU's work: kernels in an iteration, beside others and waiting, to kernels alone."""
    host_us: float = 0.0
    """Host time of an iteration; 0 where a graph is replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the plan gives the rank with most of it; of each, most may be another rank's."""

    local_batch_size: int
    fbgemm_us: float
    """FBGEMM's lookup, sort and update."""
    tables: TableTimes
    """The static pipeline's."""
    columns: int
    ids: int
    """Ids a sample of the tables that the rank has shards of."""
    node_ids: int
    """Ids a sample of the tables that the ranks of one node have shards of."""
    exchanged_bytes: int
    """Bytes of an element of pooled vectors and gradients: 2 in bf16, 4 otherwise."""
    peer_memory: bool
    """Whether what the ranks of a node exchange goes through peer memory."""


_plans: dict[tuple[ModelConfig, Topology, int, int, str, IdStatistics, bool], Plan] = {}


def plan_on(
    topology: Topology,
    model: ModelConfig,
    local_batch_size: int,
    exchanged_bytes: int,
    costs: GpuCosts,
    ids: IdStatistics,
    peer_memory: bool,
) -> Plan:
    """Returns the plan that the static pipeline would make, which takes about a second; of TorchRec's pipelines, too,
    whose planner may find none as good. ids: how often they name the same rows."""
    key = (model, topology, local_batch_size, exchanged_bytes, costs.measured_on, ids, peer_memory)
    if key not in _plans:
        _plans[key] = make_plan(
            model,
            topology,
            local_batch_size * topology.world_size,
            exchanged_bytes,
            memory_bytes=int(costs.memory_bytes * 0.95),
            replicate=topology.nodes > 1 or not peer_memory,
            split_rows=topology.nodes > 1,
            costs=costs,
            ids=ids,
        )
    return _plans[key]


def load_of(
    plan: Plan,
    topology: Topology,
    model: ModelConfig,
    local_batch_size: int,
    exchanged_bytes: int,
    costs: GpuCosts,
    ids: IdStatistics,
    peer_memory: bool,
) -> Load:
    """Returns the load of a plan; arguments as for `plan_on`."""
    batch, ranks, size = local_batch_size * topology.world_size, range(topology.world_size), topology.gpus_per_node
    shards = [plan.of_rank(rank) for rank in ranks]
    tables = [{shard.table for shard in own} for own in shards]
    of_nodes = [set().union(*tables[first : first + size]) for first in range(0, topology.world_size, size)]
    times = [
        table_times(own, model, batch, costs, ids, sharers)
        for own, sharers in zip(shards, sort_sharers(shards, topology), strict=True)
    ]
    own_ids, node_ids = ([sum(model.multi_hot_sizes[t] for t in of) for of in each] for each in (tables, of_nodes))
    return Load(
        local_batch_size=local_batch_size,
        fbgemm_us=max(fbgemm_us(own, model, batch, ids, costs) for own in shards),
        tables=max(times, key=lambda of_rank: of_rank.all),
        columns=max(sum(shard.columns for shard in own) for own in shards),
        ids=max(own_ids),
        node_ids=max(node_ids),
        exchanged_bytes=exchanged_bytes,
        peer_memory=peer_memory,
    )


def tasks_of(kind: Kind, load: Load, topology: Topology, system: System, fit: Fit) -> list[Task]:
    """Returns the tasks of an iteration of a pipeline on the GPU with most to do."""
    halves = 2 if kind == "static" and load.local_batch_size >= _FILLING_BATCH else 1
    tasks = [*_host(kind, fit), *_input_dist(kind, load, topology, system, fit)]
    tasks += _chain(kind, load, topology, system, fit, halves)
    if kind != "static":
        # TorchRec's pipelines launch in order: what a stage needs of the host comes before it.
        tasks = [_launched(task) for task in tasks]
    return tasks


def _host(kind: Kind, fit: Fit) -> list[Task]:
    if kind == "static" or fit.host_us == 0:
        return []
    order = list(_HOST_SHARES)
    return [
        Task(
            name=f"host {stage}",
            resource=HOST,
            us=share * fit.host_us,
            after=(f"host {order[i - 1]}",) if i else (),
        )
        for i, (stage, share) in enumerate(_HOST_SHARES.items())
    ]


def _launched(task: Task) -> Task:
    if task.stage is None or task.resource == HOST:
        return task
    return Task(
        name=task.name,
        resource=task.resource,
        us=task.us,
        stage=task.stage,
        after=(*task.after, f"host {task.stage}"),
        after_last=task.after_last,
    )


def _input_dist(kind: Kind, load: Load, topology: Topology, system: System, fit: Fit) -> list[Task]:
    """Brings the next batch's ids."""
    copy = system.us(BATCH_COPY) * load.local_batch_size / system.limits["config"]["local_batch_size"]
    # A batch comes in during the iteration before its own, not earlier.
    tasks = [Task(name="copy", resource=PCIE, us=copy, stage=INPUT_DIST, after_last=("lookup 0",))]
    if load.peer_memory:
        # Each node gets the ids of its tables once, and hands them on.
        to_node, away = 4.0 * load.node_ids * load.local_batch_size, topology.nodes - 1
        between = topology.network.latency_us + (away - 1) * topology.network.message_us if away else 0.0
        between += to_node * away / topology.network.bytes_per_us
        inside = _inside_us(4.0 * load.ids * load.local_batch_size * topology.nodes, load, topology, system)
        tasks += [
            Task(name="ids between", resource=NETWORK, us=between, stage=INPUT_DIST, after=("copy",)),
            Task(name="ids", resource=NVLINK, us=inside, stage=INPUT_DIST, after=("ids between",)),
        ]
    else:
        tasks += _exchange("ids", 4.0 * load.ids, load, topology, system, INPUT_DIST, ("copy",))
    if kind != "static":
        return tasks
    fixed = system.costs.sort_us
    sort = load.tables.picking + load.tables.sort - fixed
    return [
        *tasks,
        Task(name="sort's launches", resource="sort", us=fixed * fit.gpu, stage=INPUT_DIST, after=("ids",)),
        Task(name="sort", resource=GPU, us=sort * fit.gpu, stage=INPUT_DIST, after=("sort's launches",)),
    ]


def _chain(kind: Kind, load: Load, topology: Topology, system: System, fit: Fit, halves: int) -> list[Task]:
    """Lookup to updates, in so many halves of the batch."""
    batch, reference = load.local_batch_size, system.limits["config"]["local_batch_size"]
    # What a GEMM of few rows takes is mostly fixed; of many, their number: see dense_us.
    dense = dense_us(system, batch, reference) * fit.gpu
    if kind == "static":
        dense += elementwise_us(batch) * fit.gpu
        forward, update, fixed = load.tables.lookup, load.tables.update - system.costs.update_us, system.costs.update_us
    else:
        forward, update, fixed = load.fbgemm_us * _LOOKUP_SHARE, load.fbgemm_us * (1 - _LOOKUP_SHARE), 0.0
    tasks, sent = [], load.columns * load.exchanged_bytes / halves
    updates = [f"dense update {bucket}" for bucket in range(_BUCKETS)]
    last_updates = ("ids" if kind != "static" else "sort", "tables", *updates)
    for half in range(halves):
        lookup = Task(
            name=f"lookup {half}", resource=GPU, us=forward * fit.gpu / halves, stage=FORWARD, after_last=last_updates
        )
        tasks.append(lookup)
        tasks += _exchange(f"pooled {half}", sent, load, topology, system, FORWARD, (lookup.name,))
        chain = dense * (1 - _WEIGHT_GRADIENTS) / halves
        tasks.append(Task(name=f"dense {half}", resource=GPU, us=chain, stage=DENSE, after=(tasks[-1].name,)))
        tasks += _exchange(f"gradients {half}", sent, load, topology, system, BACKWARD, (f"dense {half}",))
    of_halves = tuple(task.name for task in tasks if task.name.startswith("gradients"))
    chains = tuple(f"dense {half}" for half in range(halves))
    # Each layer's gradients are exchanged as soon as they are there, and its weights updated.
    weights = dense * _WEIGHT_GRADIENTS / _BUCKETS
    adagrad = system.us(ADAGRAD) * fit.gpu / (topology.world_size if kind == "static" else 1) / _BUCKETS
    for bucket in range(_BUCKETS):
        name = f"weight gradients {bucket}"
        tasks += [
            Task(name=name, resource=GPU, us=weights, stage=DENSE, after=chains),
            *_all_reduce(bucket, load, topology, system, (name,)),
            Task(name=updates[bucket], resource=GPU, us=adagrad, stage=UPDATE, after=(f"reduce {bucket} between",)),
        ]
    launches = Task(name="update's launches", resource="update", us=fixed * fit.gpu, stage=BACKWARD, after=of_halves)
    tables = Task(name="tables", resource=GPU, us=update * fit.gpu, stage=BACKWARD, after=(launches.name,))
    return [*tasks, launches, tables]


def dense_us(system: System, batch: int, reference: int) -> float:
    """Returns the GEMMs of a batch, alone: at least those of the limits' batch, and above it what 587 TFLOP/s give, the
    measured rate at 6912 samples a GPU (2 x H200, bf16)."""
    flop = sum(c["amount"] for c in system.limits["ceilings"] if c["name"].startswith("GEMM: "))
    return max(system.us("GEMM: "), flop * batch / reference / 587e6)


def _exchange(
    name: str,
    sample_bytes: float,
    load: Load,
    topology: Topology,
    system: System,
    stage: str,
    after: tuple[str, ...],
) -> list[Task]:
    """An all-to-all: sample_bytes of each sample of the global batch leave, or reach, the rank with most.

    Where there is peer memory it goes through that first, then between equal local ranks: a message for each node.
    Otherwise a message goes to each GPU, inside and between nodes at once.
    """
    network = topology.network
    to_each = sample_bytes * load.local_batch_size
    away = topology.nodes - 1
    inside = _inside_us(to_each * (topology.nodes if load.peer_memory else 1), load, topology, system)
    messages = away if load.peer_memory else away * topology.gpus_per_node
    between = 0.0
    if away:
        between = network.latency_us + (messages - 1) * network.message_us
        between += to_each * away * topology.gpus_per_node / network.bytes_per_us
    first = Task(name=f"{name} inside", resource=NVLINK, us=inside, stage=stage, after=after)
    next_after = (first.name,) if load.peer_memory else after
    second = Task(name=f"{name} between", resource=NETWORK, us=between, stage=stage, after=next_after)
    done = Task(name=name, resource="nothing", us=0.0, stage=stage, after=(first.name, second.name))
    return [first, second, done]


def _inside_us(to_each: float, load: Load, topology: Topology, system: System) -> float:
    """An all-to-all inside a node, of so many bytes between the busiest rank and each other one."""
    if topology.gpus_per_node == 1:
        return 0.0
    costs, leaves = system.costs, to_each * (topology.gpus_per_node - 1)
    if load.peer_memory:
        return costs.peer_exchange_us + leaves / costs.peer_bytes_per_us
    return costs.all_to_all_us + leaves / costs.all_to_all_bytes_per_us


def _all_reduce(bucket: int, load: Load, topology: Topology, system: System, after: tuple[str, ...]) -> list[Task]:
    """One bucket of dense gradients: inside a node as measured, between nodes a slice of each GPU, once there and once
    back."""
    size = topology.gpus_per_node
    if load.peer_memory:  # of each slice, gradients come from all ranks, and weights go to all
        inside = _inside_us(2 * system.dense_bytes / _BUCKETS / size, load, topology, system)
    else:
        inside = system.us(ALL_REDUCE) / _BUCKETS if size > 1 else 0.0
    between, away = 0.0, topology.nodes - 1
    if away:
        travels = 2 * system.dense_bytes / _BUCKETS / size * away / topology.nodes
        steps = 2 * topology.nodes.bit_length()  # a tree's
        between = topology.network.latency_us + steps * topology.network.message_us
        between += travels / topology.network.bytes_per_us
    name = f"reduce {bucket}"
    return [
        Task(name=f"{name} inside", resource=NVLINK, us=inside, stage=DENSE, after=after),
        Task(name=f"{name} between", resource=NETWORK, us=between, stage=DENSE, after=(f"{name} inside",)),
    ]
