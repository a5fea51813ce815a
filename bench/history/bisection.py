"""Which commit between two changed the time of an iteration: candidates run in turn with the good one, in one sitting.

A step asks on which side of half of the difference a candidate is. It looks at its pairs of runs again and again, and
ends with the first look that proves one side; looks share the step's probability of an error as 1/l^2, so that all of
them together keep it, and steps share what the user allows in equal parts. The answer takes for granted that the time
changed once: of several changes it is the one that crosses half of the difference.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from dlrm_bench.bench.stats.statistics import Estimate, compare

Place = Literal["before", "after", "undecided", "cannot run"]
FEWEST_PAIRS = 4
"""Pairs of runs before a step's first look; it looks after every second one, where the orders A B and B A balance."""


class Pair(NamedTuple):
    """Latencies [n] of a run of the good commit and of one of the candidate, neighbours in time; milliseconds."""

    good: np.ndarray
    candidate: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a candidate's pairs prove."""

    commit: str
    place: Place
    """Whether it is as before the change, or as after it."""
    pairs: int
    estimate: Estimate | None
    """Logarithm of its time over the good commit's."""
    error: float
    """Probability of a wrong place that was allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Where a bisection ended."""

    steps: Sequence[Step]
    first: str | None
    """The first commit after the change; None where that is not proven."""
    last_before: str | None
    between: Sequence[str]
    """Candidates of which it is not known on which side they are."""
    confidence: float
    """That the change lies between these two."""


Pairs = Callable[[str], Iterator[Pair]]
"""Yields pairs of runs of a candidate, as many as are taken. ValueError where the commit cannot be run."""


def bisect(candidates: Sequence[str], pairs: Pairs, confidence: float, most: int) -> Iterator[Step | Finding]:
    """Yields each step, and then what they prove together.

    candidates: commits after the good one, in order; the last one is the bad one. most: pairs of a candidate.
    """
    count = 1 + math.ceil(math.log2(max(2, len(candidates))))
    error = (1 - confidence) / count
    whole = decide(candidates[-1], pairs(candidates[-1]), None, error, most)
    steps = [whole]
    yield whole
    if whole.place != "after":
        yield Finding(steps=steps, first=None, last_before=None, between=candidates, confidence=0.0)
        return
    assert whole.estimate is not None
    half = whole.estimate.log / 2
    last_before, first, refused = -1, len(candidates) - 1, set[int]()
    while open_ones := [i for i in range(last_before + 1, first) if i not in refused]:
        # Of those that can be run, the middle one.
        place = open_ones[len(open_ones) // 2]
        step = decide(candidates[place], pairs(candidates[place]), half, error, most)
        steps.append(step)
        yield step
        if step.place == "before":
            last_before = place
        elif step.place == "after":
            first = place
        else:
            refused.add(place)
    taken = sum(step.error for step in steps if step.place in ("before", "after"))
    yield Finding(
        steps=steps,
        first=candidates[first],
        last_before=candidates[last_before] if last_before >= 0 else None,
        between=candidates[last_before + 1 : first + 1],
        confidence=1 - taken,
    )


def decide(commit: str, pairs: Iterator[Pair], half: float | None, error: float, most: int) -> Step:
    """Returns on which side of `half` of the difference a candidate is, proven with this probability of an error.

    half: logarithm of time over time; None for the bad commit, which is after the change if its time differs at all.
    most: pairs after which it stays undecided.
    """
    good: list[np.ndarray] = []
    candidate: list[np.ndarray] = []
    estimate: Estimate | None = None
    for look in range(1, 1 + max(0, (most - FEWEST_PAIRS) // 2 + 1)):
        wanted = FEWEST_PAIRS + 2 * (look - 1)
        try:
            while len(good) < wanted:
                pair = next(pairs)
                good.append(pair.good)
                candidate.append(pair.candidate)
        except ValueError:
            return Step(commit=commit, place="cannot run", pairs=len(good), estimate=None, error=0.0)
        estimate = compare(good, candidate, paired=True).estimates["p50"]
        place = _place(estimate, half, error * 6 / (math.pi * look) ** 2)
        if place != "undecided":
            return Step(commit=commit, place=place, pairs=len(good), estimate=estimate, error=error)
    return Step(commit=commit, place="undecided", pairs=len(good), estimate=estimate, error=error)


def _place(estimate: Estimate, half: float | None, error: float) -> Place:
    """The side of `half` that one look proves: by two tests at half of the error each, or, without `half`, by one."""
    if half is None:
        return "after" if estimate.p_value < error else "undecided"
    at_least, at_most = estimate.p_at_least(math.exp(half)), estimate.p_at_most(math.exp(half))
    slower_after = half > 0  # small p of being at least that much: it is less
    if at_least < error / 2:
        return "before" if slower_after else "after"
    if at_most < error / 2:
        return "after" if slower_after else "before"
    return "undecided"
