"""Costs of an iteration, line by line: findings from the ranks' files and traces."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple, TypedDict

from . import cuda_calls as cuda
from .cuda_calls import CudaCall
from .frames import short_path
from .judge import ALLOCATOR, D2H, METRIC, OUTSIDE, PRINT, PROCESS_GROUP, SHAPE, SYNC, SYNCHRONIZE, Judge, Line, Place
from .rank_file import Call, Frame, RankFile
from .samples import Estimate

_COSTS = (cuda.SYNC, cuda.COPY, cuda.ALLOCATOR)
"""Kinds of CUDA calls whose own time is a finding's; launches cost time in torch as well."""


class Read(Frame):
    """A line that waits within a finding."""

    count: float
    """Number of occurrences in an iteration."""


class Finding(TypedDict):
    """Something that costs time at one line: an iteration, and mean of the ranks."""

    kind: str
    """A kind of judge.py."""
    file: str | None
    """The user's line; None where no line of Python is known."""
    line: int
    function: str
    """The line's function; where none is known, the range of the trace around the call."""
    text: str
    """The line itself."""
    library: Frame | None
    """The library's line below it, where the call was made; None where the user's line made it."""
    called_from: Frame | None
    """The library's line that called the function of `library`."""
    count: float
    """Number of calls of torch; of the CUDA API where no line is known; 1 for costs without a call."""
    ms: float | None
    """Time that leaving the line out would remove from an iteration; None where it cannot be told from the rest.

    Time of the stack's samples at its line, for a loop at all of its lines, with their backward; `calls_ms` where that
    is within the interval. Samples belong to one finding each.
    """
    low_ms: float | None
    """Ends of the interval of 95 %; None where the estimate is that of calls alone."""
    high_ms: float | None
    calls_ms: float | None
    """Time in the calls alone, None for costs without a call of torch.

    Waits, copies and allocations of a GPU with their times without marks; else the time of the marked calls themselves,
    divided by the slowdown of a marked iteration, so that all of them fit into one without instruments. A call within
    another one counts once, at its own line.
    """
    detail: str
    """Further facts; empty for most."""
    reads: list["Read"]
    """Lines of a metric's library at which the host waits; empty for other findings."""
    worst_ms: float | None
    """The rank with the most: its time."""
    waits: float
    """Calls of the CUDA API that waited."""
    copies: dict[str, float]
    """Copies by direction and kind of host memory."""
    suggestion: str


_TIMES: tuple[Literal["ms", "low_ms", "high_ms", "calls_ms", "worst_ms"], ...]
_TIMES = ("ms", "low_ms", "high_ms", "calls_ms", "worst_ms")
_READS = (SYNC, SYNCHRONIZE, D2H, PRINT, METRIC)
"""Kinds of findings that a CUDA graph cannot hold."""


@dataclass(slots=True)
class Seen:
    """One rank's observations at a place, in all marked iterations."""

    count: int = 0
    us: float | None = 0.0
    waits: int = 0
    copies: Counter[str] = field(default_factory=Counter)
    calls: list[Call] = field(default_factory=list)
    reads: Counter[Line] = field(default_factory=Counter)
    """Lines of a metric's library that wait; empty for other findings."""
    left_out: Estimate | None = None
    """Time that leaving it out removes, by samples; None where these cannot tell."""
    detail: str = ""

    def ms(self, iterations: int) -> float | None:
        """Returns its milliseconds of an iteration; None if unknown. iterations: the marked ones."""
        in_calls = None if self.us is None else self.us / iterations / 1000
        if self.left_out is None:
            return in_calls
        agrees = in_calls is not None and self.left_out.low <= in_calls <= self.left_out.high
        return in_calls if agrees else self.left_out.ms

    def add(self, other: "Seen") -> None:
        """Takes another place's calls in."""
        self.count += other.count
        self.us = None if self.us is None or other.us is None else self.us + other.us
        self.waits += other.waits
        self.copies += other.copies
        self.calls += other.calls


