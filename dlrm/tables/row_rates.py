"""Rates at which the ids of a sample name each row of a table: from the distribution of random ids, or from counts.

Rows of one rate are a class, so that the forty million rows of a table are some ten thousand numbers.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.tables.id_statistics import IdStatistics

_DRAWS = 400_000
"""Numbers drawn for a table; its rates then lead to misses that differ by a percent from draw to draw."""
_LEAST_CLASSES = 10_000
_RARE = 5
"""Counts up to this one are not trusted as they stand: see `counted_rates`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRates:
    """The rows of a table in classes, those named most often first."""

    rates: NDArray[np.float64]
    """[classes]: expected number of a sample's ids that name one row of the class; descending."""
    rows: NDArray[np.float64]
    """[classes]: number of rows, all together those of the table."""

    @classmethod
    def sorted(cls, rates: NDArray[np.float64], rows: NDArray[np.float64]) -> "RowRates":
        """Returns the classes of these rates, in any order, by rate."""
        order = np.argsort(-rates, kind="stable")
        return cls(rates=rates[order], rows=rows[order])


@functools.cache
def random_rates(rows: int, hot: int, ids: IdStatistics) -> RowRates:
    """Returns the rates of a table of `rows` rows, `hot` of whose ids a sample of random data names.

    Rows are drawn as ids name them, first ids and others apart, and each counts for 1 / rate rows: the mean over ids of
    g(rate) / rate is, up to hot, the sum over rows of g(rate). Of a row that a known id names, the other ids are as
    those of any row (Mecke's formula for a Poisson process): its own first id, and where ids are expanded as many first
    ids of others as a Poisson variable of mean hot - 1 says, each of them uniform.
    """
    others = hot - 1
    classes = min(rows, max(_DRAWS // hot, _LEAST_CLASSES))
    rng = np.random.default_rng(0)
    first = _first_rates(_stratified_firsts(classes, rows, ids.skew), rows, ids.skew)
    rates = [first + _others(rng, classes, rows, others, ids)]
    weights = [np.full(classes, 1 / classes)]
    if others:
        named = first if ids.expanded else np.zeros(classes)
        own = _first_rates(rng.integers(0, rows, classes), rows, ids.skew)
        rates.append(named + own + _others(rng, classes, rows, others, ids))
        weights.append(np.full(classes, others / classes))
    rate = np.concatenate(rates)
    numbers = np.concatenate(weights) / rate
    return RowRates.sorted(rate, numbers * (rows / numbers.sum()))


def counted_rates(counts: NDArray[np.integer], samples: int) -> RowRates:
    """Returns the rates of the rows of a table, of which `counts` [rows] ids were found in `samples` samples.

    A row that few ids named is named less often than it seems to be, and one that none named, more often: rows of
    count c have a mean rate of (c + 1) n(c + 1) / n(c) / samples, where n is the number of rows by count (I. J. Good,
    "The population frequencies of species and the estimation of population parameters", Biometrika 1953).
    """
    _, numbers, rates = _rates_by_count(counts, samples)
    return RowRates.sorted(rates, numbers.astype(np.float64))


def row_rates(counts: NDArray[np.integer], samples: int) -> NDArray[np.float32]:
    """Returns the rate of each row, fp32 [rows]; those of `counted_rates`."""
    values, _, rates = _rates_by_count(counts, samples)
    return rates.astype(np.float32)[np.searchsorted(values, counts)]


def assumed_rates(rows: int, hot: int) -> NDArray[np.float32]:
    """Returns a rate for each row of a table of which nothing was counted, fp32 [rows].

    One of the `hot` ids of a sample is assumed to be by Zipf's law of exponent 1, with frequent rows numbered first, as
    data sets tend to do, and the others to be any row. So a table whose samples have many ids comes before one of as
    many rows and few ids.
    """
    rates = np.arange(1, rows + 1, dtype=np.float32)
    np.divide(np.float32(1 / math.log(rows + 1)), rates, out=rates)  # in place: tables are large
    rates += np.float32((hot - 1) / rows)
    return rates


def _rates_by_count(
    counts: NDArray[np.integer], samples: int
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.float64]]:
    """Returns the counts that there are, ascending, the number of rows of each, and the rate of these rows."""
    values, numbers = np.unique(counts, return_counts=True)
    number_of = dict(zip(values.tolist(), numbers.tolist(), strict=True))
    rates = values.astype(np.float64)
    for place, count in enumerate(values.tolist()):
        more = number_of.get(count + 1)
        if count <= _RARE and more is not None:
            rates[place] = (count + 1) * more / number_of[count]
    rates = np.maximum.accumulate(rates)  # a row that was named more often is not placed behind one that was less
    return values, numbers, rates / samples


def _stratified_firsts(count: int, rows: int, skew: float) -> NDArray[np.int64]:
    """Returns `count` first ids of distributions.zipf_ids, one of each quantile."""
    uniform = (np.arange(count) + 0.5) / count
    log_end, power = math.log(rows + 1), 1.0 - skew
    logs = uniform * log_end if _is_one(power, rows) else np.log1p(uniform * math.expm1(power * log_end)) / power
    return np.clip(np.exp(logs).astype(np.int64) - 1, 0, rows - 1)


def _first_rates(ids: NDArray[np.int64], rows: int, skew: float) -> NDArray[np.float64]:
    """Returns the probability of each of these ids to be a sample's first: the integral of the density x^-skew on
    [1, rows + 1) over [id + 1, id + 2)."""
    log_end, power = math.log(rows + 1), 1.0 - skew
    below = np.log1p(ids)
    step = np.log1p(1 / (ids + 1.0))
    if _is_one(power, rows):
        return np.asarray(step / log_end)
    return np.asarray(np.exp(power * below) * np.expm1(power * step) / math.expm1(power * log_end))


def _others(rng: np.random.Generator, count: int, rows: int, others: int, ids: IdStatistics) -> NDArray[np.float64]:
    """Returns `count` drawn rates at which ids after a sample's first name a row."""
    if not ids.expanded or not others:
        return np.full(count, others / rows)
    numbers = rng.poisson(others, count)
    ends = np.cumsum(numbers)
    sums = np.concatenate([[0.0], np.cumsum(_first_rates(rng.integers(0, rows, int(ends[-1])), rows, ids.skew))])
    return np.asarray(sums[ends] - sums[ends - numbers])


def _is_one(power: float, rows: int) -> bool:
    """Whether the exponent is so close to 1 that its limit is taken, as distributions.zipf_ids does."""
    return abs(power) * math.log(rows + 1) < 1e-9
