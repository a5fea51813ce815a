"""The whole diagnosis of a script, from the files of its ranks."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple, TypedDict

from . import cuda_calls as cuda
from .findings import Finding, Seen, findings_of, reads_within_model, seen_by
from .flame import Box, tree_of
from .interpreter_lock import Samples
from .judge import Place
from .outside import LineTime, add_host_findings, add_straggler, line_times
from .parts import Parts, parts_of
from .periodic import Periodic
from .rank_file import MARKED_ITERATION, RankFile, read_rank_files, trace_path
from .remedies import UNKNOWN, Prediction, predict, suggestion
from .site_folder import PACKAGE
from .stragglers import Together
from .stragglers import together as ranks_together
from .trace import ITERATION, gpu_times, host_work, ordered, read_trace

SCHEMA = 3
_LEAST_CPU_MS = 0.01


class RankSummary(TypedDict):
    """An iteration of one rank; times in milliseconds, counts an iteration."""

    rank: int
    ms: float
    median_ms: float
    cpu_ms: float
    """CPU time of the process."""
    thread_ms: float
    """CPU time of the thread of the training loop."""
    threads_ms: dict[str, float]
    """CPU time of the others, by name."""
    calls: dict[str, float]
    """CUDA calls: sync, copy, allocator, launch, graph_launch, and copies by direction. Empty without a GPU."""
    gil_wait_ms: float | None
    """Time in which the loop's thread, or autograd's for it, waited for Python's interpreter lock; None if the kernel
    does not report it."""
    gpu_computing_ms: float | None
    """Time of the GPU's work, collectives left out."""
    gpu_idle_fraction: float | None
    collective_wait_ms: float | None
    """Time in collectives that this rank waited for other ranks; None for ranks without common collectives."""
    collective_transfer_ms: float | None
    """The rest of the time in collectives."""
    late_ms: float | None
    """Delay with which this rank reached collectives after the last of the other ranks."""


class Overhead(TypedDict):
    """The doctor's own cost: an iteration in each of its windows, slowest rank."""

    plain_ms: float
    """An iteration without instruments."""
    hook_us: float
    """The doctor's own share of plain_ms."""
    sampled_ms: float
    """The same with the sampler of stacks."""
    sample_us: float
    """Time that one sample takes."""
    period_us: float
    """Time between two samples."""
    samples: int
    """Number of samples, of the rank with the fewest."""
    traced_ms: float
    """The same with the profiler on."""
    marked_ms: float
    """The same with each call of torch marked by line."""


class Diagnosis(TypedDict):
    """The content of --json."""

    schema: int
    created: str
    command: list[str]
    device: str
    gpu: str | None
    versions: dict[str, str]
    world_size: int
    found_by: str
    """The sign by which iterations were found: mark, progress (of a pipeline) or optimizer (its step)."""
    iterations: int
    """Those that were timed."""
    iteration_ms: float
    """An iteration of the slowest rank, without instruments."""
    overhead: Overhead
    ranks: list[RankSummary]
    parts: Parts
    """Times of the slowest rank."""
    findings: list[Finding]
    """Costliest first."""
    lines: list[LineTime]
    """The script's lines that take longest on the rank that the others wait for, else on the slowest."""
    periodic: list[Periodic]
    """Periodic work, costliest first."""
    status: int
    """The command's exit status: the doctor ends the ranks with 0 itself, except with --keep-running."""
    predictions: list[Prediction]
    notes: list[str]


class Bar(NamedTuple):
    """A span of the timeline of one iteration, in milliseconds from its beginning."""

    row: str
    start_ms: float
    ms: float


class Timeline(NamedTuple):
    """One marked iteration of one rank."""

    rank: int
    length_ms: float
    bars: list[Bar]


class Pictures(NamedTuple):
    """The data of the page's pictures."""

    timeline: Timeline
    flame: Box
    together: Together


