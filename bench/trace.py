"""What a profiler trace of a few iterations says: host calls, GPU work, and the stage that each belongs to.

Reads the Chrome trace that torch.profiler exports (Kineto; CUPTI's records on a GPU). An iteration is a range named
ITERATION on the launching thread. A stage is a range named as one of STAGES, or one that stock TorchRec opens itself.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ITERATION = "iteration"
STAGES = ("input_dist", "embedding_forward", "dense_forward_backward", "embedding_backward", "dense_update")
OTHER = "other"
"""Work outside of any stage, such as the loop itself and the harness."""

# Ranges that stock TorchRec 1.6 to 1.8 and torch's autograd open; the innermost one that matches decides.
_RANGES = [
    (re.compile(rf"^({'|'.join(STAGES)})$"), None),
    (
        re.compile(
            r"## (wait_for_batch|start_sparse_data_dist|wait_sparse_data_dist|(inplace_)?copy_batch|next_batch"
            r"|runtime_forward_assemble_KJT|all2all_data)|\[splits_dist\]"
        ),
        "input_dist",
    ),
    (
        re.compile(r"\[lookup\]|\[output_dist|## (EmbeddingBagCollectionAwaitable|All2All_Pooled_fwd)"),
        "embedding_forward",
    ),
    (re.compile(r"evaluate_function: .*(All2All_Pooled|SplitLookup|PermutePooledEmb)"), "embedding_backward"),
    (re.compile(r"## forward|autograd::engine::evaluate_function"), "dense_forward_backward"),
    (re.compile(r"## (optimizer|zero_grad)|^Optimizer\."), "dense_update"),
]
# Kernels of a graph replay have no range around their launch, but most names tell: first our own, those of kernels/.
_KERNELS = [
    (re.compile(r"^_(update_tiles|merge_runs)$"), "embedding_backward"),
    (re.compile(r"^_copy_runs$"), "embedding_forward"),
    (re.compile(r"^_copy_pieces$"), "input_dist"),
    (re.compile(r"^_update$"), "dense_update"),
    (re.compile(r"^_(sum_rows|forward|backward|bce)$"), "dense_forward_backward"),
    (
        re.compile(r"embedding.*(backward|grad)|linearize_index|RadixSort|sorted_adagrad|long_segments", re.I),
        "embedding_backward",
    ),
    (re.compile(r"embedding.*forward|regroup", re.I), "embedding_forward"),
    (re.compile(r"memcpy.*htod|gather_segments|permute.*(sparse|1d|2d)", re.I), "input_dist"),
    (re.compile(r"adagrad|multi_tensor", re.I), "dense_update"),
    (
        re.compile(r"gemm|cutlass|cublas|nvjet|all_?reduce|loss|cross|relu|bias|column_sum", re.I),
        "dense_forward_backward",
    ),
]
_ALL_TO_ALL = re.compile(r"sendrecv|all_?to_?all", re.I)
_AFTER_ALL_TO_ALL = {"dense_forward_backward": "embedding_backward", "embedding_forward": "embedding_forward"}

_CALLS = {
    "kernel_launches": re.compile(r"^cu(da)?LaunchKernel|^cu(da)?LaunchCooperativeKernel"),
    "graph_launches": re.compile(r"^cu(da)?GraphLaunch"),
    "stream_syncs": re.compile(r"^cu(da)?(Stream|Event|Device|Ctx)Synchronize"),
    "memcpy_calls": re.compile(r"^cu(da)?Memcpy"),
}
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_API = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Per iteration, on one rank. Times in milliseconds; GPU fields are None for a trace without a GPU."""

    calls: dict[str, float]
    """kernel_launches, graph_launches, stream_syncs, memcpy_calls, d2h_copies."""
    host_stages_ms: dict[str, float]
    """Time that launching threads spent within each stage, waiting included; 'other' is the rest of the iteration."""
    gpu_busy_ms: float | None
    """Time in which at least one kernel or copy ran. A collective that waits for other ranks counts as running."""
    gpu_stages_ms: dict[str, float] | None
    """Sum of the durations of each stage's kernels and copies; overlapping ones add up to more than busy."""


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
    begin, end = iterations[0]["ts"], iterations[-1]["ts"] + iterations[-1]["dur"]
    n = len(iterations)
    host = _host(events, iterations[0]["tid"], begin, end)
    gpu = [event for event in events if event.get("cat") in _ON_GPU and _correlation(event) in host.stage_of_call]
    calls = {name: host.calls[name] for name in _CALLS}
    calls["d2h_copies"] = sum("DtoH" in event["name"] for event in gpu)
    has_gpu = any(event.get("cat") in _ON_GPU for event in events)
    return TraceSummary(
        calls={name: count / n for name, count in calls.items()},
        host_stages_ms={name: us / n / 1000 for name, us in host.stages_us.items()},
        gpu_busy_ms=_busy_us(gpu) / n / 1000 if has_gpu else None,
        gpu_stages_ms=_gpu_stages(gpu, host.stage_of_call, n) if has_gpu else None,
    )


