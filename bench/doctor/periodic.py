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
"""Maximum probability that as many slow iterations at random places would form such a comb."""
_OUTSTANDING = 0.05, 6.0
"""A slow iteration takes longer than the median by this share of it, and by this many median deviations."""
_LEAST = 0.01
"""Share of the mean iteration below which it is no finding."""
_Times = Sequence[float | None]
"""Milliseconds of iterations in order; None where not measured."""


class Comb(NamedTuple):
    """Every `period`-th iteration from `first` on."""

    period: int
    first: int
    extra_ms: float
    """Median time by which these take longer than the others."""

    def holds(self, iteration: int) -> bool:
        """Whether an iteration is one of them."""
        return iteration >= self.first and (iteration - self.first) % self.period == 0


class Periodic(TypedDict):
    """Work that comes every n-th iteration of the slowest rank; times in milliseconds."""

    period: int
    with_ms: float
    """Median of the iterations that have it."""
    without_ms: float
    """Median of those without periodic work."""
    ms: float
    """Milliseconds that it adds to the mean iteration."""
    half_ms: float
    """Half of the interval of 95 % around it."""
    times: int
    """Number of its occurrences, under the sampler too."""
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


def find(times: _Times) -> list[Comb]:
    """Returns combs of slow iterations, the shortest period first. times: of iterations in order; None where not
    measured."""
    left = list(times)
    combs: list[Comb] = []
    typical = median(_measured(times))
    for period in range(2, len(left) // _FEWEST + 1):
        for first in range(period):
            comb = _comb(left, period, first, typical)
            if comb is not None:
                combs.append(comb)
                left = _shortened(left, comb, comb.extra_ms)
    return combs


def recurring_work(rank: RankFile) -> list[Work]:
    """Returns the periodic work of a rank, costliest first."""
    plain, sampled = rank["plain"]["times_ms"], Samples(rank)
    scale = _undisturbed(plain) / _undisturbed(sampled.times_ms)
    times = [*plain, *[None] * SETTLING, *(time * scale for time in sampled.times_ms)]
    combs = find(times)
    begin = len(plain) + SETTLING
    found = []
    for number, comb in enumerate(combs):
        # The sampler slows what computes and not what waits, so that scaled times tell a period but hardly its cost.
        often = len(_split(plain, comb)[0]) >= _FEWEST
        known = plain if often else times
        with_it, _ = _split(known, comb)
        share = len(with_it) / len(_measured(known))
        ms = _extra_ms(known, combs[:number], comb) * share
        if ms < _LEAST * fmean(_measured(known)):
            continue
        own = frozenset(i for i in range(sampled.iterations) if comb.holds(begin + i))
        line = _line(rank, sampled, own)
        without = [time for i, time in enumerate(known) if time is not None and not any(c.holds(i) for c in combs)]
        periodic = Periodic(
            period=comb.period,
            with_ms=median(with_it),
            without_ms=median(without or _measured(known)),
            ms=ms,
            half_ms=estimate_of(with_it).half_ms * share,
            times=len(_split(times, comb)[0]),
            line=line,
        )
        place = None if line is None else Recurring(Place(PERIODIC, line_of(line), ()), own)
        found.append(Work(periodic, place, _works_itself(sampled, own)))
    return sorted(found, key=lambda work: -work.periodic["ms"])


def _undisturbed(times: Sequence[float]) -> float:
    """Returns the first decile of the times: other work on a machine makes most iterations of a window longer, and few
    of them shorter."""
    return sorted(times)[len(times) // 10]


def _measured(times: _Times) -> list[float]:
    return [time for time in times if time is not None]


def _split(times: _Times, comb: Comb) -> tuple[list[float], list[float]]:
    """Returns the measured times of the comb's iterations, and those of the others."""
    own = [time for i, time in enumerate(times) if time is not None and comb.holds(i)]
    return own, [time for i, time in enumerate(times) if time is not None and not comb.holds(i)]


def _extra_ms(times: _Times, before: Sequence[Comb], comb: Comb) -> float:
    """Median time by which a comb's iterations take longer, what the combs found before it add left out."""
    for other in before:
        times = _shortened(times, other, _extra_ms(times, (), other))
    own, others = _split(times, comb)
    return median(own) - median(others)


def _shortened(times: _Times, comb: Comb, by_ms: float) -> list[float | None]:
    return [time if time is None or not comb.holds(i) else time - by_ms for i, time in enumerate(times)]


def _comb(times: _Times, period: int, first: int, typical: float) -> Comb | None:
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
    with_it = _faster_half(samples, own)
    without = _faster_half(samples, frozenset(range(samples.iterations)) - own)
    for sample in samples.samples:
        stack = samples.stacks[sample.stack]
        frame = next((f for f in stack if (f["file"], f["function"]) in loop), frames.user(stack))
        known = at.get(line_of(frame), (frame, 0.0))
        if sample.iteration in with_it:
            at[line_of(frame)] = (frame, known[1] + sample.ms / len(with_it))
        elif sample.iteration in without:
            at[line_of(frame)] = (frame, known[1] - sample.ms / len(without))
    best = max(at.values(), key=lambda each: each[1], default=None)
    return best[0] if own and best is not None and best[1] > 0 else None


def _faster_half(samples: Samples, iterations: frozenset[int]) -> frozenset[int]:
    """Those that no stall of the machine made longer, at whatever line it came."""
    ordered = sorted(iterations, key=lambda i: samples.times_ms[i])
    return frozenset(ordered[: (len(ordered) + 1) // 2])


def _works_itself(samples: Samples, own: frozenset[int]) -> float:
    taken = [sample for sample in samples.samples if sample.iteration in own]
    working = [sample.ms - (sample.blocked_ms if launches(samples.stacks[sample.stack]) else 0.0) for sample in taken]
    return sum(working) / (sum(sample.ms for sample in taken) or 1.0)
