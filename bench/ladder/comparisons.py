"""A ladder as a list of comparisons: each rung with the first and with the previous rung, tested as one family."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dlrm_bench.bench.compare.comparison import Result
from dlrm_bench.bench.compare.notes import TOO_COARSE, lucky
from dlrm_bench.bench.compare.sides import Side, side_of_records
from dlrm_bench.bench.records.ladder import Judged
from dlrm_bench.bench.records.record import Record
from dlrm_bench.bench.stats.repetitions import finds, holm
from dlrm_bench.bench.stats.rounds import estimates_of_rounds
from dlrm_bench.bench.stats.series import AUTO_CONFIDENCE, CONFIDENCE, summary_statistics
from dlrm_bench.bench.stats.statistics import UNPROVEN, Comparison, Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRung:
    """A rung and its comparisons, which are None for the first rung."""

    side: Side
    over_first: Result | None
    over_previous: Result | None


def judge_rungs(members: dict[str, list[Record]], *, by_precision: bool = False) -> list[JudgedRung]:
    """Returns the rungs with the differences that their rounds prove; members: the timed runs of each rung, one per
    round.

    by_precision: whether the ladder ended once its rounds could find a difference of a given size.
    """
    confidence = AUTO_CONFIDENCE if by_precision else CONFIDENCE
    return judge_sides([replace(side_of_records(name, runs), confidence=confidence) for name, runs in members.items()])


def judge_sides(sides: Sequence[Side]) -> list[JudgedRung]:
    """Returns rungs with the differences that their rounds prove. Each side has one run per round.

    p values are corrected (Holm) for all comparisons of a ladder's table, with the first and with the previous rung:
    otherwise 16 rungs of the same program show a false difference in two of three ladders.
    """
    others = range(1, len(sides))
    pairs = list(dict.fromkeys([*((0, i) for i in others), *((i - 1, i) for i in others)]))
    logs = np.array([[math.log(summary_statistics(run)["p50"]) for run in side.series] for side in sides])
    estimates = estimates_of_rounds(logs, _places(sides), pairs)
    corrected = holm([math.nan if estimate is None else estimate.p_value for estimate in estimates])
    results = {}
    for (i, j), known, p in zip(pairs, estimates, corrected, strict=True):
        rounds = logs.shape[1]
        estimate = known or Estimate(float(logs[j, 0] - logs[i, 0]), math.nan, math.nan)
        of_median = Comparison(
            estimates={"p50": estimate}, runs=(rounds, rounds), paired=True, between_runs=known is not None
        )
        results[i, j] = Result(
            name=sides[j].label,
            a=sides[i],
            b=sides[j],
            comparison=of_median,
            estimate=estimate,
            p_value=p,
            comparisons=len(pairs),
        )
    return [
        JudgedRung(side=side, over_first=results.get((0, i)), over_previous=results.get((i - 1, i)))
        for i, side in enumerate(sides)
    ]


def as_judged(result: Result | None) -> Judged | None:
    """Returns a comparison in the form of ladder.json."""
    if result is None:
        return None
    estimate, known = result.estimate, result.comparison.between_runs
    return Judged(
        log=estimate.log,
        error=estimate.error if known else None,
        freedom=estimate.freedom if known else None,
        p_value=result.p_value if known else None,
        proven=result.verdict != UNPROVEN,
    )


def agreement_by_luck(rung: JudgedRung) -> str | None:
    """Returns a sentence for each other rung with which the rounds agree better than the noise of their iterations
    predicts, joined; None without any."""
    return "; ".join(dict.fromkeys(_agreements(rung))) or None


def _agreements(rung: JudgedRung) -> Iterator[str]:
    for result in (rung.over_first, rung.over_previous):
        if result is None or not result.comparison.between_runs:
            continue
        between = result.comparison.spread(result.estimate)
        within = lucky(between, result.spread_of_runs(), True, result.estimate.freedom)
        if result.estimate.too_coarse:
            yield (
                f"the ratios of {rung.side.label} to {result.a.label} agree to the last digit from round to round: the "
                f"timings are too coarse; {TOO_COARSE}"
            )
        elif within is not None:
            yield (
                f"the ratios of {rung.side.label} to {result.a.label} agree better from round to round "
                f"({between:.2%}) than their iterations predict ({within:.2%}): the interval is narrow by luck; run "
                "more rounds"
            )


@dataclass(frozen=True, slots=True)
class Precision:
    """The smallest difference that the rounds of a ladder find."""

    detectable: tuple[float, float, float]
    """Smallest difference that every comparison with the first or the previous rung finds, as (low, value, high)."""
    rounds_needed: int | None
    """Number of rounds that find the requested difference, with the same spread; None if too many."""

    def in_words(self, rounds: int, detect: float) -> str:
        """Returns a sentence such as '6 rounds find differences from 3.10% (...); 2.00% takes about 11'."""
        found = f"{rounds} rounds {finds(self.detectable)}"
        if self.detectable[1] <= detect:
            return found
        needed = "too many" if self.rounds_needed is None else f"about {self.rounds_needed}"
        return f"{found}; {detect:.2%} takes {needed}"


def precision_of(members: dict[str, list[Record]], detect: float) -> Precision:
    """Returns the precision of at least two rounds of rungs; members: the timed runs of each rung, one per round."""
    rungs = judge_rungs(members, by_precision=True)
    results = [result for rung in rungs for result in (rung.over_first, rung.over_previous) if result is not None]
    found = [result.detectable or (math.inf, math.inf, math.inf) for result in results]  # too coarse: it finds nothing
    needed = [result.runs_needed(detect) for result in results]
    most = None if None in needed else max((each for each in needed if each is not None), default=2)
    return Precision(max(found, key=lambda each: each[1], default=(0.0, 0.0, 0.0)), most)


def _places(sides: Sequence[Side]) -> np.ndarray:
    """Returns the position of each run in the order in which all runs ended, [rungs, rounds]."""
    ended = np.array([side.finished for side in sides])
    places = np.empty(ended.size, dtype=np.int64)
    places[np.argsort(ended.T.ravel(), kind="stable")] = np.arange(ended.size)  # by round, where times are equal
    return places.reshape(ended.T.shape).T
