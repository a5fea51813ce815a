"""The model of benchmarks whose tables are not pooled, under the static pipeline, fitted to a record of few GPUs.

The record's period, without its exchanges between ranks, is work of the GPU, in proportion to the samples and to the
operations of a sample. Other ranks add, in a chain with it: an all-to-all of the distinct rows of a rank's batch before
the dense network, one of their gradients after it, beside an all-reduce of the dense gradients, all in fp32; and
waiting for the rank with the most operations. Exchanges of ids run beside the chain, and are left out.
"""

from dataclasses import dataclass, replace

from dlrm_bench.bench.limits.efficiency import sizes_of
from dlrm_bench.bench.records.record import Record
from dlrm_bench.bench.records.schema import RunRecord
from dlrm_bench.bench.scale.scaling import kind_of, period_ms, topology_of
from dlrm_bench.bench.scale.simulation import Steady, Task, simulate
from dlrm_bench.bench.scale.work import BACKWARD, DENSE, FORWARD, GPU, Kind, all_reduce, exchange
from dlrm_bench.dlrm.benchmark import Benchmark, ManyRanks, SampleSizes, ToTarget, Work
from dlrm_bench.dlrm.benchmarks import benchmark_of, restored
from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.gpu_types import GpuCosts, costs_of
from dlrm_bench.dlrm.runtime.topology import INFINIBAND_400G, Network, Topology

ROOM = 2.3
"""Entries of the lists that ranks exchange, over the rows of a batch: 44,032 for 19,265 in record 64, on two ranks. A
list has room for the largest of many batches, and a slack."""
_FP32 = 4
KNOWN_ERRORS = (
    "Known errors for tables that are not pooled. Fitted to one GPU of record 66, the model says 209.7 ms for two at "
    "the same sizes of samples, where record 64 took 210.6 on others; by the sizes that both records name it says 253, "
    "20 % too much, because these are means of four batches. No record has more than two GPUs. Left out are memory "
    "and, of a run to the target, its start, captures and pauses for larger rooms."
)
"""Errors against committed records; tests/bench/scale/test_unpooled.py recomputes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpooledPoint:
    """The prediction for one number of nodes."""

    topology: Topology
    global_batch_size: int
    steady: Steady
    """An iteration on samples as the record's."""
    in_run: Steady
    """An iteration on samples as the mean of a run to the target."""
    evaluation_s: float
    """Seconds of an evaluation's forward passes."""
    to_target: ToTarget | None
    assumed: str
    """The benchmark's assumptions."""

    @property
    def minutes(self) -> float | None:
        """Minutes of iterations and evaluations up to the target; None if its samples are unknown."""
        if self.to_target is None:
            return None
        iterations = self.to_target.samples / self.global_batch_size
        return (iterations * self.in_run.iteration_us / 1e6 + self.to_target.evaluations * self.evaluation_s) / 60


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpooledScaling:
    """The model of one record."""

    benchmark: Benchmark
    work: Work
    training: TrainingConfig
    """The configuration that the record trained."""
    sizes: SampleSizes
    world_size: int
    """Number of the record's ranks."""
    costs: GpuCosts
    fitted_to: str
    gpu_us: float = 0.0
    """Microseconds of the GPU's work on a mean rank."""
    kind: Kind = "static"

    def many(self, topology: Topology, samples: int) -> ManyRanks:
        """Returns the benchmark's figures for these ranks, of `samples` samples each."""
        assert self.benchmark.many_ranks is not None  # fit_unpooled checks it
        training = replace(self.training, local_batch_size=samples)
        return self.benchmark.many_ranks(training, self.sizes, self.world_size, topology.world_size)

    def steady(
        self, topology: Topology, samples: int, operations: float = 1.0, rows: float = 1.0, trains: bool = True
    ) -> Steady:
        """Returns the steady state of iterations of `samples` samples a rank. operations, rows: of a sample, over those
        of the record's. trains: otherwise the exchanges are those of an evaluation."""
        many = self.many(topology, samples)
        vectors = self.work.table_work(self.training, samples, _FP32, self.sizes).vectors
        to_each = _FP32 * vectors * rows * many.rows * ROOM / topology.world_size
        gpu = self.gpu_us * operations * (1 + many.imbalance) * samples / self.training.local_batch_size
        last = ("gradients", "reduce between") if trains else ("dense",)
        tasks = [
            Task(name="lookup", resource=GPU, us=0.0, stage=FORWARD, after_last=last),
            *exchange("rows", to_each, topology, self.costs, FORWARD, ("lookup",)),
            Task(name="dense", resource=GPU, us=gpu, stage=DENSE, after=("rows",)),
        ]
        if trains:
            size = float(_FP32 * self.work.dense_weights(self.training))
            tasks += exchange("gradients", to_each, topology, self.costs, BACKWARD, ("dense",))
            tasks += all_reduce("reduce", size, topology, self.costs, ("dense",))
        return simulate(tasks)

    def point(self, topology: Topology, local_batch_size: int | None = None) -> UnpooledPoint:
        """Returns the prediction for these nodes. Rows of a run's samples grow like their operations."""
        samples = local_batch_size or self.training.local_batch_size
        many, global_batch_size = self.many(topology, samples), samples * topology.world_size
        evaluation = self.steady(topology, samples, many.of_evaluation, many.of_run, trains=False)
        return UnpooledPoint(
            topology=topology,
            global_batch_size=global_batch_size,
            steady=self.steady(topology, samples),
            in_run=self.steady(topology, samples, many.of_run, many.of_run),
            evaluation_s=many.evaluated / global_batch_size * evaluation.iteration_us / 1e6,
            to_target=many.to_target,
            assumed=many.assumed,
        )

    def ms_of(self, record: RunRecord, network: Network = INFINIBAND_400G) -> float:
        """Returns the milliseconds that the model predicts for another record's ranks, samples and their sizes."""
        other = restored(record["config"])
        of_sample = self.work.flop_per_sample(other, sizes_of(record))
        operations = of_sample / self.work.flop_per_sample(self.training, self.sizes)
        return self.steady(topology_of(record, network), other.local_batch_size, operations).iteration_us / 1e3


