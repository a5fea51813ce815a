"""The work of one iteration on one GPU of many, from the measured rates of one node and the stated rates of a network.

GPU work is that of the busiest rank: for the static pipeline by the planner's costs, which are those of its kernels,
for other pipelines by FBGEMM's times. One factor on GPU work, `Fit.gpu`, makes the model agree with a record. Host work
is that of the record, regardless of the number of nodes.
"""

import functools
from dataclasses import dataclass, replace
from typing import Literal

from dlrm_bench.bench.profile.kernel_names import STAGES
from dlrm_bench.bench.records.limits import ADAGRAD, ALL_REDUCE, BATCH_COPY, Limits
from dlrm_bench.bench.scale.kernel_times import elementwise_us, fbgemm_us
from dlrm_bench.bench.scale.simulation import Task
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.gpu_types import GpuCosts
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.costs import TableTimes, table_times
from dlrm_bench.dlrm.tables.plan.plan import Plan
from dlrm_bench.dlrm.tables.plan.planner import plan_for
from dlrm_bench.dlrm.tables.plan.sort_shares import SavedBySharing
from dlrm_bench.dlrm.tables.table_memory import HEADROOM
from dlrm_bench.pipeline.static.options import StaticOptions

Kind = Literal["torchrec", "five-stage", "static"]
INPUT_DIST, FORWARD, DENSE, BACKWARD, UPDATE = STAGES
HOST, GPU, NVLINK, NETWORK, PCIE = "host", "GPU", "NVLink", "network", "PCIe"

# Share of the forward in FBGEMM's forward and backward: 203 of 993 us at 6912 samples per GPU (8 x H200). The backward
# sorts.
_LOOKUP_SHARE = 0.2
# Share of weight gradients in the dense work: one of a layer's three products.
_WEIGHT_GRADIENTS = 1 / 3
# Buckets of dense weights: three cross layers, two MLPs.
_BUCKETS = 5
# The share of TorchRec's host time that comes before each stage: stock's, traced on 4 x H200.
_HOST_SHARES = {INPUT_DIST: 0.39, FORWARD: 0.19, DENSE: 0.33, BACKWARD: 0.07, UPDATE: 0.02}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The measured and stated figures of the machines."""

    limits: Limits
    costs: GpuCosts

    def us(self, name: str) -> float:
        """Returns the measured microseconds of all ceilings whose names begin with `name`, at the batch of the
        limits."""
        return sum(c["ms"] for c in self.limits["ceilings"] if c["name"].startswith(name)) * 1e3

    @property
    def dense_bytes(self) -> float:
        """Bytes of the dense gradients, in the format of their all-reduce."""
        return next(c["amount"] for c in self.limits["ceilings"] if c["name"] == ALL_REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The parameters that make the model agree with a record."""

    gpu: float = 1.0
    """Factor on the GPU's work: time of kernels in an iteration, overlapped and waiting, over the time of the kernels
    alone."""
    host_us: float = 0.0
    """Host time of an iteration; 0 if a graph is replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The largest value of each field over the ranks; different fields may be of different ranks."""

    local_batch_size: int
    fbgemm_us: float
    """Time of FBGEMM's lookup, sort and update."""
    tables: TableTimes
    """Times of the static pipeline's kernels."""
    columns: int
    ids: int
    """Number of ids per sample in the tables of the rank's shards."""
    node_ids: int
    """Number of ids per sample in the tables of the shards of one node's ranks."""
    exchanged_bytes: int
    """Bytes of an element of pooled vectors and gradients: 2 in bf16, 4 otherwise."""
    peer_memory: bool
    """Whether the ranks of a node exchange through peer memory."""


@functools.cache
def plan_on(topology: Topology, training: TrainingConfig, costs: GpuCosts, options: StaticOptions) -> Plan:
    """Returns the static pipeline's plan, which takes about a second. The model gives it to TorchRec's pipelines too,
    though their planner may find none as good."""
    return plan_for(
        training,
        topology,
        None if options.dynamic_rows is not None else int(costs.memory_bytes * HEADROOM),
        options.replicates(topology.nodes),
        options.splits_rows(topology.nodes),
        costs,
        options.constraints_on(training.model.tables),
        options.splits_columns,
    )


