"""The statistics of one series: its interval covers the median at any autocorrelation, and a drift is found."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.stats.series import (
    METRICS,
    by_clock,
    correlation_time,
    drift_within,
    median_ci95,
    slowest_rank,
    spread_of_log,
    summary_statistics,
)

TRIES = 300


def autoregressive(tries: int, n: int, coefficient: float, seed: int = 0) -> np.ndarray:
    """Series [tries, n] of order one, of mean 0 and standard deviation 1."""
    noise = np.random.default_rng(seed).normal(size=(tries, n + 200))
    return np.asarray(lfilter([1], [1, -coefficient], noise, axis=1))[:, 200:] * math.sqrt(1 - coefficient**2)


def coverage(series: np.ndarray, median: float) -> float:
    intervals = [median_ci95(row) for row in series]
    return float(np.mean([i is not None and i[0] <= median <= i[1] for i in intervals]))


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("skewed", [False, True])
def test_the_interval_covers_the_median_whatever_the_correlation(coefficient: float, skewed: bool) -> None:
    """A moving-block bootstrap of cube-root blocks covered .72 for 200 values of coefficient 0.9."""
    series = np.exp((0.5 if skewed else 0.05) * autoregressive(TRIES, 200, coefficient))
    assert 0.90 <= coverage(series, 1.0) <= 0.99


def test_a_series_too_short_for_its_correlation_says_so() -> None:
    """Where the interval covers less, nearly every series is marked; where there is enough of it, none."""
    short, long = (np.exp(0.05 * autoregressive(TRIES, n, 0.95)) for n in (200, 4000))
    assert coverage(short, 1.0) > 0.85
    assert np.mean([spread_of_log(row, "p50").too_short for row in short]) > 0.9
    assert not any(spread_of_log(row, "p50").too_short for row in long[:50])
    assert coverage(long, 1.0) >= 0.91


@pytest.mark.parametrize("metric", METRICS)
def test_every_metrics_error_is_that_of_many_series(metric: str) -> None:
    """Sections of percentiles are off by more than the whole, so theirs may be too large, but not too small."""
    series = np.exp(0.1 * autoregressive(TRIES, 1000, 0.5))
    logs = [math.log(summary_statistics(row)[metric]) for row in series]  # type: ignore[index]
    errors = [spread_of_log(row, metric).error for row in series]  # type: ignore[arg-type]
    assert 0.9 < np.sqrt(np.mean(np.square(errors))) / np.std(logs) < 1.6


@pytest.mark.parametrize(("coefficient", "time"), [(0.0, 1.0), (0.5, 3.0), (0.9, 19.0)])
def test_the_correlation_time_is_that_of_the_process(coefficient: float, time: float) -> None:
    """(1 + c) / (1 - c) for an autoregressive series."""
    times = [correlation_time(row) for row in autoregressive(20, 20_000, coefficient)]
    assert np.mean(times) == pytest.approx(time, rel=0.1)
    assert correlation_time(np.ones(50)) == correlation_time(np.ones(1)) == 1.0
    assert correlation_time(np.tile([1.0, -1.0], 50)) == 1.0


def test_the_correlation_time_equals_the_plain_sum() -> None:
    series = autoregressive(1, 400, 0.7)[0]
    centred = series - series.mean()
    covariances = [float((centred[: 400 - lag] * centred[lag:]).sum()) for lag in range(400)]
    pairs = [(covariances[k] + covariances[k + 1]) / covariances[0] for k in range(0, 400, 2)]
    total, least = 0.0, math.inf
    for pair in pairs:
        if pair <= 0:
            break
        least = min(least, pair)
        total += least
    assert correlation_time(series) == pytest.approx(2 * total - 1)


def test_too_few_values_have_no_interval() -> None:
    assert median_ci95(np.arange(1.0, 20.0)) is None
    assert median_ci95(np.arange(1.0, 21.0)) is not None


@settings(deadline=None)
@given(st.lists(st.floats(2**-10, 2**20, width=32), min_size=20, max_size=90))
def test_the_interval_holds_the_median_and_has_the_unit_of_the_series(values: list[float]) -> None:
    series = np.array(values)
    interval = median_ci95(series)
    assert interval is not None
    assert interval[0] <= np.median(series) * (1 + 1e-12)
    assert interval[1] >= np.median(series) * (1 - 1e-12)
    if len(set(values)) == 1:
        assert interval[0] == pytest.approx(interval[1])
    assert median_ci95(series * 1000) == pytest.approx([1000 * bound for bound in interval])


def test_the_interval_of_a_whole_training_run() -> None:
    series = np.random.default_rng(0).gamma(4, 0.5, 60_000)
    interval = median_ci95(series)
    assert interval is not None
    assert interval[0] < np.median(series) < interval[1] < interval[0] + 0.04


def unsteady(series: np.ndarray) -> float:
    """Share of the series [tries, n] that are called so."""
    drifts = [drift_within(row) for row in series]
    return float(np.mean([drift is not None and not drift.steady for drift in drifts]))


WINDOWS = (590, 1000, 4300)
"""Iterations in the ten seconds of the big presets: stock at 17 ms and 10 ms, static at 2.3 ms."""


@pytest.mark.parametrize("spread", [0.02, 0.1])
@pytest.mark.parametrize("coefficient", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("n", WINDOWS)
def test_a_steady_series_is_seldom_called_unsteady(n: int, coefficient: float, spread: float) -> None:
    """At most 5 % of the tries, and two standard errors."""
    assert unsteady(np.exp(spread * autoregressive(200, n, coefficient))) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)


@pytest.mark.parametrize("n", [250, *WINDOWS])
def test_heavy_tails_and_slow_iterations_in_between_are_steady(n: int) -> None:
    rng = np.random.default_rng(0)
    assert unsteady(np.exp(0.05 * rng.standard_t(3, (200, n)))) <= 0.05
    every_tenth = np.where(np.arange(n) % 10 == 3, 3.0, 1.0) * np.exp(rng.normal(0, 0.02, (100, n)))
    assert unsteady(every_tenth) <= 0.05


@pytest.mark.parametrize(("coefficient", "spread"), [(0.0, 0.02), (0.0, 0.1), (0.5, 0.02), (0.5, 0.1), (0.9, 0.02)])
@pytest.mark.parametrize("n", WINDOWS)
def test_an_excursion_in_the_third_quarter_is_found(n: int, coefficient: float, spread: float) -> None:
    """20 %, as the power cap makes it; the first and the last quarter are alike."""
    series = np.exp(spread * autoregressive(100, n, coefficient))
    series[:, n // 2 : 3 * n // 4] *= 1.2
    assert unsteady(series) >= 0.9


def test_what_the_power_cap_does_within_an_eighth_is_found() -> None:
    """All static runs of six records at 6,912 samples, whose eighths differ by 4 to 22 %; those at 512 are steady."""
    for number, batch, expected in (
        *(("13", 6912, 8), ("20", 6912, 4), ("26", 6912, 2), ("32", 6912, 2), ("44", 6912, 8), ("50", 6912, 6)),
        *(("14", 512, 0), ("15", 512, 0), ("19", 512, 0)),
    ):
        (folder,) = (ROOT / "results").glob(f"{number}-*")
        records = [read_record(path.parent) for path in sorted(folder.glob("**/run.json"))]
        config = [record.run["config"] for record in records]
        series = [
            record.latencies_ms
            for record, c in zip(records, config, strict=True)
            if (c["pipeline"]["name"], c["local_batch_size"]) == ("static", batch) and record.run["host"] is None
        ]
        found = [drift for row in series if (drift := drift_within(row)) is not None and not drift.steady]
        assert (number, len(found)) == (number, expected)


def test_a_drift_is_found_where_it_matters() -> None:
    series = np.exp(0.05 * autoregressive(50, 1000, 0.5))
    slowing = series * np.linspace(1, 1.2, 1000)
    assert unsteady(slowing) == 1
    assert np.mean([drift.change for drift in map(drift_within, slowing) if drift]) == pytest.approx(0.18, abs=0.02)
    begins_slow = series * np.where(np.arange(1000) < 200, 1.3, 1)
    assert unsteady(begins_slow) == 1
    assert all(drift.change < -0.2 for drift in map(drift_within, begins_slow) if drift)
    barely = np.exp(0.001 * autoregressive(50, 1000, 0.5)) * np.linspace(1, 1.01, 1000)
    assert unsteady(barely) == 0
    assert drift_within(series[0, :95]) is None
    assert drift_within(series[0, :96]) is not None


def test_time_by_the_clock_is_that_of_the_rank_that_took_longest_in_all() -> None:
    """Ranks that are slow in turn: the slowest rank's mean is 3, and no rank took more than 2 an iteration."""
    ms = np.array([[9, 1, 3, 1, 3], [9, 3, 1, 3, 1]], dtype=np.float32)
    assert by_clock(ms, 1) == 2
    assert summary_statistics(slowest_rank(ms, 1))["mean"] == 3


def test_the_intervals_of_committed_records_come_out_again() -> None:
    """Those of records that have been written since intervals are made this way; older ones have no `steady`."""
    for path in sorted((ROOT / "results").glob("**/run.json")):
        latency = json.loads(path.read_text())["latency_ms"]
        if latency is not None and "steady" in latency:
            assert median_ci95(read_record(path.parent).latencies_ms) == pytest.approx(latency["ci95"])


def test_the_metrics() -> None:
    values = np.arange(1.0, 102.0)
    assert summary_statistics(values) == {"p50": 51, "p90": 91, "p99": 100, "mean": 51}


def test_the_slowest_rank_sets_the_latency() -> None:
    ms = np.array([[9, 1, 5, 1, 2], [9, 3, 1, 4, 1]], dtype=np.float32)
    assert slowest_rank(ms, 1).tolist() == [3, 5, 4, 2]
    assert slowest_rank(ms).tolist() == [9, 3, 5, 4, 2]
    assert slowest_rank(ms, 5).shape == (0,)