@dataclass(slots=True)
class _Host:
    stages_us: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*STAGES, OTHER), 0.0))
    calls: Counter[str] = field(default_factory=Counter)
    stage_of_call: dict[int, str] = field(default_factory=dict)
    """Correlation id of every CUDA call in the window, to the stage around it; OTHER for graph launches."""


def _host(events: list[dict[str, Any]], launching: Any, begin: float, end: float) -> _Host:
    """Goes through the threads that launch: the loop's, and autograd's."""
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if begin <= event["ts"] <= end and event.get("cat") in ("cpu_op", "user_annotation", *_API):
            threads.setdefault(event["tid"], []).append(event)
    host = _Host()
    for thread, own in threads.items():
        if thread == launching or any(event["name"].startswith("autograd::engine") for event in own):
            _thread(own, host)
    return host


def _thread(events: list[dict[str, Any]], host: _Host) -> None:
    """Exclusive time of each stage on one thread, whose events nest; a range without a stage has its parent's."""
    stack: list[tuple[float, str]] = []  # (end, stage) of the open ranges
    for event in events:
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        parent = stack[-1][1] if stack else None
        stage = _stage_of_range(event["name"]) or parent or OTHER
        if event["cat"] in _API:
            _count(event, stage, host)
        if stage != parent:
            host.stages_us[stage] += event["dur"]
            if parent is not None:
                host.stages_us[parent] -= event["dur"]
        stack.append((event["ts"] + event["dur"], stage))


def _count(event: dict[str, Any], stage: str, host: _Host) -> None:
    for name, pattern in _CALLS.items():
        host.calls[name] += bool(pattern.search(event["name"]))
    correlation = _correlation(event)
    if correlation is not None:
        host.stage_of_call[correlation] = OTHER if _CALLS["graph_launches"].search(event["name"]) else stage


def _correlation(event: dict[str, Any]) -> int | None:
    value = event.get("args", {}).get("correlation")
    return value if isinstance(value, int) else None


def _stage_of_range(name: str) -> str | None:
    for pattern, stage in _RANGES:
        if pattern.search(name):
            return stage or name
    return None


def _busy_us(events: list[dict[str, Any]]) -> float:
    """Length of the union of the events' times; they are sorted by their beginning."""
    busy = reached = 0.0
    for event in events:
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(event["ts"], reached))
        reached = max(reached, end)
    return busy


def _gpu_stages(events: list[dict[str, Any]], stage_of_call: dict[int, str], n: int) -> dict[str, float]:
    stages = dict.fromkeys((*STAGES, OTHER), 0.0)
    before = OTHER
    for event in events:
        stage = stage_of_call[event["args"]["correlation"]]
        if stage == OTHER:
            stage = _stage_of_kernel(event["name"], before)
        if not _ALL_TO_ALL.search(event["name"]):
            before = stage
        stages[stage] += event["dur"] / n / 1000
    return stages


def _stage_of_kernel(name: str, before: str) -> str:
    """By name; an all-to-all by the stage of the kernel before it."""
    if _ALL_TO_ALL.search(name):
        return _AFTER_ALL_TO_ALL.get(before, "input_dist")
    return next((stage for pattern, stage in _KERNELS if pattern.search(name)), OTHER)