def diagnose(
    folder: Path, command: Sequence[str], needed: int, lock: Mapping[str, Samples]
) -> tuple[Diagnosis, Pictures]:
    """Returns the diagnosis, and the pictures of the slowest rank and of the ranks side by side.

    folder: of the ranks' files. needed: number of iterations that the script had to make. lock: LockWatch's samples.
    ValueError if the script made too few iterations, or none was found.
    """
    ranks = _complete_ranks(folder, needed)
    events = {rank["rank"]: read_trace(trace_path(folder, rank["rank"])) for rank in ranks}
    together = ranks_together(events)
    seen, summaries = [], []
    for rank in ranks:
        own = events[rank["rank"]]
        traced, marked = cuda.cuda_calls(own, ITERATION), cuda.cuda_calls(own, MARKED_ITERATION)
        cuda.take_costs(marked, traced)
        seen.append((rank, seen_by(rank, marked)))
        summaries.append(_summary(rank, own, traced, lock.get(f"rank{rank['rank']}", Samples()).share, together))
    slowest = max(range(len(ranks)), key=lambda i: ranks[i]["plain"]["ms"])
    iteration_ms = ranks[slowest]["plain"]["ms"]
    periodic = add_host_findings(seen, events)
    late = add_straggler(seen, events, together, iteration_ms)
    shown = next((rank for rank in ranks if rank["rank"] == late), ranks[slowest])
    placed = findings_of(seen, suggestion)
    findings = [finding for _, finding in placed]
    gpu_ms = max((s["gpu_computing_ms"] for s in summaries if s["gpu_computing_ms"] is not None), default=None)
    rank, own_seen = seen[slowest]
    parts = parts_of(rank, events[rank["rank"]], gpu_ms)
    first = ranks[0]
    diagnosis = Diagnosis(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=list(command),
        device=first["device"],
        gpu=first["gpu"],
        versions=first["versions"],
        world_size=first["world_size"],
        found_by=first["found_by"],
        iterations=first["plain"]["iterations"],
        iteration_ms=iteration_ms,
        overhead=Overhead(
            plain_ms=iteration_ms,
            hook_us=max(rank["plain"]["hook_us"] for rank in ranks),
            sampled_ms=max(rank["sampled"]["ms"] for rank in ranks),
            sample_us=max(rank["sampled"]["own_us"] / max(1, len(rank["sampled"]["samples"])) for rank in ranks),
            period_us=max(rank["sampled"]["period_us"] for rank in ranks),
            samples=min(len(rank["sampled"]["samples"]) for rank in ranks),
            traced_ms=max(rank["traced"]["ms"] for rank in ranks),
            marked_ms=max(rank["marked"]["ms"] for rank in ranks),
        ),
        ranks=summaries,
        parts=parts,
        findings=findings,
        lines=line_times(shown),
        periodic=periodic,
        status=0,
        predictions=predict(
            findings,
            iteration_ms,
            parts,
            graphs=any(s["calls"].get(cuda.GRAPH_LAUNCH) for s in summaries),
            pipelined=first["found_by"] == "progress",
            keeps_out=list(dict.fromkeys(what for one in seen for what in _keeps_out(*one))),
        ),
        notes=_notes(ranks, summaries[slowest]),
    )
    timeline = _timeline(rank, own_seen, [place for place, _ in placed], events[rank["rank"]])
    return diagnosis, Pictures(timeline, tree_of(shown), together)


def read_diagnosis(path: Path) -> Diagnosis:
    """Returns the content of a --json file. ValueError if it is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a file that --json wrote") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is corrupt ({error}): name a file that --json wrote") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or "findings" not in content:
        raise ValueError(f"{path} is no diagnosis of schema {SCHEMA}: write one with --json")
    return Diagnosis(**content)  # type: ignore[typeddict-item]


def write_diagnosis(diagnosis: Diagnosis, path: Path) -> None:
    """Writes the JSON file in one step: where that fails, as on a full disk, an earlier file stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(diagnosis, indent=2) + "\n"
    if path.exists() and not path.is_file():  # such as a pipe, which cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link keeps leading there
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _complete_ranks(folder: Path, needed: int) -> list[RankFile]:
    errors = sorted(folder.glob("rank*.error"))
    if errors:
        raise RuntimeError(f"the examination itself failed on {errors[0].stem}:\n{errors[0].read_text('utf-8')}")
    ranks = read_rank_files(folder)
    if not ranks:
        raise ValueError(
            "no iteration was found in any process of the command: the doctor looks for progress() of a TorchRec "
            "pipeline and for steps of torch.optim's optimizers; other loops put "
            f"`with {PACKAGE}.iteration():` around an iteration. Python's flags -E, -I and -S keep the doctor out"
        )
    local = min(max(rank["local_world_size"] for rank in ranks), ranks[0]["world_size"])
    if len(ranks) < local:
        there = ", ".join(str(rank["rank"]) for rank in ranks)
        raise RuntimeError(f"only {len(ranks)} of this node's {local} ranks made iterations: {there}")
    short = [rank for rank in ranks if not rank["complete"]]
    if short:
        raise ValueError(
            f"the script made {short[0]['steps']} iterations on rank {short[0]['rank']}, and {needed} are needed: "
            "train longer, or lower --warmup and --iterations"
        )
    return ranks


