"""One run's series of latencies: the error of its median from this run alone, and whether the run was steady.

Iterations are correlated, so n of them are worth fewer independent ones. Intervals are made of sections: consecutive
parts of the series, long enough to be nearly independent of each other, and so few that Student's t matters (batch
means; for quantiles "sectioning", Asmussen and Glynn, Stochastic Simulation, 2007, section III.5a). No value is left
out.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

Metric = Literal["p50", "p90", "p99", "mean"]
METRICS: tuple[Metric, ...] = ("p50", "p90", "p99", "mean")

CONFIDENCE = 0.95
AUTO_CONFIDENCE = 0.97
"""Confidence of intervals, and of tests, in a ladder that ran until it could find a difference of a given size.

Stopping when the spread happens to look small makes 95 % intervals cover 92 % to 94 %; 97 % ones cover 95 % and more
(simulated in tests/bench/stats/test_repetitions.py).
"""
_PERCENTILES: dict[Metric, float] = {"p50": 50, "p90": 90, "p99": 99}

# Coverage of 95 % intervals of the median of autoregressive series, normal and log-normal (2000 tries each, of 200, 550
# and 1000 iterations): coefficient 0 and .5: .94 to .96; .9: .93 to .94; .95: .89 at 200, where nearly all are called
# too short, and .92 to .94 above.
_TIMES_APART = 6  # correlation times in a section
_FEWEST, _MOST = 5, 20  # sections
_LEAST_VALUES = 4 * _FEWEST  # shortest series that can be split into sections

_PARTS, _SECTIONS_OF_PART, _QUIETEST = 8, 4, 6
_SHARE_OF_QUIETEST = 0.667
"""Mean of the six smallest of eight variances of four normal values each, where the variance is 1."""
_STEADY_WITHIN = 0.02  # largest ratio of the largest part to the smallest in a steady run
_STEADY_F = 4.0  # variance between the parts over that within them; simulated in tests/bench/stats/test_series.py


class Spread(NamedTuple):
    """The error of one series' metric due to the noise of its iterations."""

    error: float
    """Standard error of the metric's logarithm; nan if the series is too short."""
    freedom: float
    """Degrees of freedom of the error."""
    too_short: bool
    """Whether the series has fewer correlation times than its sections should: the interval may be too narrow."""


class Drift(NamedTuple):
    """The change within one run."""

    change: float
    """Median of the later of the slowest and the fastest eighth of the series over that of the earlier one, minus 1."""
    steady: bool
    """False if a change of more than 2 % exceeds the noise of the iterations."""


def slowest_rank(iterations_ms: np.ndarray, warmup: int = 0) -> np.ndarray:
    """Returns the latencies [n] of the iterations after the first `warmup`, each that of its slowest rank.

    iterations_ms: [ranks, iterations], milliseconds, as iterations.npz holds them.
    """
    return np.asarray(iterations_ms[:, warmup:].max(axis=0))


def by_clock(iterations_ms: np.ndarray, warmup: int = 0) -> float:
    """Returns elapsed milliseconds per iteration: the total of the rank that took longest, over the number of
    iterations.

    iterations_ms: as for slowest_rank, with at least one iteration after the warm-up.
    """
    timed = np.asarray(iterations_ms[:, warmup:], dtype=np.float64)
    return float(timed.sum(axis=1).max()) / timed.shape[1]


def summary_statistics(series: np.ndarray) -> dict[Metric, float]:
    """Returns the four metrics of latencies [n]."""
    return dict(zip(METRICS, map(float, _metrics(np.asarray(series, dtype=np.float64)[None])[0]), strict=True))


