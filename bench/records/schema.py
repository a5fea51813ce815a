"""The form of run.json: RunRecord, and its blocks in their order in the file."""

from typing import Any, Literal, NotRequired, TypedDict

RECORD_SCHEMA = 2
READABLE_SCHEMAS = (1, 2)


class RunRecord(TypedDict):
    """The content of run.json."""

    schema: int
    id: str
    created: str
    """ISO 8601, UTC."""
    command: str
    git: "Git"
    provenance: NotRequired["Provenance"]
    config: dict[str, Any]
    """The resolved RunConfig, with world_size and global_batch_size."""
    pipeline: dict[str, Any]
    """Decisions of the pipeline, such as its sharding plan."""
    machine: "Machine"
    warmup_iterations: int
    """Number of first iterations, in iterations.npz, that the summaries leave out."""
    latency_ms: "LatencySummary | None"
    """None where the run ended within the warm-up."""
    samples_per_second: float | None
    """Global batch size over the time by the clock; evaluations do not count. Files of older records have it over the
    mean latency of the slowest ranks; read_record makes it anew."""
    efficiency: NotRequired["Efficiency | None"]
    """None for profiled runs and without GPUs; absent in older records."""
    memory_gb: "Memory | None"
    host: dict[str, float] | None
    """This field and the following ones down to kernels are those of Profile; None in the record of a timed run."""
    host_threads_ms: NotRequired[dict[str, float] | None]
    gpu: dict[str, float] | None
    stages_ms: dict[str, float] | None
    host_stages_ms: NotRequired[dict[str, float] | None]
    timeline: NotRequired["dict[str, Span] | None"]
    kernels: NotRequired["list[Kernel] | None"]
    gpu_of_ranks: NotRequired["list[dict[str, float]] | None"]
    conditions: NotRequired["Telemetry | None"]
    sample_sizes: NotRequired[dict[str, float] | None]
    """Means over samples of what their work depends on and the configuration does not say, by the benchmark's names
    (benchmark.SampleSizes); None where nothing does."""
    checkpoints: NotRequired["Checkpointing | None"]
    """None where the run neither saved nor resumed."""
    training: "Training | None"


class Git(TypedDict):
    """State of the source tree."""

    commit: str | None
    dirty: bool | None
    """Whether the program's files, or tracked ones, differ from the commit; None where it cannot be known."""
    source: NotRequired[str | None]
    """Hash of the program's files as they ran: see bench/machine/source.py. Older records have none."""


class Provenance(TypedDict):
    """The environment of a run beside machine and source."""

    packages: dict[str, str]
    """Version of each installed distribution that the run had imported."""
    environment: dict[str, str]
    """Variables that the libraries read, by name."""
    started_by: "StartedBy"


class StartedBy(TypedDict):
    """The way in which the ranks were started."""

    launcher: str
    """torchrun, srun, fork server (of dlrm-bench's ladders), or python."""
    command: list[str]
    """Command line of the process that started rank 0; empty where it cannot be read."""
    local_world_size: int


class Machine(TypedDict):
    """The machine that a run used. All GPUs and nodes are taken to be like rank 0's; GB are 10^9 bytes."""

    nodes: int
    """Number of torchruns that started ranks; in older records, number of distinct host names of the ranks."""
    hosts: NotRequired[list[str]]
    """Their host names, in the order of their first ranks; absent in older records."""
    gpus: int
    """Number of distinct GPUs over all ranks; 0 on CPUs."""
    gpu: str | None
    """Name of the GPUs; where they differ, all names joined by ' + '."""
    gpu_memory_gb: float | None
    gpu_uuids: NotRequired[list[str]]
    """UUIDs of the ranks' GPUs, in the order of the ranks, which tell machines of one description apart. Absent in
    older records, as the fields below that are marked so."""
    gpu_numa: NotRequired[list[int | None] | None]
    """NUMA node of each rank's GPU, as Linux gives it."""
    boots: NotRequired[list[str]]
    """Linux's random id of each node's boot, which tells hosts of one name apart."""
    cpu: str | None
    cpu_governor: NotRequired[str | None]
    """The clock that Linux asks for, such as 'performance'; None where it does not decide, as in virtual machines."""
    cpu_mhz: NotRequired[list[float] | None]
    """[min, median, max] over the cores' clocks at the time of the description."""
    cpu_max_mhz: NotRequired[float | None]
    numa: NotRequired[list[str]]
    """CPUs of each NUMA node, such as '0-31'."""
    rank_cpus: NotRequired[list[str | None]]
    """CPUs on which each rank may run."""
    kernel: NotRequired[str | None]
    """Linux's release."""
    cores: int | None
    """Logical CPUs of a node."""
    memory_gb: float | None
    """Main memory of a node."""
    driver: str | None
    cuda: str | None
    """CUDA version that torch was built for."""
    nccl: str | None
    python: str
    torch: str
    torchrec: str | None
    fbgemm_gpu: str | None
    power_limit_w: float | None
    """Enforced limit of one GPU."""
    sm_clock_mhz: int | None
    """Clock of the SMs at the time of the description."""
    sm_clock_max_mhz: int | None
    topology: str | None
    """Links of one GPU to the others, such as 'nvlink: 18 links a GPU, 26.6 GB/s each, to NVSwitch'."""


