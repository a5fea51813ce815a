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
    """None if the run ended within the warm-up."""
    samples_per_second: float | None
    """Global batch size over the time by the clock; evaluations do not count. Files of older records divide by the mean
    latency of the slowest ranks; read_record recomputes it."""
    efficiency: NotRequired["Efficiency | None"]
    """None for profiled runs and without GPUs; absent in older records."""
    memory_gb: "Memory | None"
    host: dict[str, float] | None
    """This field and the following ones down to gpu_of_ranks are those of Profile; None in the record of a timed
    run."""
    host_threads_ms: NotRequired[dict[str, float] | None]
    gpu: dict[str, float] | None
    stages_ms: dict[str, float] | None
    host_stages_ms: NotRequired[dict[str, float] | None]
    timeline: NotRequired["dict[str, Span] | None"]
    kernels: NotRequired["list[Kernel] | None"]
    gpu_of_ranks: NotRequired["list[dict[str, float]] | None"]
    conditions: NotRequired["Telemetry | None"]
    sample_sizes: NotRequired[dict[str, float] | None]
    """Means over samples of the sizes that determine their work and are not in the configuration, by the benchmark's
    names (benchmark.SampleSizes); None if there are none."""
    checkpoints: NotRequired["Checkpointing | None"]
    """None if the run neither saved nor resumed."""
    start_s: NotRequired[dict[str, float] | None]
    """Seconds of rank 0's steps from its first line to its training, by what it does; absent in older records."""
    training: "Training | None"


class Git(TypedDict):
    """State of the source tree."""

    commit: str | None
    dirty: bool | None
    """Whether the program's files, or tracked files, differ from the commit; None if that is unknown."""
    source: NotRequired[str | None]
    """Hash of the program's files as they ran: see bench/machine/source.py. Older records have none."""


class Provenance(TypedDict):
    """The environment of a run apart from machine and source."""

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
    """The machine that a run used. All GPUs and nodes are assumed to equal rank 0's; GB are 10^9 bytes."""

    nodes: int
    """Number of torchruns that started ranks; in older records, number of distinct host names of the ranks."""
    hosts: NotRequired[list[str]]
    """Host names of the nodes, in the order of their first ranks; absent in older records."""
    gpus: int
    """Number of distinct GPUs over all ranks; 0 on CPUs."""
    gpu: str | None
    """Name of the GPUs; if they differ, all names joined by ' + '."""
    gpu_memory_gb: float | None
    gpu_uuids: NotRequired[list[str]]
    """UUIDs of the ranks' GPUs, in the order of the ranks; they distinguish machines of the same description. Absent in
    older records, as the NotRequired fields below."""
    gpu_numa: NotRequired[list[int | None] | None]
    """NUMA node of each rank's GPU, as Linux reports it."""
    boots: NotRequired[list[str]]
    """Linux's random id of each node's boot, which distinguishes hosts of the same name."""
    cpu: str | None
    cpu_governor: NotRequired[str | None]
    """CPU frequency governor of Linux, such as 'performance'; None if Linux does not control clocks, as in virtual
    machines."""
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
    """Elapsed time over iterations, of the rank that took longest for all iterations. If ranks are slow in turn, the
    mean of the slowest rank is larger. Samples per second are computed from it; files of older records lack it, and
    read_record adds it."""
    p50: float
    p90: float
    p99: float
    ci95: list[float] | None
    """[low, high] of the median from this run alone; None for too few iterations. Readers compute it from the raw
    times: older versions of the harness made narrower intervals."""
    drift: NotRequired[float | None]
    """Median of the later of the slowest and the fastest eighth over that of the earlier one, minus 1; None for too few
    iterations. Older records lack this field and the next, or compare the last quarter with the first."""
    steady: NotRequired[bool | None]
    """Whether that change is no more than chance: see bench/stats/series.py."""


class Memory(TypedDict):
    """GPU memory in GB (10^9 bytes)."""

    peak_allocated: list[float]
    """Peak of the memory allocated for tensors, for each rank."""


class Profile(TypedDict):
    """Results of a profiled run per iteration, mean over the ranks."""

    host: dict[str, float]
    """CPU and wall time in milliseconds, and the number of CUDA calls of each kind."""
    host_threads_ms: dict[str, float]
    """CPU time of each thread except the launching one; empty if the kernel does not report it."""
    gpu: dict[str, float] | None
    stages_ms: dict[str, float] | None
    """Time of each stage on the GPU, or on the host without a GPU. This field and the following ones are None in a run
    under another profiler, without counts."""
    host_stages_ms: dict[str, float] | None
    timeline: "dict[str, Span] | None"
    """Stages that had work; on the host without a GPU."""
    kernels: "list[Kernel] | None"
    """Kernels and copies of the GPU, longest first."""
    gpu_of_ranks: "list[dict[str, float]] | None"
    """The block `gpu` of each rank's trace; `gpu` has their means, except the idle fraction, which is the largest."""


class Span(TypedDict):
    """The span of a stage, in milliseconds from the iteration's beginning: that of its first kernel, or that on the
    host."""

    start_ms: float
    end_ms: float
    busy_ms: float
    """Time, between start and end, in which the stage had work; the rest is waiting or other stages."""