def is_unpooled(record: RunRecord) -> bool:
    """Whether a record's benchmark has tables that are not pooled, and figures for many ranks."""
    benchmark = benchmark_of(record["config"])
    return benchmark is not None and benchmark.many_ranks is not None


def fit_unpooled(read: Record) -> UnpooledScaling:
    """Returns the model fitted to a record for which `is_unpooled` holds. ValueError if its pipeline is not the static
    one, or if the exchanges alone take longer than it."""
    record, benchmark = read.run, benchmark_of(read.run["config"])
    assert benchmark is not None
    assert benchmark.work is not None
    if kind_of(record) != "static":
        raise ValueError(
            f"record {record['id']} is of pipeline {kind_of(record)} with tables that are not pooled, which scale does "
            "not model: give one of --pipeline static"
        )
    training, topology, target = benchmark.restored(record["config"]), topology_of(record), period_ms(read) * 1e3
    scaling = UnpooledScaling(
        benchmark=benchmark,
        work=benchmark.work,
        training=training,
        sizes=sizes_of(record),
        world_size=topology.world_size,
        costs=costs_of(record["machine"]["gpu"]),
        fitted_to=record["id"],
    )
    exchanges = scaling.steady(topology, training.local_batch_size).iteration_us
    if exchanges >= target:
        raise ValueError(f"record {record['id']} takes {target:.0f} us per iteration, but exchanges {exchanges:.0f} us")
    imbalance = scaling.many(topology, training.local_batch_size).imbalance
    return replace(scaling, gpu_us=(target - exchanges) / (1 + imbalance))
