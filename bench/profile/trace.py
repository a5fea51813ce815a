"""Analysis of a profiler trace of a few iterations: host calls, GPU work by kernel, and their stages.

The doctor's trace.py reads the file and the host's side; kernels outside of any range get the stages of their names.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from dlrm_bench.bench.doctor.trace import (
    CALLS,
    Call,
    GPUTimes,
    HostWork,
    busy_us,
    gpu_times,
    host_work,
    launched_by_call,
    ordered,
)
from dlrm_bench.bench.profile.kernel_names import (
    OTHER,
    STAGES,
    short_kernel_name,
    stage_of_name,
    stages_of_replay,
)
from dlrm_bench.bench.records.schema import Kernel, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """The analysis of one rank's trace, per iteration. Times in milliseconds; GPU fields are None without a GPU."""

    calls: dict[str, float]
    """kernel_launches, graph_launches, stream_syncs, memcpy_calls, d2h_copies."""
    host_stages_ms: dict[str, float]
    """Time of the launching threads within each stage, waiting included; 'other' is the rest of the iteration."""
    gpu: GPUTimes | None
    gpu_stages_ms: dict[str, float] | None
    """Sum of the durations of each stage's kernels and copies; with overlap it exceeds the busy time."""
    kernels: list[Kernel] | None
    """Longest first."""
    timeline: dict[str, Span]
    """Stages that had work, median over the iterations; on the host without a GPU."""


def summarize_trace(events: Iterable[dict[str, Any]]) -> TraceSummary:
    """Returns averages over the iterations of a trace. ValueError if it has none."""
    events, iterations = ordered(events)
    starts = [event["ts"] for event in iterations]
    n = len(iterations)
    host = host_work(events, iterations)
    gpu = _gpu_work(events, host.calls_by_id)
    calls = {name: host.calls[name] for name in CALLS}
    calls["d2h_copies"] = sum("DtoH" in work.name for work in gpu)
    times = gpu_times(events, iterations, host)
    return TraceSummary(
        calls={name: count / n for name, count in calls.items()},
        host_stages_ms={name: us / n / 1000 for name, us in host.stages_us.items()},
        gpu=times,
        gpu_stages_ms=_gpu_stages(gpu, n) if times else None,
        kernels=_kernels(gpu, n) if times else None,
        timeline=_gpu_timeline(gpu, starts) if times else _host_timeline(host, starts),
    )


def _host_timeline(host: HostWork, starts: Sequence[float]) -> dict[str, Span]:
    spans = [(stage, start, end, bisect_right(starts, start) - 1) for stage, start, end in host.spans]
    return _timeline(spans, dict(enumerate(starts)))


# The GPU


class _Work(NamedTuple):
    """A kernel, copy or memset."""

    name: str
    stage: str
    is_kernel: bool
    launched: float
    start: float
    end: float


def _gpu_work(events: Sequence[dict[str, Any]], calls: dict[int, Call]) -> list[_Work]:
    """Returns all work that the calls of the window launched, sorted by start."""
    work = []
    for correlation, launched in launched_by_call(events, calls).items():
        call = calls[correlation]
        for event, stage in zip(launched, _stages_of_call(call, launched), strict=True):
            start = event["ts"]
            work.append(_Work(event["name"], stage, event["cat"] == "kernel", call.ts, start, start + event["dur"]))
    return sorted(work, key=lambda w: w.start)


def _stages_of_call(call: Call, launched: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the stage of each launched event: that of the range around the call, or else that of the kernels'
    names."""
    if call.stage != OTHER:
        return [call.stage] * len(launched)
    return stages_of_replay(launched) if call.replays else [stage_of_name(event["name"]) for event in launched]


def _gpu_stages(gpu: Sequence[_Work], n: int) -> dict[str, float]:
    stages = dict.fromkeys((*STAGES, OTHER), 0.0)
    for work in gpu:
        stages[work.stage] += (work.end - work.start) / n / 1000
    return stages


def _kernels(gpu: Sequence[_Work], n: int) -> list[Kernel]:
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for work in gpu:
        times[short_kernel_name(work.name), work.stage].append(work.end - work.start)
    kernels = []
    for (name, stage), durations in times.items():
        us = sum(durations) / n
        kernels.append(Kernel(name=name, stage=stage, calls=len(durations) / n, us=us, least_us=us, most_us=us))
    return sorted(kernels, key=lambda kernel: -kernel["us"])


def _gpu_timeline(gpu: Sequence[_Work], starts: Sequence[float]) -> dict[str, Span]:
    """Returns each stage's span on the GPU; work belongs to the iteration that launched it, whenever it runs."""
    first: dict[int, float] = {}
    spans = []
    for work in gpu:
        iteration = bisect_right(starts, work.launched) - 1
        spans.append((work.stage, work.start, work.end, iteration))
        if work.is_kernel:  # copies of later batches may run long before
            first.setdefault(iteration, work.start)
    return _timeline(spans, first)


def _timeline(spans: Sequence[tuple[str, float, float, int]], zero: dict[int, float]) -> dict[str, Span]:
    """Returns each stage's span, median over the iterations.

    spans: (stage, start, end, iteration), in microseconds. zero: when each iteration begins.
    """
    times: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for stage, start, end, iteration in spans:
        if iteration in zero:
            times[stage, iteration].append((start - zero[iteration], end - zero[iteration]))
    timeline = {}
    for stage in STAGES:
        own = [value for (name, _), value in times.items() if name == stage]
        if own:
            timeline[stage] = Span(
                start_ms=median(min(start for start, _ in each) for each in own) / 1000,
                end_ms=median(max(end for _, end in each) for each in own) / 1000,
                busy_ms=median(map(busy_us, own)) / 1000,
            )
    return timeline