class LatencySummary(TypedDict):
    """Latency of an iteration, which is that of its slowest rank, in milliseconds, after the warm-up."""

    n: int
    mean: float
    by_clock: NotRequired[float]
    """Elapsed time over iterations: of the rank that took longest for all of them. Ranks that are slow in turn make the
    mean of the slowest rank larger than this. Samples per second follow from it; files of older records lack it, and
    read_record adds it."""
    p50: float
    p90: float
    p99: float
    ci95: list[float] | None
    """[low, high] of the median by this one run; None where it has too few iterations. Readers compute it from the raw
    times: older versions of the harness made narrower ones."""
    drift: NotRequired[float | None]
    """Median of the later of the slowest and the fastest eighth over that of the earlier one, minus 1; None for too few
    iterations. Older records lack this field and the next, or have the last quarter's over the first's."""
    steady: NotRequired[bool | None]
    """Whether that change is no more than chance: see bench/stats/series.py."""


class Memory(TypedDict):
    """GPU memory in GB (10^9 bytes)."""

    peak_allocated: list[float]
    """Peak of the memory allocated for tensors, for each rank."""


class Profile(TypedDict):
    """Results of a profiled run, per iteration and as mean of the ranks."""

    host: dict[str, float]
    """CPU and wall time in milliseconds, and the number of CUDA calls of each kind."""
    host_threads_ms: dict[str, float]
    """CPU time of each thread but the launching one; empty where the kernel does not give it."""
    gpu: dict[str, float] | None
    stages_ms: dict[str, float] | None
    """Time of each stage on the GPU; on the host where there is none. This field and the following ones are None in a
    run for another profiler, without counts."""
    host_stages_ms: dict[str, float] | None
    timeline: "dict[str, Span] | None"
    """Stages that had work; on the host where there is no GPU."""
    kernels: "list[Kernel] | None"
    """Kernels and copies of the GPU, longest first."""
    gpu_of_ranks: "list[dict[str, float]] | None"
    """The block `gpu` of each rank's trace; `gpu` has their means, but the largest idle fraction."""


class Span(TypedDict):
    """The span of a stage, in milliseconds from the iteration's beginning: that of its first kernel, or on the host."""

    start_ms: float
    end_ms: float
    busy_ms: float
    """Time, between start and end, in which the stage had work; the rest is waiting or other stages."""


class Kernel(TypedDict):
    """All kernels or copies of one name and stage, per iteration. Times in microseconds, as mean of the ranks."""

    name: str
    """Short name: see bench/profile/kernel_names.py."""
    stage: str
    calls: float
    us: float
    """Sum of durations. Those of collectives include waiting for other ranks."""
    least_us: float
    """Time on the rank with the least, and below with the most: far apart where work is imbalanced."""
    most_us: float