class _Counted(NamedTuple):
    """A call that a finding holds."""

    place: Place
    us: float
    whole: bool
    """Whether `us` is all of its time; otherwise that of its CUDA calls."""
    first: bool
    """Whether it counts as a call; the calls that connect a group belong to the one that made it."""


def seen_by(rank: RankFile, calls: Sequence[CudaCall]) -> dict[Place, Seen]:
    """Returns a rank's observations by place. calls: the CUDA calls of the marked iterations, with their costs; empty
    without a GPU.

    Each microsecond counts once, at the innermost call that a finding holds: no finding of a thread takes longer than
    its iterations.
    """
    judge = Judge(rank)
    scale = _scale(rank, calls)
    below: defaultdict[int, list[CudaCall]] = defaultdict(list)
    seen: defaultdict[Place, Seen] = defaultdict(Seen)
    for call in calls:
        if call.mark is not None:
            below[call.mark].append(call)
        elif call.kind in (cuda.SYNC, cuda.ALLOCATOR) or (call.direction or "").startswith("DtoH"):
            did = {cuda.SYNC: SYNC, cuda.ALLOCATOR: ALLOCATOR}.get(call.kind, D2H)
            place = Place(did, Line("", 0, call.within or "outside of torch", ""), ())
            _add(seen[place], call.us * scale, [call])
    counted = _counted(rank, judge, below, scale)
    nested = _nested_us(rank, counted)
    for number, (place, us, _, first) in counted.items():
        own = max(0.0, us - nested[number])
        if first:
            _add(seen[place], own, below[number], rank["calls"][number])
            if place.kind == METRIC and judge.waits(rank["calls"][number], below[number]):
                seen[place].reads[judge.line_in_metric(rank["calls"][number])] += 1
        else:
            seen[place].us = (seen[place].us or 0.0) + own
    longer = slower(rank)
    for kind, number, launches in judge.bursts(below):
        marked = rank["calls"][number]
        us = marked["us"] / longer - (counted[number].us if number in counted else 0.0)
        _add(seen[judge.place(kind, marked)], max(0.0, us), launches, marked)
    changed = judge.first_change()
    if changed is not None:
        place = judge.place(SHAPE, changed)
        seen[place] = Seen(count=rank["marked"]["iterations"], us=None, calls=[changed])
    return dict(seen)


def _counted(
    rank: RankFile, judge: Judge, below: Mapping[int, Sequence[CudaCall]], scale: float
) -> dict[int, _Counted]:
    """Calls that are findings by themselves, by number."""
    longer = slower(rank)
    makers = {call["iteration"]: call for call in rank["calls"] if call["name"].endswith(".new_group")}
    counted = {}
    for number, marked in enumerate(rank["calls"]):
        made = below.get(number, ())
        kind, maker = judge.kind(marked, made), makers.get(marked["iteration"])
        if maker is not None and maker is not marked and judge.connects(marked, made):
            # The cost of making a group in this iteration.
            counted[number] = _Counted(judge.place(PROCESS_GROUP, maker), marked["us"] / longer, True, False)
        elif kind is not None:
            whole = not made or kind in (METRIC, PRINT, PROCESS_GROUP)
            us = scale * sum(c.us for c in made if c.kind in _COSTS)
            counted[number] = _Counted(judge.place(kind, marked), marked["us"] / longer if whole else us, whole, True)
    return counted


def _nested_us(rank: RankFile, counted: Mapping[int, _Counted]) -> dict[int, float]:
    """Time of the counted calls within each counted call whose whole time is taken, by its number."""
    nested: defaultdict[int, float] = defaultdict(float)
    for number, (_, us, _, _) in counted.items():
        outer = rank["calls"][number]["within"]
        while outer is not None and outer not in counted:
            outer = rank["calls"][outer]["within"]
        if outer is not None and counted[outer].whole:
            nested[outer] += us
    return nested