def load_of(plan: Plan, topology: Topology, training: TrainingConfig, costs: GpuCosts, peer_memory: bool) -> Load:
    """Returns the load of a plan."""
    tables, ids = training.model.tables, training.data.id_statistics
    batch, ranks = training.local_batch_size * topology.world_size, range(topology.world_size)
    size = topology.gpus_per_node
    shards = [plan.of_rank(rank) for rank in ranks]
    held = [{shard.table for shard in own} for own in shards]
    of_nodes = [set().union(*held[first : first + size]) for first in range(0, topology.world_size, size)]
    saved = SavedBySharing(tables, batch, costs).us(shards, topology)
    times = [table_times(own, tables, batch, costs, ids, us) for own, us in zip(shards, saved, strict=True)]
    own_ids, node_ids = ([sum(tables.hot[t] for t in of) for of in each] for each in (held, of_nodes))
    return Load(
        local_batch_size=training.local_batch_size,
        fbgemm_us=max(fbgemm_us(own, tables, batch, ids, costs) for own in shards),
        tables=max(times, key=lambda of_rank: of_rank.all),
        columns=max(sum(shard.columns for shard in own) for own in shards),
        ids=max(own_ids),
        node_ids=max(node_ids),
        exchanged_bytes=training.pooled_bytes,
        peer_memory=peer_memory,
    )


def tasks_of(kind: Kind, load: Load, topology: Topology, system: System, fit: Fit, parts: int) -> list[Task]:
    """Returns the tasks of an iteration on the busiest GPU. parts: number of parts of the batch from lookup to
    gradients."""
    tasks = [*_host(kind, fit), *_input_dist(kind, load, topology, system, fit)]
    tasks += _chain(kind, load, topology, system, fit, parts)
    if kind != "static":
        # TorchRec's pipelines launch in order: the host time of a stage comes before its kernels.
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
    return replace(task, after=(*task.after, f"host {task.stage}"))


def _input_dist(kind: Kind, load: Load, topology: Topology, system: System, fit: Fit) -> list[Task]:
    """Returns the tasks that bring the next batch's ids."""
    copy = system.us(BATCH_COPY) * load.local_batch_size / system.limits["config"]["local_batch_size"]
    # A batch is copied during the previous iteration, not earlier.
    tasks = [Task(name="copy", resource=PCIE, us=copy, stage=INPUT_DIST, after_last=("lookup 0",))]
    if load.peer_memory:
        # Each node receives the ids of its tables once; its GPUs pass them on.
        to_node, away = 4.0 * load.node_ids * load.local_batch_size, topology.nodes - 1
        between = topology.network.latency_us + (away - 1) * topology.network.message_us if away else 0.0
        between += to_node * away / topology.network.bytes_per_us
        inside = inside_us(4.0 * load.ids * load.local_batch_size * topology.nodes, topology, system.costs, True)
        tasks += [
            Task(name="ids between", resource=NETWORK, us=between, stage=INPUT_DIST, after=("copy",)),
            Task(name="ids", resource=NVLINK, us=inside, stage=INPUT_DIST, after=("ids between",)),
        ]
    else:
        sent = 4.0 * load.ids * load.local_batch_size
        tasks += exchange("ids", sent, topology, system.costs, INPUT_DIST, ("copy",))
    if kind != "static":
        return tasks
    fixed = system.costs.sort_us
    sort = load.tables.picking + load.tables.sort - fixed
    return [
        *tasks,
        Task(name="sort's launches", resource="sort", us=fixed * fit.gpu, stage=INPUT_DIST, after=("ids",)),
        Task(name="sort", resource=GPU, us=sort * fit.gpu, stage=INPUT_DIST, after=("sort's launches",)),
    ]


def _chain(kind: Kind, load: Load, topology: Topology, system: System, fit: Fit, parts: int) -> list[Task]:
    """Returns the tasks from lookup to updates."""
    batch, reference = load.local_batch_size, system.limits["config"]["local_batch_size"]
    # The time of a GEMM is nearly fixed for few rows and proportional to their number for many: see dense_us.
    dense = dense_us(system, batch, reference) * fit.gpu
    if kind == "static":
        dense += elementwise_us(batch) * fit.gpu
        forward, update, fixed = load.tables.lookup, load.tables.update - system.costs.update_us, system.costs.update_us
    else:
        forward, update, fixed = load.fbgemm_us * _LOOKUP_SHARE, load.fbgemm_us * (1 - _LOOKUP_SHARE), 0.0
    tasks, sent = [], load.columns * load.exchanged_bytes / parts * load.local_batch_size
    peer, costs = load.peer_memory, system.costs
    updates = [f"dense update {bucket}" for bucket in range(_BUCKETS)]
    last_updates = ("ids" if kind != "static" else "sort", "tables", *updates)
    for part in range(parts):
        lookup = Task(
            name=f"lookup {part}", resource=GPU, us=forward * fit.gpu / parts, stage=FORWARD, after_last=last_updates
        )
        tasks.append(lookup)
        tasks += exchange(f"pooled {part}", sent, topology, costs, FORWARD, (lookup.name,), peer)
        chain = dense * (1 - _WEIGHT_GRADIENTS) / parts
        tasks.append(Task(name=f"dense {part}", resource=GPU, us=chain, stage=DENSE, after=(tasks[-1].name,)))
        tasks += exchange(f"gradients {part}", sent, topology, costs, BACKWARD, (f"dense {part}",), peer)
    of_parts = tuple(task.name for task in tasks if task.name.startswith("gradients"))
    chains = tuple(f"dense {part}" for part in range(parts))
    # Each layer's gradients are exchanged, and its weights updated, as soon as they are computed.
    weights = dense * _WEIGHT_GRADIENTS / _BUCKETS
    adagrad = system.us(ADAGRAD) * fit.gpu / (topology.world_size if kind == "static" else 1) / _BUCKETS
    bucket_bytes, measured = system.dense_bytes / _BUCKETS, None if peer else system.us(ALL_REDUCE) / _BUCKETS
    for bucket in range(_BUCKETS):
        name = f"weight gradients {bucket}"
        tasks += [
            Task(name=name, resource=GPU, us=weights, stage=DENSE, after=chains),
            *all_reduce(f"reduce {bucket}", bucket_bytes, topology, costs, (name,), peer, measured),
            Task(name=updates[bucket], resource=GPU, us=adagrad, stage=UPDATE, after=(f"reduce {bucket} between",)),
        ]
    launches = Task(name="update's launches", resource="update", us=fixed * fit.gpu, stage=BACKWARD, after=of_parts)
    tables = Task(name="tables", resource=GPU, us=update * fit.gpu, stage=BACKWARD, after=(launches.name,))
    return [*tasks, launches, tables]


