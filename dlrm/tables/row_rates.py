"""Rates at which a sample's ids name each row of a table: from the distribution of random ids, or from counts.

Rows with the same rate form a class, so that a table of forty million rows is described by some ten thousand numbers.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.tables.id_statistics import IdStatistics

_DRAWS = 400_000
"""Number of draws per table; misses computed from its rates then vary by a percent from draw to draw."""
_LEAST_CLASSES = 10_000
_RARE = 5
"""Counts up to this one are corrected: see `counted_rates`."""
_DIRECT = 1 << 20
"""Counts up to this one index arrays; few rows of a table have larger ones, and those are searched."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRates:
    """The rows of a table in classes, the most frequently named first."""

    rates: NDArray[np.float64]
    """[classes]: expected number of a sample's ids that name one row of the class; descending."""
    rows: NDArray[np.float64]
    """[classes]: number of rows; they add up to the table's."""

    @classmethod
    def sorted(cls, rates: NDArray[np.float64], rows: NDArray[np.float64]) -> "RowRates":
        """Returns the classes with these rates, given in any order, sorted by rate."""
        order = np.argsort(-rates, kind="stable")
        return cls(rates=rates[order], rows=rows[order])


@functools.cache
def random_rates(rows: int, hot: int, ids: IdStatistics) -> RowRates:
    """Returns the rates of a table of `rows` rows, of which a sample of random data names `hot` ids.

    Rows are drawn as ids name them, first ids and others separately, and each counts for 1 / rate rows: the mean over
    ids of g(rate) / rate is, up to hot, the sum over rows of g(rate). For a row that a known id names, the other ids
    are distributed as for any row (Mecke's formula for a Poisson process): its own first id, and if ids are expanded a
    Poisson number, of mean hot - 1, of other rows' first ids, each uniform.
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
    """Returns the rates of a table's rows, which `counts` [rows] ids of `samples` samples named.

    A row named by few ids has a lower rate than its count suggests, and a row named by none a higher one: rows with
    count c have a mean rate of (c + 1) n(c + 1) / n(c) / samples, where n is the number of rows by count (I. J. Good,
    "The population frequencies of species and the estimation of population parameters", Biometrika 1953).
    """
    _, numbers, rates = _rates_by_count(counts, samples)
    return RowRates.sorted(rates, numbers.astype(np.float64))


def row_rates(counts: NDArray[np.integer], samples: int) -> NDArray[np.float32]:
    """Returns the rate of each row, fp32 [rows], as in `counted_rates`."""
    values, _, exact = _rates_by_count(counts, samples)
    rates, (direct, larger) = exact.astype(np.float32), _direct_and_larger(counts)
    of_count = np.zeros(int(direct.max(initial=0)) + 1, np.float32)
    indexes = values < len(of_count)
    of_count[values[indexes]] = rates[indexes]
    found = of_count[direct]
    found[larger] = rates[np.searchsorted(values, counts[larger])]
    return found


def assumed_rates(rows: int, hot: int) -> NDArray[np.float32]:
    """Returns an assumed rate for each row of a table without counts, fp32 [rows].

    One of a sample's `hot` ids is assumed to follow Zipf's law with exponent 1, with frequent rows numbered first, as
    data sets tend to do, and the others to be uniform. So, of two tables with equally many rows, the rows of the one
    with more ids per sample come first.
    """
    rates = np.arange(1, rows + 1, dtype=np.float32)
    np.divide(np.float32(1 / math.log(rows + 1)), rates, out=rates)  # in place: tables are large
    rates += np.float32((hot - 1) / rows)
    return rates


def _rates_by_count(
    counts: NDArray[np.integer], samples: int
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.float64]]:
    """Returns the occurring counts, ascending, the number of rows with each, and the rate of these rows."""
    direct, larger = _direct_and_larger(counts)
    number_direct = np.bincount(direct)
    number_direct[-1] -= len(larger)  # counted as _DIRECT
    occurring = np.flatnonzero(number_direct)
    others, of_others = np.unique(counts[larger], return_counts=True)
    values, numbers = np.concatenate([occurring, others]), np.concatenate([number_direct[occurring], of_others])
    number_of = dict(zip(values.tolist(), numbers.tolist(), strict=True))
    rates = values.astype(np.float64)
    for place, count in enumerate(values.tolist()):
        more = number_of.get(count + 1)
        if count <= _RARE and more is not None:
            rates[place] = (count + 1) * more / number_of[count]
    rates = np.maximum.accumulate(rates)  # keeps rates monotonic in the counts
    return values, numbers, rates / samples


def _direct_and_larger(counts: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.intp]]:
    """Returns the counts with _DIRECT for larger ones, and the rows that have those."""
    if int(counts.max(initial=0)) <= _DIRECT:
        return counts, np.zeros(0, np.intp)
    return np.minimum(counts, _DIRECT), np.flatnonzero(counts > _DIRECT)


def _stratified_firsts(count: int, rows: int, skew: float) -> NDArray[np.int64]:
    """Returns `count` first ids of distributions.zipf_ids, one from each quantile."""
    uniform = (np.arange(count) + 0.5) / count
    log_end, power = math.log(rows + 1), 1.0 - skew
    logs = uniform * log_end if _is_one(power, rows) else np.log1p(uniform * math.expm1(power * log_end)) / power
    return np.clip(np.exp(logs).astype(np.int64) - 1, 0, rows - 1)


def _first_rates(ids: NDArray[np.int64], rows: int, skew: float) -> NDArray[np.float64]:
    """Returns the probability that each of these ids is a sample's first: the integral of the density x^-skew on
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
    """Whether the exponent is so close to 1 that the limit is used, as in distributions.zipf_ids."""
    return abs(power) * math.log(rows + 1) < 1e-9
