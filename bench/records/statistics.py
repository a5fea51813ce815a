"""Statistics of iteration latencies: what they are, how sure their median is, and whether A is faster than B.

Iterations of one run are correlated, and runs of the same program differ by more than their iterations explain: each
has its own memory layout, its own place in the drift of the machine. So runs are resampled first, and then blocks of
consecutive iterations within a run (a moving-block bootstrap in a cluster bootstrap: Davison and Hinkley, Bootstrap
Methods and their Application, 1997, sections 3.8 and 8.2.3). No value is left out.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Metric = Literal["p50", "p90", "p99", "mean"]
METRICS: tuple[Metric, ...] = ("p50", "p90", "p99", "mean")

Verdict = Literal["faster", "slower", "no difference proven"]

CONFIDENCE = 0.95
_MEDIANS = 1000  # resamples of a run for the interval of its median
_RESAMPLES = 100  # resamples of each run in a comparison
_DRAWS = 2000  # draws of runs in a comparison
_VALUES_AT_ONCE = 1 << 16  # resampled values that stay in a core's cache
_PERCENTILES = (50, 90, 99)


class Ratio(NamedTuple):
    """B over A: below 1, B takes less time."""

    value: float
    low: float
    high: float
    """[low, high] is the 95 % interval; (nan, nan) where nothing can be known of it."""

    @property
    def verdict(self) -> Verdict:
        """What the interval proves of B."""
        if self.high < 1:
            return "faster"
        if self.low > 1:
            return "slower"
        return "no difference proven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What can be said of B over A."""

    ratios: dict[Metric, Ratio]
    runs: tuple[int, int]
    paired: bool
    between_runs: bool
    """Whether the intervals include the variance between runs; if not, they describe these runs only."""


def mean_statistics(runs: Sequence[np.ndarray]) -> dict[Metric, float]:
    """The four metrics of runs, each the geometric mean over the runs; a run is its latencies [n], in milliseconds."""
    of_runs = [summary_statistics(run) for run in runs]
    return {metric: float(np.exp(np.mean([np.log(each[metric]) for each in of_runs]))) for metric in METRICS}


def slowest_rank(iterations_ms: np.ndarray, warmup: int = 0) -> np.ndarray:
    """Latencies [n] of the iterations after the first `warmup`, each that of its slowest rank.

    iterations_ms: [ranks, iterations], milliseconds, as iterations.npz holds them.
    """
    return np.asarray(iterations_ms[:, warmup:].max(axis=0))


def summary_statistics(series: np.ndarray) -> dict[Metric, float]:
    """The four metrics of latencies [n]."""
    return dict(zip(METRICS, map(float, _metrics(np.asarray(series, dtype=np.float64)[None])[0]), strict=True))


def median_ci95(values: np.ndarray, seed: int = 0) -> list[float]:
    """95 % interval [low, high] of the median of a series [n], by a moving-block bootstrap (percentile method).

    The same values and seed give the same interval. 1000 resamples; 60,000 values take half a second.
    """
    medians = [_medians(rows) for rows in block_resamples(values, _MEDIANS, np.random.default_rng(seed))]
    low, high = np.percentile(np.concatenate(medians), (2.5, 97.5))
    return [float(low), float(high)]


