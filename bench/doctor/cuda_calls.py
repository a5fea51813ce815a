"""The CUDA calls of a trace in an iteration, and the marked call of torch around each.

Costs come from the iterations without marks, under the profiler only: marks slow the host down, so that it waits less
for the GPU. In a steady state the j-th call of a kind is the same call in every iteration.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .rank_file import MARK
from .trace import API, CALLS

SYNC, COPY, ALLOCATOR, LAUNCH, GRAPH_LAUNCH = "sync", "copy", "allocator", "launch", "graph_launch"
_KINDS = {
    SYNC: CALLS["stream_syncs"],
    COPY: CALLS["memcpy_calls"],
    ALLOCATOR: re.compile(
        r"^cu(da)?(Malloc|Free|HostAlloc|HostRegister|MallocHost|FreeHost|Mem(Create|Map|Unmap|Alloc))"
    ),
    LAUNCH: CALLS["kernel_launches"],
    GRAPH_LAUNCH: CALLS["graph_launches"],
}
_RANGES = ("cpu_op", "user_annotation")
_COPIES = re.compile(r"Memcpy (\w)\w*to(\w)\w* \((\w+) -> (\w+)\)")


@dataclass(slots=True, kw_only=True)
class CudaCall:
    """A call of the CUDA API on a thread that launches."""

    kind: str
    name: str
    ts: float
    us: float
    """Microseconds on average in the traced iterations, where the call is found again there; otherwise its own."""
    iteration: int
    mark: int | None
    """Number of the innermost marked call around it."""
    within: str
    """Name of the innermost range of torch around it; empty if there is none."""
    direction: str | None = None
    """Direction of a copy: 'HtoD pageable', 'HtoD pinned', 'DtoH pageable', 'DtoH pinned', 'DtoD'."""


def cuda_calls(events: Sequence[dict[str, Any]], iteration: str) -> list[CudaCall]:
    """All calls of the ranges of that name, by time, from the complete events of a trace."""
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"], e["tid"])
        for e in events
        if e["name"] == iteration and e.get("cat") == "user_annotation"
    )
    if not spans:
        return []
    starts, end = [start for start, _, _ in spans], spans[-1][1]
    copies = _copies(events)
    threads: defaultdict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if starts[0] <= event["ts"] <= end and event.get("cat") in (*API, *_RANGES):
            threads[event["tid"]].append(event)
    calls = []
    for thread, own in threads.items():
        # Watchdogs and readers of data make calls too, and nobody in the loop waits for those.
        if thread == spans[0][2] or any(_kind(event) in (LAUNCH, GRAPH_LAUNCH) for event in own):
            calls += _thread(own, starts, copies, iteration)
    return sorted(calls, key=lambda call: call.ts)


def counts(calls: Iterable[CudaCall], iterations: int) -> dict[str, float]:
    """Calls an iteration, by kind, and copies by direction."""
    counted: Counter[str] = Counter()
    for call in calls:
        counted[call.kind] += 1
        if call.direction is not None:
            counted[call.direction] += 1
    return {name: count / iterations for name, count in sorted(counted.items())}


def take_costs(marked: Sequence[CudaCall], traced: Sequence[CudaCall]) -> None:
    """Gives each marked call the time of its counterpart, kind by kind, where all iterations made the same calls."""
    for kind in (SYNC, COPY, ALLOCATOR):
        theirs, ours = (_by_iteration(calls, kind) for calls in (traced, marked))
        names = {tuple(call.name for call in calls) for calls in (*theirs, *ours)}
        if theirs and len(names) == 1:
            for j, same in enumerate(zip(*theirs, strict=True)):
                us = fmean(call.us for call in same)
                for iteration in ours:
                    iteration[j].us = us


def _by_iteration(calls: Sequence[CudaCall], kind: str) -> list[list[CudaCall]]:
    grouped: defaultdict[int, list[CudaCall]] = defaultdict(list)
    for call in calls:
        if call.kind == kind:
            grouped[call.iteration].append(call)
    return list(grouped.values())


def _kind(event: dict[str, Any]) -> str | None:
    if event.get("cat") not in API:
        return None
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(event["name"])), None)


def _copies(events: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Direction of each copy on the GPU, by correlation."""
    copies = {}
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            found = _COPIES.match(event["name"])
            args = event.get("args", {})
            if found and isinstance(args.get("correlation"), int):
                source, target, *memory = found.groups()
                host = next((kind for kind in memory if kind in ("Pageable", "Pinned")), None)
                copies[args["correlation"]] = f"{source}to{target}" + (f" {host.lower()}" if host else "")
    return copies


def _thread(
    events: list[dict[str, Any]], starts: Sequence[float], copies: dict[int, str], iteration: str
) -> list[CudaCall]:
    """Returns the calls of one thread, whose ranges nest."""
    calls = []
    stack: list[tuple[float, str, int | None]] = []  # (end, name, mark) of the open ranges
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        within, mark = stack[-1][1:] if stack else ("", None)
        name = event["name"]
        kind = _kind(event)
        if kind is not None:
            calls.append(
                CudaCall(
                    kind=kind,
                    name=name,
                    ts=event["ts"],
                    us=event["dur"],
                    iteration=bisect_right(starts, event["ts"]) - 1,
                    mark=mark,
                    within=within,
                    direction=copies.get(event.get("args", {}).get("correlation")) if kind == COPY else None,
                )
            )
        elif event["cat"] in _RANGES and name != iteration:
            end = event["ts"] + event["dur"]
            marked = name.startswith(MARK)
            stack.append((end, within, int(name[len(MARK) :])) if marked else (end, name, mark))
    return calls
