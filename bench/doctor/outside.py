"""Findings that no call of torch shows, beside those of calls, and the gain of leaving each finding out."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .backward import backward_us
from .findings import Seen, frame_of
from .frames import Frames
from .host import HostCosts
from .judge import HOST_COMPUTE, HOST_WAIT, LOADER, PERIODIC, STRAGGLER, Line, Place, line_of
from .periodic import Periodic, Work, recurring_work
from .rank_file import Frame, RankFile
from .samples import Estimate, Sample, Samples
from .stragglers import Together, more_gpu_work
from .trace import STAGES, host_stages_of_loop

SeenBy = Sequence[tuple[RankFile, dict[Place, Seen]]]
"""Each rank with its findings."""
Events = Mapping[int, Sequence[dict[str, Any]]]
"""Each rank's trace, by rank."""
_LINES = 15
_HOST = (LOADER, HOST_WAIT, HOST_COMPUTE)
_NO_LINE = Line("", 0, "no sample fell into it", "")
_NO_SLOWER_LINE = Line("", 0, "no line takes that much longer", "")


class LineTime(Frame):
    """Time of a line of the script and of its library calls, in an iteration without instruments."""

    ms: float
    low_ms: float
    """Ends of the interval of 95 %."""
    high_ms: float
    blocked_ms: float
    """Time within it that the loop's thread was blocked: it waited, or another thread worked for it."""


def add_host_findings(seen: SeenBy, events: Events) -> list[Periodic]:
    """Adds the findings of the samples to each rank's; returns the work of every n-th iteration, costliest first."""
    recurring = [recurring_work(rank) for rank, _ in seen]
    for (rank, own), works in zip(seen, recurring, strict=True):
        places = [work.recurring for work in works if work.recurring is not None]
        costs = HostCosts(rank, own, backward_us(events[rank["rank"]]), places)
        for place, estimate in costs.estimates().items():
            own.setdefault(place, Seen(us=None)).left_out = estimate
    return [_add_periodic(seen, works) for works in _by_period(recurring)]


def _by_period(recurring: Sequence[Sequence[Work]]) -> list[dict[int, Work]]:
    """The same work on each rank that has it, by the rank's place in the sequence; costliest first."""
    periods: defaultdict[int, dict[int, Work]] = defaultdict(dict)
    for i, works in enumerate(recurring):
        for work in works:
            periods[work.periodic["period"]].setdefault(i, work)
    return sorted(periods.values(), key=lambda own: -max(work.periodic["ms"] for work in own.values()))


def _add_periodic(seen: SeenBy, works: Mapping[int, Work]) -> Periodic:
    """Adds a finding at the line of the rank that works for itself: others may wait for it in a collective."""
    worker = max(works, key=lambda i: works[i].works_itself)
    periodic = works[worker].periodic
    place = Place(PERIODIC, _NO_LINE if periodic["line"] is None else line_of(periodic["line"]), ())
    detail = (
        f"one iteration in {periodic['period']} takes {periodic['with_ms']:.3f} ms, the others "
        f"{periodic['without_ms']:.3f} (medians; it came {periodic['times']} times)"
    )
    for _, own in seen:  # an iteration of every rank takes as long as that of the slowest
        own[place] = Seen(us=None, left_out=Estimate(periodic["ms"], periodic["half_ms"]), detail=detail)
    return periodic