def dense_us(system: System, batch: int, reference: int) -> float:
    """Returns the microseconds of a batch's GEMMs alone: those of the limits' batch, or longer at 587 TFLOP/s, the rate
    measured at 6912 samples per GPU (2 x H200, bf16)."""
    flop = sum(c["amount"] for c in system.limits["ceilings"] if c["name"].startswith("GEMM: "))
    return max(system.us("GEMM: "), flop * batch / reference / 587e6)


def exchange(
    name: str,
    to_each: float,
    topology: Topology,
    costs: GpuCosts,
    stage: str,
    after: tuple[str, ...],
    peer_memory: bool = False,
) -> list[Task]:
    """Returns the tasks of an all-to-all in which `to_each` bytes leave the busiest rank for each other rank, or reach
    it from each.

    With peer memory, bytes move inside the node first, then between equal local ranks in one message per node.
    Otherwise a message goes to each GPU, inside and between nodes at once.
    """
    network = topology.network
    away = topology.nodes - 1
    inside = inside_us(to_each * (topology.nodes if peer_memory else 1), topology, costs, peer_memory)
    messages = away if peer_memory else away * topology.gpus_per_node
    between = 0.0
    if away:
        between = network.latency_us + (messages - 1) * network.message_us
        between += to_each * away * topology.gpus_per_node / network.bytes_per_us
    first = Task(name=f"{name} inside", resource=NVLINK, us=inside, stage=stage, after=after)
    next_after = (first.name,) if peer_memory else after
    second = Task(name=f"{name} between", resource=NETWORK, us=between, stage=stage, after=next_after)
    done = Task(name=name, resource="nothing", us=0.0, stage=stage, after=(first.name, second.name))
    return [first, second, done]


def inside_us(to_each: float, topology: Topology, costs: GpuCosts, peer_memory: bool) -> float:
    """Returns the microseconds of an all-to-all inside a node, of `to_each` bytes from the busiest rank to each
    other."""
    if topology.gpus_per_node == 1:
        return 0.0
    leaves = to_each * (topology.gpus_per_node - 1)
    if peer_memory:
        return costs.peer_exchange_us + leaves / costs.peer_bytes_per_us
    return costs.all_to_all_us + leaves / costs.all_to_all_bytes_per_us


def all_reduce(
    name: str,
    size: float,
    topology: Topology,
    costs: GpuCosts,
    after: tuple[str, ...],
    peer_memory: bool = False,
    measured_us: float | None = None,
) -> list[Task]:
    """Returns the tasks that sum `size` bytes of dense gradients: inside a node, then between nodes one slice per GPU,
    there and back.

    measured_us: time of the part inside a node; None: by the rates of all-to-alls, as gradients of each slice come from
    all ranks, and its sums or weights go to all ranks.
    """
    inside = inside_us(2 * size / topology.gpus_per_node, topology, costs, peer_memory)
    if measured_us is not None and topology.gpus_per_node > 1:
        inside = measured_us
    between, away = 0.0, topology.nodes - 1
    if away:
        travels = 2 * size / topology.gpus_per_node * away / topology.nodes
        steps = 2 * topology.nodes.bit_length()  # of a tree
        between = topology.network.latency_us + steps * topology.network.message_us
        between += travels / topology.network.bytes_per_us
    return [
        Task(name=f"{name} inside", resource=NVLINK, us=inside, stage=DENSE, after=after),
        Task(name=f"{name} between", resource=NETWORK, us=between, stage=DENSE, after=(f"{name} inside",)),
    ]
