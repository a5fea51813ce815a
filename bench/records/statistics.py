"""Is A faster than B? Ratios of latencies with intervals that respect how iterations come about.

Iterations of one run are correlated, and runs of the same program differ by more than their iterations explain: each
has its own memory layout, its own place in the drift of the machine. So runs are resampled first, and then blocks of
consecutive iterations within a run (a moving-block bootstrap in a cluster bootstrap: Davison and Hinkley, Bootstrap
Methods and their Application, 1997, sections 3.8 and 8.2.3). No value is left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy import stats

Metric = Literal["p50", "p90", "p99", "mean"]
METRICS: tuple[Metric, ...] = ("p50", "p90", "p99", "mean")

Verdict = Literal["faster", "slower", "no difference proven"]

CONFIDENCE = 0.95
_RESAMPLES = 100  # of the blocks of each run
_DRAWS = 2000  # of runs
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
    """Whether the intervals hold the variance between runs. Without, they speak of these very runs and no others."""


def summary_statistics(series: np.ndarray) -> dict[Metric, float]:
    """The four metrics of latencies [n]."""
    return dict(zip(METRICS, map(float, _metrics(np.asarray(series, dtype=np.float64)[None])[0]), strict=True))


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
    pool_a, pool_b = (np.stack([_block_resamples(run, rng) for run in side]) for side in (a, b))
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
    half_width = stats.t.ppf((1 + CONFIDENCE) / 2, np.nan_to_num(freedom, nan=1.0)) * error
    return Comparison(
        ratios={
            metric: Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))
            for metric, middle, half in zip(METRICS, log_b.mean(axis=0) - log_a.mean(axis=0), half_width, strict=True)
        },
        runs=(len(a), len(b)),
        paired=paired and between_runs,
        between_runs=between_runs,
    )


def _metrics(rows: np.ndarray) -> np.ndarray:
    """METRICS of each row [k, n]: [k, 4]."""
    return np.column_stack((*np.percentile(rows, _PERCENTILES, axis=1), rows.mean(axis=1)))


def _block_resamples(run: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Logarithms of the metrics of moving-block resamples of one run [n]: [_RESAMPLES, 4].

    Blocks of ceil(n^(1/3)) consecutive values, as in median_ci95 of bench/records/record.py, which gives the sources.
    """
    n = len(run)
    length = math.ceil(n ** (1 / 3))
    blocks = sliding_window_view(np.ascontiguousarray(run, dtype=np.float64), length)
    chunk = max(1, 2_000_000 // n)  # rows at a time, 16 MB
    rows = [
        _metrics(blocks[rng.integers(len(blocks), size=(k, math.ceil(n / length)))].reshape(k, -1)[:, :n])
        for k in (min(chunk, _RESAMPLES - begin) for begin in range(0, _RESAMPLES, chunk))
    ]
    return np.log(np.concatenate(rows))


def _standard_error(pool: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Standard error [4] of the mean over runs of a pool [runs, _RESAMPLES, 4]: runs are drawn, then their blocks."""
    runs = len(pool)
    drawn = rng.integers(runs, size=(_DRAWS, runs))
    means = pool[drawn, rng.integers(_RESAMPLES, size=drawn.shape)].mean(axis=1)
    return np.asarray(means.std(axis=0, ddof=1) * math.sqrt(runs / (runs - 1)))
