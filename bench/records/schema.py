"""The form of run.json: RunRecord, and its blocks in the order in which they stand there."""

from typing import Any, Literal, NotRequired, TypedDict

RECORD_SCHEMA = 2
READABLE_SCHEMAS = (1, 2)


class RunRecord(TypedDict):
    """What run.json holds."""

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
    """What the pipeline decided by itself, such as its sharding plan."""
    machine: "Machine"
    warmup_iterations: int
    """First iterations, in iterations.npz, that the summaries leave out."""
    latency_ms: "LatencySummary | None"
    """None where the run ended within the warm-up."""
    samples_per_second: float | None
    """Global batch size over the time by the clock; evaluations do not count. Files of older records have it over the
    mean latency of the slowest ranks; read_record makes it anew."""
    efficiency: NotRequired["Efficiency | None"]
    """None of profiled runs and without GPUs; older records have none."""
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
    """Whether the program's files, or tracked ones, differ from the commit; None where nothing can say."""
    source: NotRequired[str | None]
    """Hash of the program's files as they ran: see bench/machine/source.py. Older records have none."""


class Provenance(TypedDict):
    """What else a run depends on."""

    packages: dict[str, str]
    """Version of each installed distribution that the run had imported."""
    environment: dict[str, str]
    """Variables that the libraries read, by name."""
    started_by: "StartedBy"


class StartedBy(TypedDict):
    """How the ranks were started."""

    launcher: str
    """torchrun, srun, fork server (of dlrm-bench's ladders), or python."""
    command: list[str]
    """Command line of the process that started rank 0; empty where it cannot be read."""
    local_world_size: int


class Machine(TypedDict):
    """The machine that a run used. All GPUs and nodes are taken to be like rank 0's; GB are 10^9 bytes."""

    nodes: int
    """How many torchruns started ranks; in older records, how many distinct host names ranks have."""
    hosts: NotRequired[list[str]]
    """These names, in the order of their first ranks; older records have none."""
    gpus: int
    """Distinct GPUs over all ranks; 0 on CPUs."""
    gpu: str | None
    """Name of the GPUs; where they differ, all names joined by ' + '."""
    gpu_memory_gb: float | None
    gpu_uuids: NotRequired[list[str]]
    """UUIDs of the ranks' GPUs, in the order of the ranks: machines of one description are told apart by them. Older
    records have neither these nor the fields below that are marked so."""
    gpu_numa: NotRequired[list[int | None] | None]
    """NUMA node of each rank's GPU, as Linux gives it."""
    boots: NotRequired[list[str]]
    """Linux's random id of each node's boot, which tells hosts of one name apart."""
    cpu: str | None
    cpu_governor: NotRequired[str | None]
    """Which clock Linux asks for, such as 'performance'; None where it does not decide, as in virtual machines."""
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
    """How one GPU is linked to the others, such as 'nvlink: 18 links a GPU, 26.6 GB/s each, to NVSwitch'."""


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
    """[low, high] of the median, as far as one run can tell; None where it has too few iterations. Readers compute it
    from the raw times: older versions of the harness made narrower ones."""
    drift: NotRequired[float | None]
    """Of the slowest and the fastest eighth, the later one's median over the earlier one's, minus 1; None where there
    are too few iterations. Older records lack this field and the next, or say the last quarter's over the first's."""
    steady: NotRequired[bool | None]
    """Whether that change is none, or an accident of the iterations: see bench/stats/series.py."""


class Memory(TypedDict):
    """GPU memory in GB (10^9 bytes)."""

    peak_allocated: list[float]
    """Largest amount that tensors held at a time, for each rank."""


class Profile(TypedDict):
    """What only a profiled run measures, per iteration and as mean of the ranks."""

    host: dict[str, float]
    """CPU and wall time in milliseconds, and the number of CUDA calls of each kind."""
    host_threads_ms: dict[str, float]
    """CPU time of each thread but the launching one; empty where the kernel does not tell."""
    gpu: dict[str, float] | None
    stages_ms: dict[str, float] | None
    """Time of each stage on the GPU; on the host where there is none. This field and the following ones are None in a
    run for another profiler, which counts nothing."""
    host_stages_ms: dict[str, float] | None
    timeline: "dict[str, Span] | None"
    """Stages that had work; on the host where there is no GPU."""
    kernels: "list[Kernel] | None"
    """Kernels and copies of the GPU, longest first."""
    gpu_of_ranks: "list[dict[str, float]] | None"
    """The block `gpu` of each rank's trace; that one has their means, but the largest idle fraction."""


