"""What costs an iteration its time, line by line: findings of the ranks' files and traces."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypedDict

from dlrm_bench.bench.doctor import cuda_calls as cuda
from dlrm_bench.bench.doctor.cuda_calls import CudaCall
from dlrm_bench.bench.doctor.frames import short_path
from dlrm_bench.bench.doctor.judge import ALLOCATOR, D2H, METRIC, PRINT, PROCESS_GROUP, SHAPE, SYNC, Judge, Line, Place
from dlrm_bench.bench.doctor.rank_file import Call, Frame, RankFile


class Finding(TypedDict):
    """Something that costs time at one line: an iteration, and mean of the ranks."""

    kind: str
    """One of judge.py's."""
    file: str | None
    """The user's line; None where no line of Python is known."""
    line: int
    function: str
    """The line's; where none is known, the range of the trace that the call was in."""
    text: str
    """The line itself."""
    library: Frame | None
    """The library's line below it, where the call was made; None where the user's line made it."""
    called_from: Frame | None
    """The library's line that called that one's function."""
    count: float
    """Calls of torch that did it; of the CUDA API where no line is known."""
    ms: float | None
    """Time that the host spent in them; None where it cannot be told from the rest.

    Waits, copies and allocations of a GPU as they took without marks; else the time of the marked calls themselves,
    divided by how much slower a marked iteration is, so that all of them fit into one without instruments.
    """
    worst_ms: float | None
    """That of the rank with the most."""
    waits: float
    """Calls of the CUDA API that waited."""
    copies: dict[str, float]
    """Copies by direction and kind of host memory."""
    suggestion: str


@dataclass(slots=True)
class Seen:
    """What one rank saw at a place, in all marked iterations."""

    count: int = 0
    us: float | None = 0.0
    waits: int = 0
    copies: Counter[str] = field(default_factory=Counter)
    calls: list[Call] = field(default_factory=list)


def seen_by(rank: RankFile, calls: Sequence[CudaCall]) -> dict[Place, Seen]:
    """What a rank saw. calls: the CUDA calls of the marked iterations, with their costs; empty without a GPU."""
    judge = Judge(rank)
    slower = _slower(rank)
    below: defaultdict[int, list[CudaCall]] = defaultdict(list)
    seen: defaultdict[Place, Seen] = defaultdict(Seen)
    for call in calls:
        if call.mark is not None:
            below[call.mark].append(call)
        elif call.kind in (cuda.SYNC, cuda.ALLOCATOR) or (call.direction or "").startswith("DtoH"):
            did = {cuda.SYNC: SYNC, cuda.ALLOCATOR: ALLOCATOR}.get(call.kind, D2H)
            place = Place(did, Line("", 0, call.within or "outside of torch", ""), ())
            _add(seen[place], call.us, [call])
    makers = {call["iteration"]: call for call in rank["calls"] if call["name"].endswith(".new_group")}
    for number, marked in enumerate(rank["calls"]):
        kind = judge.kind(marked, below[number])
        maker = makers.get(marked["iteration"])
        if maker is not None and judge.connects(marked, below[number]):
            place = judge.place(PROCESS_GROUP, maker)  # the cost of making a group in this iteration
            seen[place].us = (seen[place].us or 0.0) + marked["us"] / slower
        elif kind is not None:
            us = sum(c.us for c in below[number] if c.kind not in (cuda.LAUNCH, cuda.GRAPH_LAUNCH))
            whole = not below[number] or kind in (METRIC, PRINT, PROCESS_GROUP)
            _add(seen[judge.place(kind, marked)], marked["us"] / slower if whole else us, below[number], marked)
    for kind, marked, launches in judge.bursts(below):
        _add(seen[judge.place(kind, marked)], marked["us"] / slower, launches, marked)
    changed = judge.first_change()
    if changed is not None:
        place = judge.place(SHAPE, changed)
        seen[place] = Seen(count=rank["marked"]["iterations"], us=None, calls=[changed])
    return dict(seen)


def findings_of(
    ranks: Sequence[tuple[RankFile, dict[Place, Seen]]], suggest: Callable[[Place], str]
) -> list[tuple[Place, Finding]]:
    """Means over the ranks, costliest first, those of unknown cost last. suggest(place): what to do about it."""
    findings = []
    libraries = {folder for rank, _ in ranks for folder in rank["libraries"]}
    for place in {place: None for _, seen in ranks for place in seen}:
        each = [(seen.get(place, Seen()), rank["marked"]["iterations"]) for rank, seen in ranks]
        known = [one.us / n / 1000 for one, n in each if one.us is not None]
        costs = len(known) == len(each) and place.kind != SHAPE
        directions = {direction for one, _ in each for direction in one.copies}
        finding = Finding(
            kind=place.kind,
            file=short_path(place.user.file, libraries) if place.user.file else None,
            line=place.user.line,
            function=place.user.function,
            text=place.user.text,
            library=_frame(place.library[0], libraries) if place.library else None,
            called_from=_frame(place.library[1], libraries) if len(place.library) > 1 else None,
            count=fmean(one.count / n for one, n in each),
            ms=fmean(known) if costs else None,
            worst_ms=max(known) if costs else None,
            waits=fmean(one.waits / n for one, n in each),
            copies={name: fmean(one.copies[name] / n for one, n in each) for name in sorted(directions)},
            suggestion=suggest(place),
        )
        findings.append((place, finding))
    return sorted(findings, key=lambda each: -1.0 if each[1]["ms"] is None else each[1]["ms"], reverse=True)


def _slower(rank: RankFile) -> float:
    """How many times longer a marked iteration takes than one without instruments, the marks' own time left out."""
    marked = rank["marked"]
    return max(1.0, (marked["ms"] - marked["marks_ms"]) / rank["plain"]["ms"])


def _frame(line: Line, libraries: Collection[str]) -> Frame:
    return Frame(file=short_path(line.file, libraries), line=line.line, function=line.function, text=line.text)


def _add(seen: Seen, us: float, cuda_calls: Iterable[CudaCall], call: Call | None = None) -> None:
    seen.count += 1
    seen.us = (seen.us or 0.0) + us
    if call is not None:
        seen.calls.append(call)
    for made in cuda_calls:
        seen.waits += made.kind == cuda.SYNC
        if made.direction is not None:
            seen.copies[made.direction] += 1
