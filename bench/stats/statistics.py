"""Whether A is faster than B: ratios of runs, with intervals and tests.

The run is the unit. Runs of the same program differ by more than their iterations explain: each has its own memory
layout, its own place in the drift of the machine. So where there are several runs a side, a run is one number, the
logarithm of its metric, and Student's t does the rest; the spread of its iterations is in that number already. Only
where a side has a single run must its iterations give its error (bench/stats/series.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from .series import CONFIDENCE, METRICS, Metric, spread_of_log, summary_statistics

Verdict = Literal["faster", "slower", "no difference proven", "no verdict"]
UNPROVEN: Verdict = "no difference proven"
NO_VERDICT: Verdict = "no verdict"
"""Verdict on a comparison whose order, or machines, could cause a difference by themselves."""

NO_SPREAD = 1e-9
"""Standard error of a logarithm below which runs do not differ at all: float32 times differ by 6e-8, or are equal."""

# scipy.special takes a quarter of a second to import: functions that need it import it.


class Ratio(NamedTuple):
    """A ratio of two sides with its interval."""

    value: float
    low: float
    high: float
    """[low, high] is the interval; (nan, nan) if it is unknown."""

    @property
    def inverse(self) -> "Ratio":
        """The inverse ratio."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The logarithm of B's time over A's, estimated from runs; above 0, B takes more time."""

    log: float
    error: float
    """Standard error; nan if it is unknown."""
    freedom: float
    """Degrees of freedom of Student's t."""

    @property
    def too_coarse(self) -> bool:
        """Whether the runs' times agree to the last digit: they are too coarse to show a spread, and prove nothing."""
        return self.error < NO_SPREAD

    def speedup(self, confidence: float = CONFIDENCE) -> Ratio:
        """Returns A's time over B's with its two-sided interval, as tables, sentences and JSON show it."""
        return self.ratio(confidence).inverse

    def verdict(self, confidence: float = CONFIDENCE) -> Verdict:
        """Returns the proven difference of B, if no other comparison was made."""
        if not self.p_value < 1 - confidence:
            return UNPROVEN
        return "slower" if self.log > 0 else "faster"

    def minus(self, other: "Estimate") -> "Estimate":
        """Returns the difference from an independent estimate, with Welch's degrees of freedom."""
        parts = [(each.error**2, each.freedom) for each in (self, other)]
        error, freedom = _sum_of(parts)
        return Estimate(self.log - other.log, error, freedom)

    def ratio(self, confidence: float = CONFIDENCE) -> Ratio:
        """Returns B's time over A's with its two-sided interval."""
        if math.isnan(self.error):
            return Ratio(math.exp(self.log), math.nan, math.nan)
        half = student_t((1 + confidence) / 2, self.freedom) * self.error
        return Ratio(math.exp(self.log), math.exp(self.log - half), math.exp(self.log + half))

    def scaled(self, factor: float) -> "Estimate":
        """Returns the estimate for B's time multiplied by a known factor."""
        return Estimate(self.log + math.log(factor), self.error, self.freedom)

    @property
    def p_value(self) -> float:
        """Two-sided p value of no difference; nan if it is unknown, 1 if the times are too coarse."""
        return math.nan if math.isnan(self.error) else min(1.0, 2 * min(self.p_at_least(1.0), self.p_at_most(1.0)))

    def p_at_least(self, ratio: float) -> float:
        """Returns the one-sided p value of B being `ratio` times A or more: small if B is proven to be less."""
        return self._one_sided_p(self.log - math.log(ratio))

    def p_at_most(self, ratio: float) -> float:
        """Returns the one-sided p value of B being `ratio` times A or less: small if B is proven to be more."""
        return self._one_sided_p(math.log(ratio) - self.log)

    def p_not_equivalent(self, margin: float) -> float:
        """Returns the p value of a difference of `margin` (0.02: 2 %) or more, either way: small if both are
        equivalent.

        The larger one of two one-sided tests (TOST: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15(6),
        1987), against 1 + margin and its reciprocal.
        """
        return max(self.p_at_least(1 + margin), self.p_at_most(1 / (1 + margin)))

    def _one_sided_p(self, distance: float) -> float:
        """Returns the probability of a t statistic of at most this distance above zero; nan if it is unknown."""
        if math.isnan(self.error):
            return math.nan
        if self.too_coarse:
            return 1.0
        from scipy.special import stdtr

        return float(stdtr(min(self.freedom, 1e12), distance / self.error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of B with A."""

    estimates: dict[Metric, Estimate]
    runs: tuple[int, int]
    paired: bool
    between_runs: bool
    """Whether the intervals include the variance between runs; if not, they describe these runs only."""

    @property
    def ratios(self) -> dict[Metric, Ratio]:
        """B's metric over A's, each with its 95 % interval."""
        return {metric: estimate.ratio() for metric, estimate in self.estimates.items()}

    def minus(self, other: "Comparison") -> "Comparison":
        """Returns the difference of differences: B over A in this comparison, less B over A in another one."""
        return Comparison(
            estimates={metric: each.minus(other.estimates[metric]) for metric, each in self.estimates.items()},
            runs=(min(self.runs), min(other.runs)),
            paired=False,
            between_runs=self.between_runs and other.between_runs,
        )

    def spread(self, estimate: Estimate) -> float:
        """Returns the standard deviation between runs behind an estimate of this comparison; for pairs, of their
        differences."""
        a, b = self.runs
        return estimate.error / math.sqrt(1 / a if self.paired else 1 / a + 1 / b)


def mean_statistics(runs: Sequence[np.ndarray]) -> dict[Metric, float]:
    """Returns the four metrics of runs, each the geometric mean over the runs; a run is its latencies [n], in
    milliseconds."""
    of_runs = [summary_statistics(run) for run in runs]
    return {metric: float(np.exp(np.mean([np.log(each[metric]) for each in of_runs]))) for metric in METRICS}


def compare(a: Sequence[np.ndarray], b: Sequence[np.ndarray], *, paired: bool = False) -> Comparison:
    """Returns the ratios of B's metrics over A's, each with its 95 % interval.

    a, b: the runs of a side, each its latencies [n] after the warm-up, in milliseconds; a run of which only the mean is
    known is a series of length one. A side's metric is the geometric mean over its runs. paired: run i of A and run i
    of B were neighbours in time, so that the machine's drift cancels in their ratio; needs equal numbers of runs.
    ValueError if a run is empty, or if paired sides differ in their number of runs.

    The interval is that of Student's t: of the pairs' differences, or Welch's for two sides that are not paired. With
    one run per side the interval is that of its iterations, and between_runs is False.
    """
    if not a or not b or any(len(run) == 0 for run in (*a, *b)):
        raise ValueError("a comparison needs at least one run with one timed iteration on each side")
    if paired and len(a) != len(b):
        raise ValueError(f"pairs need equally many runs on both sides, not {len(a)} and {len(b)}")
    logs = [np.log([list(summary_statistics(run).values()) for run in side]) for side in (a, b)]
    between_runs = min(len(a), len(b)) > 1
    estimates: dict[Metric, Estimate] = {}
    for i, metric in enumerate(METRICS):
        left, right = logs[0][:, i], logs[1][:, i]
        if between_runs:
            estimates[metric] = of_pairs(left, right) if paired else welch(left, right)
        else:
            estimates[metric] = _of_these_runs(a, b, metric, float(right.mean() - left.mean()))
    return Comparison(
        estimates=estimates, runs=(len(a), len(b)), paired=paired and between_runs, between_runs=between_runs
    )


def student_t(probability: float, freedom: float) -> float:
    """Returns a quantile of Student's t distribution; of the normal distribution for infinite degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(min(freedom, 1e12), probability))


def of_pairs(a: np.ndarray, b: np.ndarray) -> Estimate:
    """Returns the estimate of the mean of b - a over pairs [n], n at least 2 (Student's t)."""
    differences = b - a
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return Estimate(float(differences.mean()), error, len(differences) - 1.0)


def welch(a: np.ndarray, b: np.ndarray) -> Estimate:
    """Returns the estimate of b's mean less a's, with a variance for each side (Welch, Biometrika 34, 1947).

    The degrees of freedom are at most twice those of the side with fewer runs: of 2 and of 10 runs, Welch's own let a
    program differ from itself in 10 % of tries.
    """
    error, freedom = _sum_of([(float(side.var(ddof=1)) / len(side), len(side) - 1) for side in (a, b)])
    return Estimate(float(b.mean() - a.mean()), error, freedom)


def _sum_of(variances: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the standard error of a sum of independent parts, each (variance, degrees of freedom), and its degrees of
    freedom; (nan, nan) where a part is unknown.

    These are at most what all parts would have with the fewest degrees of freedom of any.
    """
    total = sum(each for each, _ in variances)
    if math.isnan(total):
        return math.nan, math.nan
    below = sum(each**2 / freedom for each, freedom in variances)
    most = len(variances) * min(freedom for _, freedom in variances)
    return math.sqrt(total), min(total**2 / below, most) if below else 1.0


def _of_these_runs(a: Sequence[np.ndarray], b: Sequence[np.ndarray], metric: Metric, log: float) -> Estimate:
    """Returns the estimate of these runs' own ratio from their iterations, with Welch's degrees of freedom."""
    parts = []
    for side in (a, b):
        for run in side:
            spread = spread_of_log(run, metric)
            parts.append((spread.error**2 / len(side) ** 2, spread.freedom))
    error, freedom = _sum_of(parts)
    return Estimate(log, error, freedom)