class Kernel(TypedDict):
    """All kernels or copies of one name and stage, per iteration. Times in microseconds, mean over the ranks."""

    name: str
    """Short name: see bench/profile/kernel_names.py."""
    stage: str
    calls: float
    us: float
    """Sum of durations. Those of collectives include waiting for other ranks."""
    least_us: float
    """Time on the rank with the least; most_us is that on the rank with the most. They are far apart if work is
    imbalanced."""
    most_us: float


class Telemetry(TypedDict):
    """The state of the machine during a run. The triples are [min, median, max] over all ranks and samples."""

    interval_s: float
    """The longest time between two samples."""
    samples: int
    """Number of samples of each rank; 0 if NVML does not work."""
    sm_clock_mhz: list[float] | None
    temperature_c: list[float] | None
    power_w: list[float] | None
    throttled: bool | None
    """None if NVML does not report it."""
    throttling: "list[Throttling]"
    clock_jump_s: NotRequired[float | None]
    """Seconds by which the wall clock advanced more than the monotonic clock; None if less than a second."""
    gc_iterations: list[int]
    """Iterations, of any rank, in which Python's garbage collector ran."""
    ranks: NotRequired["list[SampleSeries]"]
    """Samples of each rank; absent in older records."""
    joules_per_iteration: NotRequired[float | None]
    """Energy of all GPUs per iteration after the warm-up, without evaluations; None if NVML has no energy counter.
    Records of runs with evaluations before 23 November 2026 include the energy of evaluations."""


class Efficiency(TypedDict):
    """Efficiency of a timed run's GPUs in time and power."""

    samples_per_second_per_gpu: float
    mfu: float | None
    """FLOP per second of the model's GEMMs, as a share of the data sheet's peak for the run's precision; None if that
    is unknown."""
    joules_per_sample: float | None
    """None if NVML has no energy counter."""


class SampleSeries(TypedDict):
    """Samples of one rank's GPU by NVML, in order of time; of many samples, 10 of the warm-up and 100 after it are
    kept."""

    gpu: NotRequired[str | None]
    """UUID of the GPU, which ranks may share; None if NVML does not report it. Records without this field count the
    energy of a GPU once for each of its ranks."""
    iteration: list[int]
    """Number of iterations launched before each sample."""
    sm_clock_mhz: list[float | None]
    temperature_c: list[float | None]
    power_w: list[float | None]
    clocks_event_reasons: list[int | None]
    """Bits of nvmlClocksEventReasons."""
    energy_j: list[float | None]
    """Energy since the driver was loaded."""


class Throttling(TypedDict):
    """A span of iterations in which a GPU was throttled, according to its samples."""

    rank: int
    reason: str
    first_iteration: int
    last_iteration: int


class Checkpointing(TypedDict):
    """The checkpoints that a run wrote, and the one that it resumed."""

    saved: "list[SavedCheckpoint]"
    resumed: "ResumedFrom | None"
    snapshots: NotRequired["list[TakenSnapshot]"]
    """Snapshots that the run took in memory."""
    prepared_s: NotRequired[float]
    """Seconds before the training for making and mapping the memory of snapshots."""
    left_out: NotRequired[int]
    """Number of due snapshots that were skipped because the only memory for them was not yet on disk."""


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
    """Seconds until everything was on disk, including `paused_s` if the training waited for all of it."""


class ResumedFrom(TypedDict):
    """The checkpoint that a run resumed. Losses and latencies of the record are those of its own iterations;
    iterations.npz has the earlier losses as `loss_before`, and in `samples_before` the number of samples trained on
    after each."""

    run_id: str
    """Id of the run that wrote the checkpoint."""
    iteration: int
    """Number of iterations of this run's global batch size that had been trained."""
    samples: NotRequired[int]
    """Number of samples that had been trained on."""
    read_s: float
    """Seconds to read it."""
    folder: NotRequired[str]
    """Folder of the checkpoint, on disk or in memory."""


TrainingStatus = Literal["success", "aborted", "no_target"]
"""aborted: the target was missed. no_target: the run only measured latency, and its MLPerf log says success."""


class Training(TypedDict):
    """The outcome of the training."""

    losses: "Losses"
    auc: float | None
    """AUC of the last evaluation."""
    target: float | None
    best_auc: float | None
    """The best AUC that any model can reach on this data, if known."""
    epoch_num: float
    """Fraction of the epoch trained; for random batches, of the planned iterations (0 in older records)."""
    status: TrainingStatus
    train_metrics: NotRequired["TrainMetricValues"]
    """Metrics of the last complete --loss-interval, with --train-metrics."""
    evaluations: NotRequired["Evaluations"]
    """Absent if there was none, and in records before 27 November 2026."""


class Evaluations(TypedDict):
    """The evaluations of a run, in order."""

    samples: int
    """Samples of one evaluation. Records before 29 November 2026 include those that --data.drop-last-evaluation left
    out."""
    seconds: list[float]
    """Duration of each, from eval_start to eval_stop of the MLPerf log."""


class TrainMetricValues(TypedDict):
    """TorchRec's windowed metrics of training batches; None if they are not finite, or if no interval was complete."""

    ne: float | None
    calibration: float | None


class Losses(TypedDict):
    """Mean loss of the first and the last iteration; None if it was not finite or not measured."""

    first: float | None
    last: float | None