class Telemetry(TypedDict):
    """The state of the machine during a run. The triples are [min, median, max] over all ranks and samples."""

    interval_s: float
    """The longest time between two samples."""
    samples: int
    """Number of samples of each rank; 0 where NVML does not work."""
    sm_clock_mhz: list[float] | None
    temperature_c: list[float] | None
    power_w: list[float] | None
    throttled: bool | None
    """None where NVML does not know."""
    throttling: "list[Throttling]"
    clock_jump_s: NotRequired[float | None]
    """Seconds by which the wall clock went further than the monotonic one; None within a second."""
    gc_iterations: list[int]
    """Iterations, of any rank, in which Python's garbage collector ran."""
    ranks: NotRequired["list[SampleSeries]"]
    """Samples of each rank; absent in older records."""
    joules_per_iteration: NotRequired[float | None]
    """Energy of all GPUs for an iteration after the warm-up, evaluations left out; None where NVML counts none. Records
    of evaluating runs before 23 November 2026 count evaluations in."""


class Efficiency(TypedDict):
    """Efficiency of a timed run's GPUs in time and power."""

    samples_per_second_per_gpu: float
    mfu: float | None
    """FLOP of the model's GEMMs a second, as a share of the maker's figure for the run's precision; None where that is
    unknown."""
    joules_per_sample: float | None
    """None where NVML counts no energy."""


class SampleSeries(TypedDict):
    """Samples of one rank's GPU by NVML, in the order of time; of many, 10 of the warm-up and 100 after it."""

    gpu: NotRequired[str | None]
    """UUID of the GPU, which ranks may share; None where NVML does not know. Records without this field count the
    energy of a GPU once for each of its ranks."""
    iteration: list[int]
    """Iterations launched by then."""
    sm_clock_mhz: list[float | None]
    temperature_c: list[float | None]
    power_w: list[float | None]
    clocks_event_reasons: list[int | None]
    """Bits of nvmlClocksEventReasons."""
    energy_j: list[float | None]
    """Energy since the driver was loaded."""


class Throttling(TypedDict):
    """A span of iterations in which a GPU was throttled, by its samples."""

    rank: int
    reason: str
    first_iteration: int
    last_iteration: int


class Checkpointing(TypedDict):
    """The checkpoints that a run wrote, and the one that it resumed."""

    saved: "list[SavedCheckpoint]"
    resumed: "ResumedFrom | None"
    snapshots: NotRequired["list[TakenSnapshot]"]
    """Those in memory."""
    prepared_s: NotRequired[float]
    """Seconds before the training to make, map and register the memory of snapshots."""
    left_out: NotRequired[int]
    """Number of snapshots that were due while the only memory for them was not yet on disk."""


class TakenSnapshot(TypedDict):
    """A snapshot that the run took in the memory of its node."""

    iteration: int
    gb: float
    """Size of weights and optimizer state of all ranks."""
    paused_s: float
    """Seconds for which the training waited."""


class SavedCheckpoint(TakenSnapshot):
    """A checkpoint that the run wrote."""

    write_s: float
    """Seconds until all was on disk, with those of `paused_s` where the training waited for all of it."""


class ResumedFrom(TypedDict):
    """The checkpoint that a run resumed. Losses and latencies of the record are those of its own iterations;
    iterations.npz has the earlier losses as `loss_before`, and in `samples_before` the number of samples trained on
    after each."""

    run_id: str
    """Id of the run that wrote it."""
    iteration: int
    """Number of iterations of this run's global batch size that had been trained."""
    samples: NotRequired[int]
    """Number of samples that had been trained on."""
    read_s: float
    """Seconds to read it."""
    folder: NotRequired[str]
    """Its folder, on disk or in memory."""


TrainingStatus = Literal["success", "aborted", "no_target"]
"""aborted: the target was missed. no_target: the run only measured latency, and its MLPerf log says success."""


class Training(TypedDict):
    """The outcome of the training."""

    losses: "Losses"
    auc: float | None
    """AUC of the last evaluation."""
    target: float | None
    best_auc: float | None
    """The best AUC that any model can reach on this data, where it is known."""
    epoch_num: float
    """Fraction of the epoch trained; for random batches, of the planned iterations (0 in older records)."""
    status: TrainingStatus
    train_metrics: NotRequired["TrainMetricValues"]
    """Metrics of the last whole --loss-interval iterations, with --train-metrics."""


class TrainMetricValues(TypedDict):
    """TorchRec's windowed metrics of training batches; None where they are not finite, or no interval was whole."""

    ne: float | None
    calibration: float | None


class Losses(TypedDict):
    """Mean loss of the first and the last iteration; None where it was not finite or not measured."""

    first: float | None
    last: float | None
