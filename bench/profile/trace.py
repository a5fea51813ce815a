"""What a profiler trace of a few iterations says: host calls, GPU work, and the stage that each belongs to.

Reads the Chrome trace that torch.profiler exports (Kineto; CUPTI's records on a GPU). An iteration is a range named
ITERATION on the launching thread. A stage is a range named as one of STAGES, or one that stock TorchRec opens itself.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from dlrm_bench.bench.profile.kernel_names import (
    OTHER,
    STAGES,
    is_collective,
    short_kernel_name,
    stage_of_name,
    stages_of_replay,
)
from dlrm_bench.bench.records.schema import Kernel, Span

ITERATION = "iteration"

# Ranges that TorchRec 1.6 to 1.8 and torch's autograd open; the innermost one that matches decides. A range of ours,
# named as a stage, decides for all within it: what it calls opens ranges of theirs, which mean other stages elsewhere.
_RANGES = [
    (
        re.compile(
            r"## (wait_for_batch|load_batch|(start|wait)_sparse_data_dist|(inplace_)?copy_(batch_)?to_gpu"
            r"|next_batch|runtime_forward_assemble_KJT|all2all_data)|\[splits_dist\]"
        ),
        "input_dist",
    ),
    (
        re.compile(
            r"\[lookup\]|\[output_dist|## (EmbeddingBagCollectionAwaitable|start_embedding_lookup"
            r"|(Variable_Batch_)?All2All_Pooled_fwd|all2all_pooled|ReduceScatter\w*_fwd|reduce_scatter)"
        ),
        "embedding_forward",
    ),
    (
        re.compile(
            r"## (emb_backward|(Variable_Batch_)?All2All_Pooled_bwd|ReduceScatter\w*_bwd)"
            r"|evaluate_function: .*(All2All_Pooled|ReduceScatter|SplitLookup|PermutePooledEmb)"
        ),
        "embedding_backward",
    ),
    (re.compile(r"## (dense_)?(forward|backward)|autograd::engine::evaluate_function"), "dense_forward_backward"),
    (re.compile(r"## (optimizer|zero_grad)|^Optimizer\."), "dense_update"),
]

_CALLS = {
    "kernel_launches": re.compile(r"^cu(da)?LaunchKernel|^cu(da)?LaunchCooperativeKernel"),
    "graph_launches": re.compile(r"^cu(da)?GraphLaunch"),
    "stream_syncs": re.compile(r"^cu(da)?(Stream|Event|Device|Ctx)Synchronize"),
    "memcpy_calls": re.compile(r"^cu(da)?Memcpy"),
}
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_API = ("cuda_runtime", "cuda_driver")
_AUTOGRAD = "autograd::engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What one rank's trace says of an iteration. Times in milliseconds; GPU fields are None without a GPU."""

    calls: dict[str, float]
    """kernel_launches, graph_launches, stream_syncs, memcpy_calls, d2h_copies."""
    host_stages_ms: dict[str, float]
    """Time that launching threads spent within each stage, waiting included; 'other' is the rest of the iteration."""
    gpu_busy_ms: float | None
    """Time in which at least one kernel or copy ran. A collective that waits for other ranks counts as running."""
    gpu_computing_ms: float | None
    """The same without collectives: what the GPU has to do, however long ranks wait for one another."""
    gpu_idle_fraction: float | None
    """Time without any kernel or copy, of that from the first to the end of the last. The profiler slows the host, and
    so makes more of it where the GPU waits for the host."""
    gpu_stages_ms: dict[str, float] | None
    """Sum of the durations of each stage's kernels and copies; overlapping ones add up to more than busy."""
    kernels: list[Kernel] | None
    """Longest first."""
    timeline: dict[str, Span]
    """Stages that had work, median over the iterations; on the host where there is no GPU."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Complete events of a Chrome trace (gzip). ValueError, naming the file, if it is damaged."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no Chrome trace: {error}") from error
    return [event for event in events if event.get("ph") == "X"]


def summarize_trace(events: Iterable[dict[str, Any]]) -> TraceSummary:
    """Averages over the iterations of a trace. ValueError if it has none."""
    events = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    iterations = [event for event in events if event["name"] == ITERATION and event.get("cat") == "user_annotation"]
    if not iterations:
        raise ValueError(f"the trace has no range named {ITERATION!r}: it is not one of `dlrm-bench host`")
    starts, end = [event["ts"] for event in iterations], iterations[-1]["ts"] + iterations[-1]["dur"]
    n = len(iterations)
    host = _host(events, iterations[0]["tid"], starts[0], end)
    gpu = _gpu_work(events, host.calls_by_id)
    calls = {name: host.calls[name] for name in _CALLS}
    calls["d2h_copies"] = sum("DtoH" in work.name for work in gpu)
    has_gpu = any(event.get("cat") in _ON_GPU for event in events)
    busy_us = _busy_us([(work.start, work.end) for work in gpu])
    span_us = max((work.end for work in gpu), default=0.0) - min((work.start for work in gpu), default=0.0)
    return TraceSummary(
        calls={name: count / n for name, count in calls.items()},
        host_stages_ms={name: us / n / 1000 for name, us in host.stages_us.items()},
        gpu_busy_ms=busy_us / n / 1000 if has_gpu else None,
        gpu_computing_ms=_busy_us([(w.start, w.end) for w in gpu if not is_collective(w.name)]) / n / 1000
        if has_gpu
        else None,
        gpu_idle_fraction=1 - busy_us / span_us if gpu else None,
        gpu_stages_ms=_gpu_stages(gpu, n) if has_gpu else None,
        kernels=_kernels(gpu, n) if has_gpu else None,
        timeline=_gpu_timeline(gpu, starts) if has_gpu else _host_timeline(host, starts),
    )


def host_stages_of_loop(events: Iterable[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of an iteration in each stage: on the loop's thread, and on autograd's threads beside it.

    The loop's thread waits within backward() for what autograd's threads spend. ValueError if there is no iteration.
    """
    events = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    iterations = [event for event in events if event["name"] == ITERATION and event.get("cat") == "user_annotation"]
    if not iterations:
        raise ValueError(f"the trace has no range named {ITERATION!r}: it is not one of `dlrm-bench host`")
    end = iterations[-1]["ts"] + iterations[-1]["dur"]
    loop, autograd = _Host(), _Host()
    for thread, own in _threads(events, iterations[0]["ts"], end).items():
        if thread == iterations[0]["tid"]:
            _thread(own, loop)
        elif any(event["name"].startswith(_AUTOGRAD) for event in own):
            _thread(own, autograd)
    n = len(iterations)
    ours, theirs = ({name: us / n / 1000 for name, us in host.stages_us.items()} for host in (loop, autograd))
    return ours, theirs