def block_resamples(series: np.ndarray, count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yields `count` moving-block resamples of a series [n], some of them [k, n] at a time; they may be overwritten.

    Neighbouring iterations are correlated, so whole blocks of consecutive values are drawn, from all n - l + 1 of them
    (Kuensch, Annals of Statistics 17(3), 1989), as many as make a series of length n. Block length l = ceil(n^(1/3)):
    the rate that is optimal for the variance of an estimator (Hall, Horowitz and Jing, Biometrika 82(3), 1995).
    """
    n = len(series)
    length = math.ceil(n ** (1 / 3))
    blocks = sliding_window_view(np.ascontiguousarray(series), length)
    at_once = max(1, _VALUES_AT_ONCE // n)
    for begin in range(0, count, at_once):
        drawn = rng.integers(len(blocks), size=(min(at_once, count - begin), math.ceil(n / length)))
        yield blocks[drawn].reshape(len(drawn), -1)[:, :n]


def compare(a: Sequence[np.ndarray], b: Sequence[np.ndarray], *, paired: bool = False, seed: int = 0) -> Comparison:
    """Ratio of B's metrics over A's, each with its 95 % interval.

    a, b: the runs of a side, each its latencies [n] after the warm-up, in milliseconds; a run of which only the mean
    is known is a series of length one. A side's metric is the geometric mean over its runs. paired: run i of A and run
    i of B were neighbours in time, so that the machine's drift cancels in their ratio; needs equally many. ValueError
    if a run is empty, or pairs are not. The same input and seed give the same result.

    The interval is log ratio +- t * s. s is the bootstrap's standard error, times sqrt(runs / (runs - 1)) because the
    bootstrap takes the runs at hand for all there are; t has Welch's degrees of freedom, or pairs - 1. Plain bootstrap
    percentiles would be too narrow for so few runs (Hesterberg, The American Statistician 69(4), 2015, section 4).
    With one run on a side only blocks of iterations can be resampled, and between_runs is False.
    """
    if not a or not b or any(len(run) == 0 for run in (*a, *b)):
        raise ValueError("a comparison needs at least one run with one timed iteration on each side")
    if paired and len(a) != len(b):
        raise ValueError(f"pairs need equally many runs on both sides, not {len(a)} and {len(b)}")
    rng = np.random.default_rng(seed)
    log_a, log_b = (np.log([list(summary_statistics(run).values()) for run in side]) for side in (a, b))
    pool_a, pool_b = (np.stack([_resampled_metrics(run, rng) for run in side]) for side in (a, b))
    between_runs = min(len(a), len(b)) > 1
    if between_runs and paired:
        error = _standard_error(pool_b - pool_a, rng)
        freedom: np.ndarray = np.full(len(METRICS), len(a) - 1.0)
    elif between_runs:
        error_a, error_b = _standard_error(pool_a, rng), _standard_error(pool_b, rng)
        error = np.hypot(error_a, error_b)
        with np.errstate(invalid="ignore"):  # no variance at all: any degrees of freedom will do
            freedom = error**4 / (error_a**4 / (len(a) - 1) + error_b**4 / (len(b) - 1))
    else:
        within = [pool.std(axis=1, ddof=1).mean(axis=0) / math.sqrt(len(pool)) for pool in (pool_a, pool_b)]
        error = np.hypot(*within)
        error[:] = np.nan if min(map(len, (*a, *b))) == 1 else error
        freedom = np.full(len(METRICS), np.inf)
    half_width = _student_quantile(np.where(np.isnan(freedom), 1.0, freedom)) * error
    return Comparison(
        ratios={
            metric: Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))
            for metric, middle, half in zip(METRICS, log_b.mean(axis=0) - log_a.mean(axis=0), half_width, strict=True)
        },
        runs=(len(a), len(b)),
        paired=paired and between_runs,
        between_runs=between_runs,
    )


def _student_quantile(freedom: np.ndarray) -> np.ndarray:
    """Half width, in standard errors, of the interval of Student's t, given degrees of freedom of any shape."""
    probability = (1 + CONFIDENCE) / 2
    if np.isinf(freedom).all():
        return np.full(freedom.shape, NormalDist().inv_cdf(probability))
    from scipy.special import stdtrit  # a quarter of a second, which a timed run and two records do without

    return np.asarray(stdtrit(freedom, probability))


def _metrics(rows: np.ndarray) -> np.ndarray:
    """METRICS of each row [k, n]: [k, 4]."""
    return np.column_stack((*np.percentile(rows, _PERCENTILES, axis=1), rows.mean(axis=1)))


def _resampled_metrics(run: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Logarithms of METRICS of block resamples of one run [n]: [_RESAMPLES, 4]."""
    return np.log(np.concatenate([_metrics(rows) for rows in block_resamples(run, _RESAMPLES, rng)]))


def _medians(rows: np.ndarray) -> np.ndarray:
    """Median of each row [k, n], which is overwritten: [k]. numpy's takes twice as long."""
    middle = rows.shape[1] // 2
    rows.partition(middle, axis=1)
    upper = rows[:, middle].astype(np.float64)
    return upper if rows.shape[1] % 2 else (upper + rows[:, :middle].max(axis=1)) / 2


def _standard_error(pool: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Standard error [4] of the mean over runs of a pool [runs, _RESAMPLES, 4]: runs are drawn, then their blocks."""
    runs = len(pool)
    drawn = rng.integers(runs, size=(_DRAWS, runs))
    means = pool[drawn, rng.integers(_RESAMPLES, size=drawn.shape)].mean(axis=1)
    return np.asarray(means.std(axis=0, ddof=1) * math.sqrt(runs / (runs - 1)))
