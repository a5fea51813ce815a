"""Work of every n-th iteration, such as evaluation, logging and sorting: its period, its cost and its line.

A mean of iterations hides it, a median leaves it out, and the few marked iterations rarely contain it.
"""

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple, TypedDict

from .frames import Frames
from .host import Recurring, launches
from .judge import PERIODIC, Line, Place, line_of
from .rank_file import SETTLING, Frame, RankFile
from .samples import Samples, estimate_of

_FEWEST = 3
"""Times that something must have come."""
_CHANCE = 1e-3
"""Largest probability of a comb of slow iterations among equally many slow ones at random places."""
_OUTSTANDING = 0.05, 6.0
"""A slow iteration takes longer than the median by this share of it, and by this many median deviations."""
_LEAST = 0.01
"""Share of the mean iteration below which it is no finding."""


class Comb(NamedTuple):
    """Every `period`-th iteration from `first` on."""

    period: int
    first: int
    extra_ms: float
    """Median time by which these take longer."""

    def holds(self, iteration: int) -> bool:
        """Whether an iteration is one of them."""
        return iteration >= self.first and (iteration - self.first) % self.period == 0


class Periodic(TypedDict):
    """Work that comes every n-th iteration of the slowest rank; times in milliseconds."""

    period: int
    with_ms: float
    """Median of the iterations that have it."""
    without_ms: float
    """Median of all others."""
    ms: float
    """Milliseconds that it adds to the mean iteration."""
    half_ms: float
    """Half of the interval of 95 % around it."""
    times: int
    """Number of its occurrences."""
    line: Frame | None
    """The line of the loop that causes it; None if no sample fell into it."""


class Work(NamedTuple):
    """Periodic work of one rank."""

    periodic: Periodic
    recurring: Recurring | None
    """The places of its samples; None if there are none."""
    works_itself: float
    """Share of its samples' time in which the rank computes or runs code outside of torch; else it may wait for another
    rank that does."""


def find(times: Sequence[float | None]) -> list[Comb]:
    """Returns combs of slow iterations, the shortest period first. times: of iterations in order; None where not
    measured."""
    left = list(times)
    combs: list[Comb] = []
    typical = median([time for time in times if time is not None])
    for period in range(2, len(left) // _FEWEST + 1):
        for first in range(period):
            comb = _comb(left, period, first, typical)
            if comb is not None:
                combs.append(comb)
                left = [
                    time if time is None or not comb.holds(i) else time - comb.extra_ms for i, time in enumerate(left)
                ]
    return combs


def recurring_work(rank: RankFile) -> list[Work]:
    """Returns the periodic work of a rank, costliest first."""
    plain, sampled = rank["plain"]["times_ms"], Samples(rank)
    scale = median(plain) / median(sampled.times_ms)
    times = [*plain, *[None] * SETTLING, *(time * scale for time in sampled.times_ms)]
    measured = [time for time in times if time is not None]
    combs = find(times)
    begin = len(plain) + SETTLING
    found = []
    for comb in combs:
        with_it = [time for i, time in enumerate(times) if time is not None and comb.holds(i)]
        ms = comb.extra_ms * len(with_it) / len(measured)
        if ms < _LEAST * fmean(measured):
            continue
        own = frozenset(i for i in range(sampled.iterations) if comb.holds(begin + i))
        line = _line(rank, sampled, own)
        without = [time for i, time in enumerate(times) if time is not None and not any(c.holds(i) for c in combs)]
        periodic = Periodic(
            period=comb.period,
            with_ms=median(with_it),
            without_ms=median(without or measured),
            ms=ms,
            half_ms=estimate_of(with_it).half_ms * len(with_it) / len(measured),
            times=len(with_it),
            line=line,
        )
        place = None if line is None else Recurring(Place(PERIODIC, line_of(line), ()), own)
        found.append(Work(periodic, place, _works_itself(sampled, own)))
    return sorted(found, key=lambda work: -work.periodic["ms"])


def _comb(times: Sequence[float | None], period: int, first: int, typical: float) -> Comb | None:
    """typical: median of all times, which those of a comb are all above."""
    own = [time for time in times[first::period] if time is not None]
    if len(own) < _FEWEST or min(own) <= typical:
        return None
    rest = [time for i, time in enumerate(times) if time is not None and (i - first) % period]
    middle = median(rest)
    spread = median(abs(time - middle) for time in rest)
    limit = middle + max(_OUTSTANDING[0] * middle, _OUTSTANDING[1] * spread)
    if min(own) <= limit:
        return None
    # How often others are as slow, one more than were seen; and the number of combs of as few teeth.
    slow = (sum(time > limit for time in rest) + 1) / (len(rest) + 1)
    if slow ** len(own) * len(times) ** 2 / len(own) ** 3 > _CHANCE:
        return None
    return Comb(period, first, median(own) - middle)


def _line(rank: RankFile, samples: Samples, own: frozenset[int]) -> Frame | None:
    """The line of the training loop's function that takes longer in these iterations than in the others."""
    frames = Frames(rank["libraries"])
    loop = {(frame["file"], frame["function"]) for frame in rank["loop"] if not frames.is_library(frame)}
    at: dict[Line, tuple[Frame, float]] = {}
    others = max(1, samples.iterations - len(own))
    for sample in samples.samples:
        stack = samples.stacks[sample.stack]
        frame = next((f for f in stack if (f["file"], f["function"]) in loop), frames.user(stack))
        share = 1 / len(own) if sample.iteration in own else -1 / others
        known = at.get(line_of(frame), (frame, 0.0))
        at[line_of(frame)] = (frame, known[1] + sample.ms * share)
    best = max(at.values(), key=lambda each: each[1], default=None)
    return best[0] if own and best is not None and best[1] > 0 else None


def _works_itself(samples: Samples, own: frozenset[int]) -> float:
    taken = [sample for sample in samples.samples if sample.iteration in own]
    working = [sample.running_ms if launches(samples.stacks[sample.stack]) else sample.ms for sample in taken]
    return sum(working) / (sum(sample.ms for sample in taken) or 1.0)