def _summary(
    rank: RankFile,
    events: list[dict[str, object]],
    traced: list[cuda.CudaCall],
    waits: float | None,
    together: Together,
) -> RankSummary:
    in_order, iterations = ordered(events)
    gpu = gpu_times(in_order, iterations, host_work(in_order, iterations))
    plain = rank["plain"]
    return RankSummary(
        rank=rank["rank"],
        ms=plain["ms"],
        median_ms=median(plain["times_ms"]),
        cpu_ms=plain["cpu_ms"],
        thread_ms=plain["thread_ms"],
        threads_ms=plain["threads_ms"],
        calls=cuda.counts(traced, rank["traced"]["iterations"]),
        gil_wait_ms=None if waits is None else waits * plain["ms"],
        gpu_computing_ms=gpu and gpu.computing_ms,
        gpu_idle_fraction=gpu and gpu.idle_fraction,
        collective_wait_ms=together.waits_ms.get(rank["rank"]),
        collective_transfer_ms=together.transfers_ms.get(rank["rank"]),
        late_ms=together.late[rank["rank"]].ms if together.late else None,
    )


def _keeps_out(rank: RankFile, seen: Mapping[Place, Seen]) -> list[str]:
    return [*rank.get("keeps_out", []), *reads_within_model(rank, seen)]


def _notes(ranks: Sequence[RankFile], slowest: RankSummary) -> list[str]:
    first = ranks[0]
    notes = []
    if first["device"] != "cuda":
        notes.append(
            "no GPU here: findings show what the lines would do to tensors on a GPU, including tensors that a GPU "
            "script keeps on the host; times are those of the host's work, not of waits."
        )
    if first["reduced"]:
        notes.append("the script compiles functions: only reads and copies of values were looked for, no launches.")
    if len(ranks) < first["world_size"]:
        notes.append(f"{len(ranks)} of {first['world_size']} ranks are on this node; the others were not examined.")
    thread, wall = (fmean(rank["plain"][name] for rank in ranks) for name in ("thread_ms", "ms"))
    notes.append(f"the loop's thread computed for {thread:.3f} of {wall:.3f} ms; otherwise it waited, or was not run.")
    notes.append(_lock_note(slowest))
    return [*notes, *UNKNOWN]


def _lock_note(rank: RankSummary) -> str:
    waits = rank["gil_wait_ms"]
    if waits is None:
        return "how long the loop waits for Python's interpreter lock is not known: the kernel does not say here."
    others = ", ".join(f"{name} {ms:.3f}" for name, ms in list(rank["threads_ms"].items())[:3] if ms >= _LEAST_CPU_MS)
    beside = f" CPU time of other threads, ms: {others}." if others else ""
    return f"rank {rank['rank']} waited {waits:.3f} ms for Python's interpreter lock.{beside}"


def _timeline(
    rank: RankFile, seen: dict[Place, Seen], places: Sequence[Place], events: Sequence[dict[str, object]]
) -> Timeline:
    """The first marked iteration: calls of torch, those of each finding by its number, and the GPU's work."""
    begin, end = rank["marked"]["starts_us"][:2]
    bars = []

    def add(row: str, start_us: float, us: float) -> None:
        if 0 <= start_us <= end - begin:
            bars.append(Bar(row, start_us / 1000, us / 1000))

    for call in rank["calls"]:
        if call["iteration"] == 0 and call["main"]:
            add("calls of torch", call["start_us"] - begin, call["us"])
    for number, place in enumerate(places, start=1):
        for call in seen[place].calls if place in seen else ():
            if call["iteration"] == 0:
                add(f"{number} {place.kind}", call["start_us"] - begin, call["us"])
    ranges = [e for e in events if e["name"] == MARKED_ITERATION and e.get("cat") == "user_annotation"]
    zero = min(float(str(e["ts"])) for e in ranges)
    rows = {"kernel": "GPU: kernels", "gpu_memcpy": "GPU: copies"}
    for event in events:
        row = rows.get(str(event.get("cat")))
        if row is not None:
            add(row, float(str(event["ts"])) - zero, float(str(event["dur"])))
    return Timeline(rank["rank"], (end - begin) / 1000, bars)
