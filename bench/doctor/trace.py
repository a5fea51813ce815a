"""Reads the profiler trace of a few iterations: host calls, the host's time in each stage, and the GPU's busy time.

Reads the Chrome trace that torch.profiler exports (Kineto; CUPTI's records on a GPU). An iteration is a range named
ITERATION on the launching thread. A stage is a range named as one of STAGES, or one that stock TorchRec opens itself.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ITERATION = "iteration"
STAGES = ("input_dist", "embedding_forward", "dense_forward_backward", "embedding_backward", "dense_update")
"""The five stages of an iteration, in order, by the names of their ranges."""
OTHER = "other"
"""Work outside of any stage, such as the loop itself, and work of an unknown stage."""
BARRIER = re.compile(r"symmetric_memory::.*barrier_kernel")
"""Kernels that are barriers of peer memory."""

# Ranges that TorchRec 1.6 to 1.8 and torch's autograd open; the innermost one that matches decides. A range of ours,
# named as a stage, decides for all within it: code in it opens ranges of theirs, which mean other stages elsewhere.
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

CALLS = {
    "kernel_launches": re.compile(r"^cu(da)?LaunchKernel|^cu(da)?LaunchCooperativeKernel"),
    "graph_launches": re.compile(r"^cu(da)?GraphLaunch"),
    "stream_syncs": re.compile(r"^cu(da)?(Stream|Event|Device|Ctx)Synchronize"),
    "memcpy_calls": re.compile(r"^cu(da)?Memcpy"),
}
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
API = ("cuda_runtime", "cuda_driver")
_AUTOGRAD = "autograd::engine"


class Call(NamedTuple):
    """A CUDA call."""

    ts: float
    stage: str
    replays: bool
    """Whether it launches a graph."""


@dataclass(slots=True)
class HostWork:
    """The work of the host's threads in a window of the trace."""

    stages_us: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*STAGES, OTHER), 0.0))
    """Time within each stage, without that of stages within it."""
    calls: Counter[str] = field(default_factory=Counter)
    """CUDA calls by the names in CALLS."""
    calls_by_id: dict[int, Call] = field(default_factory=dict)
    """Every CUDA call in the window, by its correlation id."""
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """(stage, start, end) of every range with a stage of its own."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Complete events of a Chrome trace (gzip). ValueError, naming the file, if it is damaged."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no Chrome trace: {error}") from error
    return [event for event in events if event.get("ph") == "X"]


def ordered(events: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the events by start, outer ones first, and the iterations among them. ValueError if there is none."""
    events = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    iterations = [event for event in events if event["name"] == ITERATION and event.get("cat") == "user_annotation"]
    if not iterations:
        raise ValueError(f"the trace has no range named {ITERATION!r}: it is not one of a profiled run")
    return events, iterations


def host_work(events: Iterable[dict[str, Any]], iterations: Sequence[dict[str, Any]]) -> HostWork:
    """Returns the work of the launching threads from the first iteration to the last one's end.

    These are the loop's, autograd's, and others that open stages or call CUDA. Both arguments come from `ordered`.
    """
    host = HostWork()
    for thread, own in _threads(events, iterations).items():
        if thread == iterations[0]["tid"] or any(_launches(event) for event in own):
            _thread(own, host)
    return host