def add_straggler(seen: SeenBy, events: Events, together: Together, iteration_ms: float) -> int | None:
    """Adds the rank that the others wait for, at the line, or in the kernel, that takes it longer than the others.

    Returns its number; None where there is no such rank.
    """
    late_rank = together.straggler(iteration_ms)
    if late_rank is None:
        return None
    # Collectives are seen under the profiler, which makes iterations longer.
    shorter = min(1.0, iteration_ms / max(rank["traced"]["ms"] for rank, _ in seen))
    late = Estimate(*(ms * shorter for ms in together.late[late_rank]))
    more_ms, kernel, kernel_ms = more_gpu_work(events, late_rank)
    waits = fmean(ms for rank, ms in together.waits_ms.items() if rank != late_rank)
    transfers = fmean(ms for rank, ms in together.transfers_ms.items() if rank != late_rank)
    detail = (
        f"rank {late_rank} comes last to {together.last[late_rank]:.0%} of the collectives, {late.ms:.3f} ms of an "
        f"iteration after the last of the others, which wait in collectives for {waits:.3f} ms and transfer for "
        f"{transfers:.3f}"
    )
    if more_ms >= late.ms / 2:
        place = Place(STRAGGLER, Line("", 0, f"its GPU's kernels, most {kernel[:60]}", ""), ())
        detail += f"; its GPU computes {more_ms:.3f} ms more, {kernel_ms:.3f} of it in one kernel"
    else:
        line, line_ms = _slower_line(seen, late_rank)
        # Equal lines differ by chance: one that explains little of a delay is not named.
        named = line_ms >= max(late.low / 2, late.ms / 4)
        place = Place(STRAGGLER, line if named else _NO_SLOWER_LINE, ())
        stage = _slower_stage(events, late_rank, late.ms / 2)
        told = f"its line takes {line_ms:.3f} ms more" if named else "none of its lines takes that much longer"
        detail += f"; {told}, {stage}"
        if late.low <= line_ms <= late.high:
            late = late._replace(ms=line_ms)  # of more iterations, and without the profiler
    for _, own in seen:
        for other in [other for other in own if other.kind in _HOST and other.user[:3] == place.user[:3]]:
            del own[other]  # this finding's
        own[place] = Seen(us=None, left_out=late, detail=detail)  # every rank waits as long
    return late_rank


def line_times(rank: RankFile) -> list[LineTime]:
    """Returns the script's lines that take longest, without the time of other lines of the script that they call."""
    samples = Samples(rank)
    whole = sorted(_by_line(rank, samples).items(), key=lambda each: -sum(sample.ms for sample in each[1]))
    lines = []
    for line, own in whole[:_LINES]:
        estimate = samples.estimate(own)
        lines.append(
            LineTime(
                **frame_of(line, rank["libraries"]),
                ms=estimate.ms,
                low_ms=estimate.low,
                high_ms=estimate.high,
                blocked_ms=samples.estimate(own, lambda sample: sample.blocked_ms).ms,
            )
        )
    return lines


def _slower_line(seen: SeenBy, late_rank: int) -> tuple[Line, float]:
    """The line that takes this rank longer than the mean of the others by most, and the milliseconds."""
    spent: dict[int, dict[tuple[str, int, str], float]] = {}
    named: dict[tuple[str, int, str], Line] = {}
    for rank, _ in seen:
        samples = Samples(rank)
        own = _by_line(rank, samples)
        named |= {line[:3]: line for line in own}
        spent[rank["rank"]] = {line[:3]: samples.estimate(taken).ms for line, taken in own.items()}
    others = [own for rank, own in spent.items() if rank != late_rank]
    more = {at: ms - fmean(own.get(at, 0.0) for own in others) for at, ms in spent[late_rank].items()}
    most = max(more, key=lambda at: more[at], default=None)
    return (_NO_LINE, 0.0) if most is None else (named[most], more[most])


def _slower_stage(events: Events, late_rank: int, least_ms: float) -> str:
    """Returns the stage in which the loop of this rank spends at least `least_ms` more than the mean of the others."""
    stages = {rank: host_stages_of_loop(own)[0] for rank, own in events.items()}
    others = [own for rank, own in stages.items() if rank != late_rank]
    more = {name: stages[late_rank][name] - fmean(own[name] for own in others) for name in STAGES}
    most = max(more, key=lambda name: more[name])
    return f"most in the stage {most}" if more[most] >= least_ms else "outside of any stage"


def _by_line(rank: RankFile, samples: Samples) -> dict[Line, list[Sample]]:
    frames = Frames(rank["libraries"])
    users = {number: line_of(frames.user(samples.stacks[number])) for number in {s.stack for s in samples.samples}}
    by_line: defaultdict[Line, list[Sample]] = defaultdict(list)
    for sample in samples.samples:
        by_line[users[sample.stack]].append(sample)
    return by_line
