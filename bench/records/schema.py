"""The form of run.json, and the check that a file has it."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict


class Machine(TypedDict):
    """The machine block of a run record. All GPUs and nodes are taken to be like rank 0's; GB are 10^9 bytes."""

    nodes: int
    """Distinct host names over all ranks."""
    hosts: NotRequired[list[str]]
    """These names, in the order of their first ranks; records of before have none."""
    gpus: int
    """Distinct GPUs over all ranks; 0 on CPUs."""
    gpu: str | None
    """Name of the GPUs; where they differ, all names joined by ' + '."""
    gpu_memory_gb: float | None
    cpu: str | None
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


class Git(TypedDict):
    """State of the source tree."""

    commit: str | None
    dirty: bool | None
    """Whether tracked files differ from the commit."""


class Throttling(TypedDict):
    """A span of iterations in which a GPU was throttled, as far as samples can tell."""

    rank: int
    reason: str
    first_iteration: int
    last_iteration: int


class Conditions(TypedDict):
    """The conditions block of a run record. The triples are [min, median, max] over all ranks and samples."""

    interval_s: float
    samples: int
    """Of each rank; 0 where NVML does not work."""
    sm_clock_mhz: list[float] | None
    temperature_c: list[float] | None
    power_w: list[float] | None
    throttled: bool | None
    """None where NVML does not say."""
    throttling: list[Throttling]
    gc_iterations: list[int]
    """Iterations, of any rank, in which Python's garbage collector ran."""


class Kernel(TypedDict):
    """All kernels or copies of one name and stage, per iteration. Times in microseconds, as mean of the ranks."""

    name: str
    """Short: see bench/records/kernel_names.py."""
    stage: str
    calls: float
    us: float
    """Sum of durations. A collective's hold its waiting for other ranks."""
    least_us: float
    """Of the rank with the least, and below with the most: far apart where work is out of balance."""
    most_us: float


class Span(TypedDict):
    """When a stage ran, in milliseconds from the iteration's beginning: that of its first kernel, or on the host."""

    start_ms: float
    end_ms: float
    busy_ms: float
    """Of the time between, that in which the stage had work; the rest is waiting or other stages."""


RECORD_SCHEMA = 2
READABLE_SCHEMAS = (1, 2)

TrainingStatus = Literal["success", "aborted", "no_target"]
"""aborted: the target was missed. no_target: the run only measured latency."""


class LatencySummary(TypedDict):
    """Latency of an iteration, which is that of its slowest rank, in milliseconds, after the warm-up."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    ci95: list[float]
    """[low, high] of the median."""


class Losses(TypedDict):
    """Mean loss of the first and the last iteration; None where it was not finite or not measured."""

    first: float | None
    last: float | None


class Training(TypedDict):
    """How the training went."""

    losses: Losses
    auc: float | None
    """Of the last evaluation."""
    target: float | None
    best_auc: float | None
    """The best AUC that any model can reach on this data, where that is known."""
    epoch_num: float
    """Fraction of the epoch trained; of the planned iterations where random batches have none. Once 0 for these."""
    status: TrainingStatus


class Memory(TypedDict):
    """GPU memory in GB (10^9 bytes)."""

    peak_allocated: list[float]
    """Largest amount that tensors held at a time, for each rank."""


class RunRecord(TypedDict):
    """run.json."""

    schema: int
    id: str
    created: str
    """ISO 8601, UTC."""
    command: str
    git: Git
    config: dict[str, Any]
    """The resolved RunConfig, with world_size and global_batch_size."""
    pipeline: dict[str, Any]
    """What the pipeline decided by itself, such as its sharding plan."""
    machine: Machine
    warmup_iterations: int
    """First iterations, in iterations.npz, that the summaries leave out."""
    latency_ms: LatencySummary | None
    """None where the run ended within the warm-up."""
    samples_per_second: float | None
    """Global batch size over mean latency; evaluations do not count."""
    memory_gb: Memory | None
    host: dict[str, float] | None
    """From here to kernels: per iteration, mean of the ranks, in the record of an instrumented twin alone."""
    host_threads_ms: NotRequired[dict[str, float] | None]
    """CPU time by thread, but for the launching one; empty where the kernel does not tell."""
    gpu: dict[str, float] | None
    stages_ms: dict[str, float] | None
    """On the GPU; on the host where there is none."""
    host_stages_ms: NotRequired[dict[str, float] | None]
    timeline: NotRequired[dict[str, Span] | None]
    """Of the stages that had work; on the host where there is no GPU."""
    kernels: NotRequired[list[Kernel] | None]
    """Of the GPU, longest first."""
    conditions: NotRequired[Conditions | None]
    training: Training | None


class Instruments(TypedDict):
    """What only an instrumented twin knows; the fields are those of RunRecord."""

    host: dict[str, float]
    host_threads_ms: dict[str, float]
    gpu: dict[str, float] | None
    stages_ms: dict[str, float] | None
    """From here on None in a twin for another profiler, which counts nothing."""
    host_stages_ms: dict[str, float] | None
    timeline: dict[str, Span] | None
    kernels: list[Kernel] | None


_BLOCKS = {"git": Git, "machine": Machine}

_OPTIONAL_BLOCKS = {"latency_ms": LatencySummary, "memory_gb": Memory, "conditions": Conditions, "training": Training}

_TYPES = {"id": str, "created": str, "command": str, "config": dict, "pipeline": dict, "warmup_iterations": int}


def _numbers(value: object, field: str = "") -> Iterator[tuple[str, float]]:
    """All fractional numbers in a JSON value, with the path of fields that leads to each."""
    if isinstance(value, float):
        yield field, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{field}[{index}]")


def check_record(path: Path, record: Any) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{path} is no run record: expected an object, found {type(record).__name__}")
    if record.get("schema") not in READABLE_SCHEMAS:
        raise ValueError(
            f"{path} has schema {record.get('schema')!r}; this version reads {READABLE_SCHEMAS[0]} to {RECORD_SCHEMA}: "
            "use the version of the harness that wrote it"
        )
    _check_fields(path, "", record, RunRecord)
    for name, kind in _TYPES.items():
        if not isinstance(record[name], kind):
            raise ValueError(f"{path}: {name} is {record[name]!r}, expected {kind.__name__}")
    for name, block in (_BLOCKS | _OPTIONAL_BLOCKS).items():
        if record.get(name) is not None or name in _BLOCKS:
            _check_fields(path, f"{name}.", record[name], block)
    for name, value in _numbers(record):
        if not math.isfinite(value):
            raise ValueError(f"{path}: {name} is {value}, which JSON cannot hold")


def _check_fields(path: Path, prefix: str, block: Any, shape: Any) -> None:
    required = [name for name in shape.__annotations__ if name in shape.__required_keys__]
    missing = [name for name in required if not isinstance(block, dict) or name not in block]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(prefix + name for name in missing)}")