def host_stages_of_loop(events: Iterable[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns milliseconds of an iteration in each stage: on the loop's thread, and on autograd's threads beside it.

    The loop's thread waits within backward() for autograd's threads. ValueError if there is no iteration.
    """
    events, iterations = ordered(events)
    loop, autograd = HostWork(), HostWork()
    for thread, own in _threads(events, iterations).items():
        if thread == iterations[0]["tid"]:
            _thread(own, loop)
        elif any(event["name"].startswith(_AUTOGRAD) for event in own):
            _thread(own, autograd)
    n = len(iterations)
    ours, theirs = ({name: us / n / 1000 for name, us in host.stages_us.items()} for host in (loop, autograd))
    return ours, theirs


class GPUTimes(NamedTuple):
    """Busy times of one rank's GPU, in milliseconds an iteration."""

    busy_ms: float
    """Time in which at least one kernel or copy ran. A collective that waits for other ranks counts as running."""
    computing_ms: float
    """Busy time without collectives: the GPU's own work, independent of waits between ranks."""
    idle_fraction: float | None
    """Time without a kernel or copy, between the first one's start and the last one's end; None if nothing ran. If the
    GPU waits for the host, the profiler increases this time, because it slows the host."""


def gpu_times(
    events: Sequence[dict[str, Any]], iterations: Sequence[dict[str, Any]], host: HostWork
) -> GPUTimes | None:
    """Returns the GPU's busy times in work of the iterations; None for a trace without a GPU.

    events, iterations: see `ordered`. host: see `host_work`.
    """
    if not any(event.get("cat") in ON_GPU for event in events):
        return None
    launched = launched_by_call(events, host.calls_by_id)
    spans = [(e["name"], e["ts"], e["ts"] + e["dur"]) for own in launched.values() for e in own]
    busy = busy_us([(start, end) for _, start, end in spans])
    computing = busy_us([(start, end) for name, start, end in spans if not is_collective(name)])
    length = max((end for *_, end in spans), default=0.0) - min((start for _, start, _ in spans), default=0.0)
    n = len(iterations) * 1000
    return GPUTimes(busy / n, computing / n, 1 - busy / length if spans else None)


def launched_by_call(events: Iterable[dict[str, Any]], calls: Mapping[int, Call]) -> dict[int, list[dict[str, Any]]]:
    """Returns the kernels, copies and memsets that each of these CUDA calls launched, by its correlation id."""
    by_call: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        correlation = _correlation(event)
        if event.get("cat") in ON_GPU and correlation is not None and correlation in calls:
            by_call.setdefault(correlation, []).append(event)
    return by_call


def is_collective(name: str) -> bool:
    """Whether a kernel of this name is NCCL's, or a barrier: it runs for as long as its rank waits for others."""
    return name.startswith("nccl") or BARRIER.search(name) is not None


def busy_us(times: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(times):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy


def _threads(events: Iterable[dict[str, Any]], iterations: Sequence[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    """Ranges and CUDA calls from the first iteration's beginning to the last one's end, by thread."""
    begin, end = iterations[0]["ts"], iterations[-1]["ts"] + iterations[-1]["dur"]
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if begin <= event["ts"] <= end and event.get("cat") in ("cpu_op", "user_annotation", *API):
            threads.setdefault(event["tid"], []).append(event)
    return threads


def _launches(event: dict[str, Any]) -> bool:
    """Whether only a launching thread would have this event; readers and watchdogs make other CUDA calls."""
    name = event["name"]
    if event["cat"] in API:
        return any(pattern.search(name) for pattern in CALLS.values())
    return name in STAGES or name.startswith(_AUTOGRAD)


def _thread(events: list[dict[str, Any]], host: HostWork) -> None:
    """Exclusive time of each stage on one thread, whose events nest; a range without a stage has its parent's."""
    stack: list[tuple[float, str, bool]] = []  # (end, stage, whether within a range of ours) of the open ranges
    for event in events:
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if event["name"] == ITERATION:
            stack.clear()  # one that an optimizer's step begins is opened within the step's range
        _, parent, in_ours = stack[-1] if stack else (0.0, None, False)
        ours = event["name"] in STAGES
        named = event["name"] if ours else None if in_ours else _stage_of_range(event["name"])
        stage = named or parent or OTHER
        if event["cat"] in API:
            _count(event, stage, host)
        if stage != parent:
            host.spans.append((stage, event["ts"], event["ts"] + event["dur"]))
            host.stages_us[stage] += event["dur"]
            if parent is not None:
                host.stages_us[parent] -= event["dur"]
        stack.append((event["ts"] + event["dur"], stage, in_ours or ours))


def _count(event: dict[str, Any], stage: str, host: HostWork) -> None:
    for name, pattern in CALLS.items():
        host.calls[name] += bool(pattern.search(event["name"]))
    correlation = _correlation(event)
    if correlation is not None:
        host.calls_by_id[correlation] = Call(event["ts"], stage, bool(CALLS["graph_launches"].search(event["name"])))


def _correlation(event: dict[str, Any]) -> int | None:
    value = event.get("args", {}).get("correlation")
    return value if isinstance(value, int) else None


def _stage_of_range(name: str) -> str | None:
    return next((stage for pattern, stage in _RANGES if pattern.search(name)), None)