# The host


class _Call(NamedTuple):
    """A CUDA call."""

    ts: float
    stage: str
    replays: bool
    """Whether it launches a graph."""


@dataclass(slots=True)
class _Host:
    stages_us: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*STAGES, OTHER), 0.0))
    calls: Counter[str] = field(default_factory=Counter)
    calls_by_id: dict[int, _Call] = field(default_factory=dict)
    """Every CUDA call in the window, by its correlation id."""
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """(stage, start, end) of every range with a stage of its own."""


def _host(events: list[dict[str, Any]], loop: Any, begin: float, end: float) -> _Host:
    """Goes through the threads that launch: the loop's, autograd's, and others that open stages or call CUDA."""
    host = _Host()
    for thread, own in _threads(events, begin, end).items():
        if thread == loop or any(_launches(event) for event in own):
            _thread(own, host)
    return host


def _threads(events: Iterable[dict[str, Any]], begin: float, end: float) -> dict[Any, list[dict[str, Any]]]:
    """Ranges and CUDA calls within the window, by thread."""
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if begin <= event["ts"] <= end and event.get("cat") in ("cpu_op", "user_annotation", *_API):
            threads.setdefault(event["tid"], []).append(event)
    return threads


def _launches(event: dict[str, Any]) -> bool:
    """Whether only a launching thread would have this event; readers and watchdogs make other CUDA calls."""
    name = event["name"]
    if event["cat"] in _API:
        return any(pattern.search(name) for pattern in _CALLS.values())
    return name in STAGES or name.startswith(_AUTOGRAD)