def findings_of(
    ranks: Sequence[tuple[RankFile, dict[Place, Seen]]], suggest: Callable[[Place], str]
) -> list[tuple[Place, Finding]]:
    """Returns means over the ranks, costliest first, those of unknown cost last. suggest(place): the remedy."""
    findings = []
    libraries = {folder for rank, _ in ranks for folder in rank["libraries"]}
    for place in {place: None for _, seen in ranks for place in seen}:
        each = [(seen.get(place, Seen()), rank["marked"]["iterations"]) for rank, seen in ranks]
        known = [ms for ms in (one.ms(n) for one, n in each) if ms is not None]
        in_calls = [one.us / n / 1000 for one, n in each if one.us is not None]
        sampled = [one.left_out for one, _ in each if one.left_out is not None]
        reads = sum((one.reads for one, _ in each), Counter[Line]())
        marked = sum(n for _, n in each)
        costs = len(known) == len(each) and place.kind != SHAPE
        directions = {direction for one, _ in each for direction in one.copies}
        finding = Finding(
            kind=place.kind,
            file=short_path(place.user.file, libraries) if place.user.file else None,
            line=place.user.line,
            function=place.user.function,
            text=place.user.text,
            library=frame_of(place.library[0], libraries) if place.library else None,
            called_from=frame_of(place.library[1], libraries) if len(place.library) > 1 else None,
            count=1.0 if place.kind in OUTSIDE else fmean(one.count / n for one, n in each),
            ms=fmean(known) if costs else None,
            low_ms=sum(one.low for one in sampled) / len(each) if costs and sampled else None,
            high_ms=sum(one.high for one in sampled) / len(each) if costs and sampled else None,
            calls_ms=fmean(in_calls) if costs and place.kind not in OUTSIDE and in_calls else None,
            worst_ms=max(known) if costs else None,
            detail=next((one.detail for one, _ in each if one.detail), ""),
            reads=[Read(**frame_of(line, libraries), count=count / marked) for line, count in reads.most_common()],
            waits=fmean(one.waits / n for one, n in each),
            copies={name: fmean(one.copies[name] / n for one, n in each) for name in sorted(directions)},
            suggestion=suggest(place),
        )
        findings.append((place, finding))
    _fit(findings, max(rank["plain"]["ms"] for rank, _ in ranks))
    return sorted(findings, key=lambda each: -1.0 if each[1]["ms"] is None else each[1]["ms"], reverse=True)


def _fit(findings: Sequence[tuple[Place, Finding]], iteration_ms: float) -> None:
    """Scales times down if their sum exceeds the iteration: each time is correct only within its interval."""
    together = sum(finding["ms"] or 0.0 for _, finding in findings)
    scale = iteration_ms / together if together > iteration_ms else 1.0
    for _, finding in findings:
        for name in _TIMES:
            ms = finding[name]
            finding[name] = None if ms is None else ms * scale


def _scale(rank: RankFile, calls: Iterable[CudaCall]) -> float:
    """Returns the factor on costs of CUDA calls: 1, or less if under the profiler they exceed the iteration."""
    total = sum(call.us for call in calls if call.kind in _COSTS)
    return min(1.0, rank["plain"]["ms"] * 1000 * rank["marked"]["iterations"] / total) if total else 1.0


def slower(rank: RankFile) -> float:
    """Returns the slowdown of a marked iteration over one without instruments, the marks' own time left out."""
    marked = rank["marked"]
    return max(1.0, (marked["ms"] - marked["marks_ms"]) / rank["plain"]["ms"])


def frame_of(line: Line, libraries: Collection[str]) -> Frame:
    """Returns a line as findings have it, with a short path."""
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


def reads_within_model(rank: RankFile, seen: Mapping[Place, Seen]) -> list[str]:
    """Returns the user's lines that make the host wait within progress(), where a graph would hold them."""
    lines = []
    for place, of in seen.items():
        inside = any(frame["function"] == "progress" for call in of.calls for frame in rank["stacks"][call["stack"]])
        if place.kind in _READS and not place.library and place.user.file and inside:
            lines.append(f"{place.user.file}:{place.user.line} reads the device within the model")
    return lines
