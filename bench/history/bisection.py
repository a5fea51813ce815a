"""Bisection for the commit that changed an iteration's time: candidates run in turn with the good one, in one sitting.

A step decides whether a candidate is below or above half of the difference. It tests its pairs of runs at several
looks, and ends with the first look that proves one side. The allowed probability of error is divided equally among the
steps, and each step's part among its looks (Bonferroni), so that it holds for all looks together. The answer assumes
a single change of the time: of several changes it is the one that crosses half of the difference.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from dlrm_bench.bench.stats.statistics import Estimate, of_pairs

Place = Literal["before", "after", "undecided", "cannot run"]
FEWEST_PAIRS = 4
"""Pairs of runs before a step's first look."""
_GROWTH = 1.4  # from look to look
_MOST_UNDECIDED = 2
"""Candidates that stay undecided before a bisection ends: others would take as many pairs."""


class Pair(NamedTuple):
    """Latencies [n] of a run of the good commit and of one of the candidate, neighbours in time; milliseconds."""

    good: np.ndarray
    candidate: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of a candidate's pairs."""

    commit: str
    place: Place
    """Position of the candidate relative to the change."""
    pairs: int
    estimate: Estimate | None
    """Logarithm of its time over the good commit's."""
    error: float
    """Probability of a wrong place that was allowed."""
    reason: str = ""
    """The error that ended its runs, where one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of a bisection."""

    steps: Sequence[Step]
    first: str | None
    """The first commit after the change; None where that is not proven."""
    between: Sequence[str]
    """Candidates whose side of the change is not known."""
    confidence: float
    """Probability that the change is there."""


class CannotRunError(ValueError):
    """Raised where a candidate cannot be run. Other errors, such as those of the good commit, end the bisection."""


Pairs = Callable[[str], Iterator[Pair]]
"""Yields pairs of runs of a candidate, as many as are taken. CannotRunError where the commit cannot be run."""


def bisect(candidates: Sequence[str], pairs: Pairs, confidence: float, most: int) -> Iterator[Step | Finding]:
    """Yields each step, and then the finding of all of them.

    candidates: commits after the good one, in order; the last one is the bad one. most: pairs of a candidate.
    """
    count = 1 + math.ceil(math.log2(max(2, len(candidates))))
    error = (1 - confidence) / count
    whole = decide(candidates[-1], pairs(candidates[-1]), None, error, most)
    steps = [whole]
    yield whole
    if whole.place != "after":
        yield Finding(steps=steps, first=None, between=candidates, confidence=0.0)
        return
    assert whole.estimate is not None
    half = whole.estimate.log / 2
    last_before, first, refused, undecided = -1, len(candidates) - 1, set[int](), 0
    while open_ones := [i for i in range(last_before + 1, first) if i not in refused]:
        # The middle one of those that can be run.
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
            undecided += step.place == "undecided"
            if undecided == _MOST_UNDECIDED:
                break
    taken = sum(step.error for step in steps if step.place in ("before", "after"))
    yield Finding(
        steps=steps,
        first=candidates[first],
        between=candidates[last_before + 1 : first + 1],
        confidence=1 - taken,
    )


def decide(commit: str, pairs: Iterator[Pair], half: float | None, error: float, most: int) -> Step:
    """Returns a candidate's side of `half`, half of the difference, proven with this probability of error.

    half: logarithm of time over time; None for the bad commit, which is after the change if its time differs at all.
    most: pairs after which it stays undecided, as it does where it cannot be run after some pairs.
    """
    logs: list[list[float]] = []
    estimate: Estimate | None = None
    looks = looks_of(most)
    for wanted in looks:
        try:
            while len(logs) < wanted:
                logs.append([math.log(np.median(run)) for run in next(pairs)])
        except CannotRunError as failure:
            return Step(
                commit=commit,
                place="undecided" if logs else "cannot run",
                pairs=len(logs),
                estimate=of_pairs(*np.array(logs).T) if len(logs) > 1 else None,
                error=error if logs else 0.0,
                reason=str(failure),
            )
        estimate = of_pairs(*np.array(logs).T)
        place = _place(estimate, half, error / len(looks))
        if place != "undecided":
            return Step(commit=commit, place=place, pairs=len(logs), estimate=estimate, error=error)
    return Step(commit=commit, place="undecided", pairs=len(logs), estimate=estimate, error=error)


def looks_of(most: int) -> list[int]:
    """Returns the numbers of pairs at which a step looks, `most` last: even ones, in which the orders A B and B A
    balance. most: at least FEWEST_PAIRS."""
    looks = [FEWEST_PAIRS]
    while (wanted := 2 * math.ceil(looks[-1] * _GROWTH / 2)) < most:
        looks.append(wanted)
    return [*looks, most] if most > looks[-1] else looks


def _place(estimate: Estimate, half: float | None, error: float) -> Place:
    """Returns the side of `half` that one look proves, by two tests with half of the error probability each; without
    `half`, by one test."""
    if half is None:
        return "after" if estimate.p_value < error else "undecided"
    at_least, at_most = estimate.p_at_least(math.exp(half)), estimate.p_at_most(math.exp(half))
    slower_after = half > 0  # small p of being at least that much: it is less
    if at_least < error / 2:
        return "before" if slower_after else "after"
    if at_most < error / 2:
        return "after" if slower_after else "before"
    return "undecided"