def _thread(events: list[dict[str, Any]], host: _Host) -> None:
    """Exclusive time of each stage on one thread, whose events nest; a range without a stage has its parent's."""
    stack: list[tuple[float, str, bool]] = []  # (end, stage, whether within a range of ours) of the open ranges
    for event in events:
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        _, parent, in_ours = stack[-1] if stack else (0.0, None, False)
        ours = event["name"] in STAGES
        named = event["name"] if ours else None if in_ours else _stage_of_range(event["name"])
        stage = named or parent or OTHER
        if event["cat"] in _API:
            _count(event, stage, host)
        if stage != parent:
            host.spans.append((stage, event["ts"], event["ts"] + event["dur"]))
            host.stages_us[stage] += event["dur"]
            if parent is not None:
                host.stages_us[parent] -= event["dur"]
        stack.append((event["ts"] + event["dur"], stage, in_ours or ours))


def _count(event: dict[str, Any], stage: str, host: _Host) -> None:
    for name, pattern in _CALLS.items():
        host.calls[name] += bool(pattern.search(event["name"]))
    correlation = _correlation(event)
    if correlation is not None:
        host.calls_by_id[correlation] = _Call(event["ts"], stage, bool(_CALLS["graph_launches"].search(event["name"])))


def _correlation(event: dict[str, Any]) -> int | None:
    value = event.get("args", {}).get("correlation")
    return value if isinstance(value, int) else None


def _stage_of_range(name: str) -> str | None:
    return next((stage for pattern, stage in _RANGES if pattern.search(name)), None)


def _host_timeline(host: _Host, starts: Sequence[float]) -> dict[str, Span]:
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


def _gpu_work(events: Sequence[dict[str, Any]], calls: dict[int, _Call]) -> list[_Work]:
    """All that the calls of the window launched, by its start."""
    by_call: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        correlation = _correlation(event)
        if event.get("cat") in _ON_GPU and correlation in calls:
            by_call.setdefault(correlation, []).append(event)
    work = []
    for correlation, launched in by_call.items():
        call = calls[correlation]
        for event, stage in zip(launched, _stages_of_call(call, launched), strict=True):
            start = event["ts"]
            work.append(_Work(event["name"], stage, event["cat"] == "kernel", call.ts, start, start + event["dur"]))
    return sorted(work, key=lambda w: w.start)


def _stages_of_call(call: _Call, launched: Sequence[dict[str, Any]]) -> list[str]:
    """The stage of each launched event: that of the range around the call, or by its kernels where there is none."""
    if call.stage != OTHER:
        return [call.stage] * len(launched)
    return stages_of_replay(launched) if call.replays else [stage_of_name(event["name"]) for event in launched]


def _busy_us(times: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(times):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


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
    """When each stage ran on the GPU; work counts to the iteration that launched it, whenever it runs."""
    first: dict[int, float] = {}
    spans = []
    for work in gpu:
        iteration = bisect_right(starts, work.launched) - 1
        spans.append((work.stage, work.start, work.end, iteration))
        if work.is_kernel:  # copies of later batches may run long before
            first.setdefault(iteration, work.start)
    return _timeline(spans, first)


def _timeline(spans: Sequence[tuple[str, float, float, int]], zero: dict[int, float]) -> dict[str, Span]:
    """When each stage ran, median over the iterations.

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
                busy_ms=median(map(_busy_us, own)) / 1000,
            )
    return timeline
