"""Rates of rows: of random ids as counted one by one, of counts as the next samples show."""

from typing import Any

import numpy as np
import pytest

from dlrm_bench.dlrm.data.distributions import hashed_ids, zipf_ids
from dlrm_bench.dlrm.tables import row_rates as rates_of_rows
from dlrm_bench.dlrm.tables.id_statistics import UNIFORM, IdStatistics
from dlrm_bench.dlrm.tables.row_rates import RowRates, assumed_rates, counted_rates, random_rates, row_rates


def exact(rows: int, hot: int, ids: IdStatistics) -> np.ndarray:
    """Every row's rate, descending: all first ids with their probabilities, and what they expand to."""
    edges = np.log1p(np.arange(rows + 1))
    power = 1 - ids.skew
    below = edges / edges[-1] if power == 0 else np.expm1(power * edges) / np.expm1(power * edges[-1])
    first = np.diff(below)
    rates = first.copy()
    if ids.expanded:
        named = hashed_ids(np.arange(rows, dtype=np.int32), hot - 1, rows, salt=3)
        rates += np.bincount(named.ravel(), weights=np.repeat(first, hot - 1), minlength=rows)
    else:
        rates += (hot - 1) / rows
    return -np.sort(-rates)


def left(rates: RowRates, device_rows: float, batch: int) -> float:
    """Distinct rows a batch beyond the `device_rows` hottest."""
    host = np.cumsum(rates.rows) > device_rows
    return float(-(rates.rows * np.expm1(-batch * rates.rates))[host].sum())


@pytest.mark.parametrize("skew", [0.0, 1.0, 1.05, 1.2])
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize(("rows", "hot"), [(3, 1), (2000, 1), (300_000, 1), (300_000, 3), (200_000, 40)])
def test_rates_of_random_ids_are_those_of_their_distribution(rows: int, hot: int, expanded: bool, skew: float) -> None:
    ids = IdStatistics(skew=skew, expanded=expanded)
    rates, every = random_rates(rows, hot, ids), exact(rows, hot, ids)
    assert rates.rows.sum() == pytest.approx(rows)
    assert np.all(np.diff(rates.rates) <= 0)
    for share in (0.0, 0.1, 0.25, 0.5) if rows > 2000 else (0.0,):
        expected = -np.expm1(-1000 * every[int(share * rows) :]).sum()
        assert left(rates, share * rows, 1000) == pytest.approx(expected, rel=0.04)


def test_distinct_rows_are_those_of_the_id_statistics() -> None:
    for ids in (UNIFORM, IdStatistics(skew=1.05, expanded=True)):
        for rows, hot in ((40_000_000, 100), (600_000, 10), (30_000, 1)):
            expected = ids.distinct_rows(rows, hot, 13_824)
            assert left(random_rates(rows, hot, ids), 0, 13_824) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("hot", [1, 6])
def test_counts_predict_the_misses_of_other_samples(hot: int) -> None:
    """Of a placement by counts, on samples that were not counted; counts taken as they stand would predict none."""
    rows, samples, share = 50_000, 30_000, 0.3
    rng = np.random.default_rng(1)

    def drawn() -> np.ndarray:
        first = zipf_ids(rng, rows, 1.05, samples)
        return np.concatenate([first[:, None], hashed_ids(first, hot - 1, rows, salt=3)], axis=1)

    counts = np.bincount(drawn().ravel(), minlength=rows).astype(np.uint32)
    rates = counted_rates(counts, samples)
    assert rates.rows.sum() == rows
    host = np.lexsort((rng.random(rows), -counts.astype(np.int64)))[int(share * rows) :]  # equal ones at random
    missed = np.isin(drawn(), host).sum() / samples
    order = np.cumsum(rates.rows)
    beyond = np.clip(order - share * rows, 0, rates.rows)
    assert (rates.rates * beyond).sum() == pytest.approx(missed, rel=0.05)


def test_counts_of_many_samples_are_the_rates() -> None:
    rates = counted_rates(np.array([0, 1000, 10, 500, 10], dtype=np.uint16), 100)
    assert rates.rates.tolist() == [10, 5, 0.1, 0]
    assert rates.rows.tolist() == [1, 1, 2, 1]


def test_the_rates_of_rows_are_those_of_their_classes() -> None:
    counts = np.array([0, 7, 1, 0, 1, 2, 0, 1], dtype=np.uint8)
    rates = row_rates(counts, 10)
    classes = counted_rates(counts, 10)
    assert sorted(rates.tolist(), reverse=True) == pytest.approx(np.repeat(classes.rates, classes.rows.astype(int)))
    assert (rates[counts == 0] > 0).all(), "a row that none named has a rate, too"
    assert rates.argmax() == 1


@pytest.mark.parametrize("direct", [1, 3, 8, 1 << 20])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_rates_do_not_depend_on_which_counts_are_searched(
    monkeypatch: pytest.MonkeyPatch, direct: int, dtype: type[np.unsignedinteger[Any]]
) -> None:
    """The rates of rows that are all sorted and searched."""
    rng = np.random.default_rng(3)
    many = np.iinfo(dtype).max
    some = np.minimum(rng.zipf(1.5, 5000) - 1, many)
    for counts in (np.concatenate([some, [many]]).astype(dtype), np.zeros(4, dtype), np.full(3, many, dtype)):
        values, numbers = np.unique(counts, return_counts=True)
        monkeypatch.setattr(rates_of_rows, "_DIRECT", direct)
        found, classes = row_rates(counts, 7), counted_rates(counts, 7)
        assert classes.rows.tolist() == numbers[::-1].tolist()
        assert np.array_equal(found, classes.rates[::-1].astype(np.float32)[np.searchsorted(values, counts)])


def test_assumed_rates_sum_to_a_samples_ids_and_prefer_tables_of_many_ids_and_their_first_rows() -> None:
    many, few = assumed_rates(100_000, 100), assumed_rates(100_000, 3)
    assert many.sum() == pytest.approx(100, rel=0.01)
    assert few.sum() == pytest.approx(3, rel=0.05)
    assert (np.diff(few) <= 0).all()
    assert few[0] > many[-1] > few[1000]