class Span(TypedDict):
    """When a stage ran, in milliseconds from the iteration's beginning: that of its first kernel, or on the host."""

    start_ms: float
    end_ms: float
    busy_ms: float
    """Time, between start and end, in which the stage had work; the rest is waiting or other stages."""


class Kernel(TypedDict):
    """All kernels or copies of one name and stage, per iteration. Times in microseconds, as mean of the ranks."""

    name: str
    """Short: see bench/profile/kernel_names.py."""
    stage: str
    calls: float
    us: float
    """Sum of durations. A collective's hold its waiting for other ranks."""
    least_us: float
    """Time on the rank with the least, and below with the most: far apart where work is out of balance."""
    most_us: float


class Telemetry(TypedDict):
    """What happened to the machine during a run. The triples are [min, median, max] over all ranks and samples."""

    interval_s: float
    """The longest time between two samples."""
    samples: int
    """Samples of each rank; 0 where NVML does not work."""
    sm_clock_mhz: list[float] | None
    temperature_c: list[float] | None
    power_w: list[float] | None
    throttled: bool | None
    """None where NVML does not say."""
    throttling: "list[Throttling]"
    clock_jump_s: NotRequired[float | None]
    """Seconds by which the wall clock went further than the monotonic one; None within a second."""
    gc_iterations: list[int]
    """Iterations, of any rank, in which Python's garbage collector ran."""
    ranks: NotRequired["list[SampleSeries]"]
    """Samples of each rank; older records have none."""
    joules_per_iteration: NotRequired[float | None]
    """Energy of all GPUs for an iteration after the warm-up, evaluations left out; None where NVML counts none. Records
    of evaluating runs before 23 November 2026 count evaluations in."""


class Efficiency(TypedDict):
    """What a timed run's GPUs made of their time and power."""

    samples_per_second_per_gpu: float
    mfu: float | None
    """FLOP of the model's GEMMs a second, as a share of what the maker states for the run's precision; None where that
    is not known."""
    joules_per_sample: float | None
    """None where NVML counts no energy."""


class SampleSeries(TypedDict):
    """Samples of one rank's GPU by NVML, in the order of time; of many, 10 of the warm-up and 100 after it."""

    iteration: list[int]
    """Iterations launched by then."""
    sm_clock_mhz: list[float | None]
    temperature_c: list[float | None]
    power_w: list[float | None]
    clocks_event_reasons: list[int | None]
    """Bits of nvmlClocksEventReasons."""
    energy_j: list[float | None]
    """Since the driver was loaded."""


class Throttling(TypedDict):
    """A span of iterations in which a GPU was throttled, as far as samples can tell."""

    rank: int
    reason: str
    first_iteration: int
    last_iteration: int


class Checkpointing(TypedDict):
    """What a run saved, and what it went on from."""

    saved: "list[SavedCheckpoint]"
    resumed: "ResumedFrom | None"


class SavedCheckpoint(TypedDict):
    """A checkpoint that the run wrote."""

    iteration: int
    gb: float
    """Weights and optimizer state of all ranks."""
    paused_s: float
    """Seconds for which the training waited."""
    write_s: float
    """Seconds until all was on disk; those that the training waited for are among them where it waited for all."""


class ResumedFrom(TypedDict):
    """The checkpoint that a run went on from. Losses and latencies of the record are those of its own iterations;
    iterations.npz has the losses before as `loss_before`, and in `samples_before` the samples trained on after each."""

    run_id: str
    """The run that wrote it."""
    iteration: int
    """Iterations of this run's global batch size that had been trained."""
    samples: NotRequired[int]
    """Samples that had been trained on."""
    read_s: float
    """Seconds to read it."""


TrainingStatus = Literal["success", "aborted", "no_target"]
"""aborted: the target was missed. no_target: the run only measured latency, and its MLPerf log says success."""


class Training(TypedDict):
    """How the training went."""

    losses: "Losses"
    auc: float | None
    """AUC of the last evaluation."""
    target: float | None
    best_auc: float | None
    """The best AUC that any model can reach on this data, where that is known."""
    epoch_num: float
    """Fraction of the epoch trained; of the planned iterations where random batches have none (0 in older records)."""
    status: TrainingStatus


class Losses(TypedDict):
    """Mean loss of the first and the last iteration; None where it was not finite or not measured."""

    first: float | None
    last: float | None