def correlation_time(series: np.ndarray) -> float:
    """Returns the number of iterations worth one independent iteration, for the mean of a series [n]: 1 without
    correlation.

    The sum of autocorrelations up to the first negative pair of them (initial positive sequence with its monotone
    bound: Geyer, Statistical Science 7(4), 1992, section 3.3).
    """
    n = len(series)
    centred = series - series.mean()
    size = 1 << (2 * n - 1).bit_length()  # zeros behind the series, or its end would be correlated with its beginning
    power = np.abs(np.fft.rfft(centred, size)) ** 2
    covariance = np.fft.irfft(power, size)[:n]
    if n < 4 or covariance[0] <= 0:
        return 1.0
    correlation = covariance[: n // 2 * 2] / covariance[0]
    pairs = correlation[::2] + correlation[1::2]
    first_negative = int(np.argmax(pairs <= 0)) if (pairs <= 0).any() else len(pairs)
    return float(max(1.0, 2 * np.minimum.accumulate(pairs[:first_negative]).sum() - 1)) if first_negative else 1.0


def spread_of_log(series: np.ndarray, metric: Metric) -> Spread:
    """Returns the standard error of the logarithm of a metric of one series [n], from the metric of its sections.

    Sections have six correlation times each, but there are at least 5 and at most 20; for a percentile, each section
    has a value or two beyond it. Deviations are taken from the whole series' metric.
    """
    n, values = len(series), np.asarray(series, dtype=np.float64)
    if n < _LEAST_VALUES:
        return Spread(math.nan, math.nan, too_short=True)
    whole, beyond = summary_statistics(values)[metric], n
    correlated = values
    if metric != "mean":
        correlated = (values > whole).astype(np.float64)
        beyond = int(2 * n * (1 - _PERCENTILES[metric] / 100))
    fitting = int(n / (_TIMES_APART * correlation_time(correlated)))
    sections = max(_FEWEST, min(_MOST, fitting, beyond))
    length = n // sections
    # The first iterations, fewer than a section has, count only in the whole series' metric.
    of_sections = _metrics(values[n - sections * length :].reshape(sections, length))[:, METRICS.index(metric)]
    deviations = np.log(of_sections / whole)
    error = math.sqrt(float((deviations**2).sum()) / (sections - 1) / sections)
    return Spread(error, sections - 1.0, too_short=fitting < _FEWEST)


def median_ci95(series: np.ndarray) -> list[float] | None:
    """Returns the 95 % interval [low, high] of the median of latencies [n] from this run alone; None below 20 values.

    It does not include the spread between runs of the same program.
    """
    spread = spread_of_log(series, "p50")
    if math.isnan(spread.error):
        return None
    from scipy.special import stdtrit  # a quarter of a second

    half = float(stdtrit(spread.freedom, (1 + CONFIDENCE) / 2)) * spread.error
    median = summary_statistics(series)["p50"]
    return [median * math.exp(-half), median * math.exp(half)]


def drift_within(series: np.ndarray) -> Drift | None:
    """Returns the difference of the medians of the eighths of latencies [n]; None below 96 values.

    They count as different if the largest is more than 2 % over the smallest, and if their variance is over four times
    that which the sections within the eighths and the correlation of the iterations predict (an analysis of variance,
    as of batch means). The variance within is that of the six quietest eighths, so that a change in the middle of an
    eighth, such as by the power cap, does not hide itself. A slow drift, a bad start and an excursion in the middle are
    all found. At most 3 % of series without a drift are called unsteady, but 20 % of short and strongly correlated ones
    (coefficient .9, 250 values), which wander.
    """
    length = len(series) // (_PARTS * _SECTIONS_OF_PART)
    if length < 3:
        return None
    logs = np.log(np.asarray(series[len(series) - _PARTS * _SECTIONS_OF_PART * length :], dtype=np.float64))
    parts = logs.reshape(_PARTS, -1)
    medians = np.median(parts, axis=1)
    sections = np.median(logs.reshape(_PARTS, _SECTIONS_OF_PART, length), axis=2)
    within = float(np.sort(sections.var(axis=1, ddof=1))[:_QUIETEST].mean()) / _SHARE_OF_QUIETEST
    correlated = (parts > medians[:, None]).astype(np.float64)
    expected = within * _of_mean_by_sections(correlation_time(correlated.ravel()), length)
    between = float(sections.mean(axis=1).var(ddof=1))
    first, last = sorted((int(np.argmin(medians)), int(np.argmax(medians))))
    differ = float(medians.max() - medians.min()) > math.log1p(_STEADY_WITHIN) and between > _STEADY_F * expected
    return Drift(math.expm1(float(medians[last] - medians[first])), steady=not differ)


def _of_mean_by_sections(time: float, length: int) -> float:
    """Returns the variance of the mean of a part over the variance of its sections' means, of autocorrelated values.

    time: correlation time of an autoregressive series. length: number of values of a section. Without correlation, 1 /
    sections.
    """
    coefficient = (time - 1) / (time + 1)

    def of_mean(n: int) -> float:
        if coefficient <= 0:
            return 1 / n
        decay = 2 * coefficient * (1 - coefficient**n) / (n * (1 - coefficient) ** 2)
        return ((1 + coefficient) / (1 - coefficient) - decay) / n

    part, section = of_mean(_SECTIONS_OF_PART * length), of_mean(length)
    return part / ((section - part) * _SECTIONS_OF_PART / (_SECTIONS_OF_PART - 1))


def _metrics(rows: np.ndarray) -> np.ndarray:
    """Returns METRICS of each row [k, n]: [k, 4]."""
    return np.column_stack((*np.percentile(rows, tuple(_PERCENTILES.values()), axis=1), rows.mean(axis=1)))
