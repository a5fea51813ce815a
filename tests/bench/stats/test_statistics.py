"""The statistics on recorded iteration series, whose runs differ for no reason of ours, and on series of known kind."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.stats.series import METRICS
from dlrm_bench.bench.stats.statistics import Comparison, Estimate, compare, mean_statistics, student_t, welch
from tests.bench.made_records import recorded_runs, write

POOLS = sorted((Path(__file__).resolve().parents[2] / "data" / "series").glob("*.npz"))
TRIES = 200
MOST_ALARMS = 0.08 * TRIES
"""5 % of the tries, and two standard errors."""


def load(pool: Path) -> list[np.ndarray]:
    with np.load(pool) as runs:
        return [runs[name].astype(np.float64) for name in sorted(runs)]


def draw(pool: list[np.ndarray], seed: int, runs: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Two sides of `runs` different runs each."""
    assert len(pool) >= 2 * runs, "the pool has too few runs"
    order = np.random.default_rng(seed).permutation(len(pool))
    return [pool[i] for i in order[:runs]], [pool[i] for i in order[runs : 2 * runs]]


def judged_different(runs: list[np.ndarray], paired: bool) -> int:
    """Returns the number of TRIES comparisons of runs of the same thing that find a difference."""
    verdicts = [compare(*draw(runs, seed, 10), paired=paired).estimates["p50"].verdict() for seed in range(TRIES)]
    return sum(verdict != "no difference proven" for verdict in verdicts)


def found(pool: Path) -> tuple[int, int]:
    """How often, of TRIES / 2, an injected slowdown is proven, and the speed-up that it is the other way round.

    1 % on GPUs. Ten runs on CPU cores that others use too, where medians spread by 16 %, find 30 %.
    """
    injected = 1.01 if pool.stem.startswith("gpu") else 1.30
    runs, slower, faster = load(pool), 0, 0
    for seed in range(TRIES // 2):
        a, b = draw(runs, seed, 10)
        b = [run * injected for run in b]
        slower += compare(a, b).estimates["p50"].verdict() == "slower"
        faster += compare(b, a).estimates["p50"].verdict() == "faster"
    return slower, faster


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.stem)
@pytest.mark.parametrize("paired", [False, True])
def test_runs_of_the_same_thing_are_judged_different_in_5_percent(pool: Path, paired: bool) -> None:
    assert judged_different(load(pool), paired) <= MOST_ALARMS


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.stem)
def test_an_injected_difference_is_found(pool: Path) -> None:
    slower, faster = found(pool)
    assert slower == faster >= 0.8 * TRIES // 2


def test_a_pool_of_gpu_records_is_taken_as_it_comes(tmp_path: Path) -> None:
    """Recorded runs whose deviations are shrunk to those of a GPU go from records to verdicts, as gpu_*.npz would."""
    cpu = recorded_runs()
    middle = np.median(np.concatenate(cpu))
    quiet = [15 * np.exp(0.02 * np.log(run / middle)) for run in cpu]
    folders = [write(tmp_path / f"run{i}", run, minute=-i) for i, run in enumerate(quiet)]
    pool = tmp_path / "gpu_standin.npz"
    program = [sys.executable, "-m", "tests.bench.records.series", *map(str, folders), str(pool)]
    subprocess.run(program, cwd=ROOT, check=True)
    runs = load(pool)
    assert len(runs) == len(quiet)
    for run, recorded in zip(runs, reversed(quiet), strict=True):  # in the order in which they ran, warm-up left out
        np.testing.assert_allclose(run, recorded, rtol=1e-6)
    assert judged_different(runs, paired=False) <= MOST_ALARMS
    slower, faster = found(pool)
    assert slower == faster >= 0.8 * TRIES // 2


def test_pairs_find_what_drift_hides() -> None:
    """Recorded runs under a drift of 3 % a run: paired neighbours show an injected 5 %, unordered sides do not."""
    runs = load(POOLS[0])
    shapes = [run / np.median(run) for run in runs[:20]]
    drifting = [shape * 1.03**i * (1 + 0.001 * (i % 3)) for i, shape in enumerate(shapes)]
    a, b = drifting[::2], [run * 1.05 for run in drifting[1::2]]
    assert compare(a, b, paired=True).estimates["p50"].verdict() == "slower"
    assert compare(a, b).estimates["p50"].verdict() == "no difference proven"


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("runs", [2, 3, 5])
def test_few_runs_cover_as_they_say(runs: int, paired: bool) -> None:
    """Within-run noise, three quarters of the variance here, counts once: it is in the runs' medians already.

    Welch's t is known to cover more than it says with two runs a side (.98).
    """
    random, covered = np.random.default_rng(runs), 0
    for _ in range(400):
        a, b = ([np.exp(random.normal(0, 0.02) + random.normal(0, 0.22, 60)) for _ in range(runs)] for _ in range(2))
        ratio = compare(a, b, paired=paired).ratios["p50"]
        covered += ratio.low <= 1 <= ratio.high
    assert 0.92 <= covered / 400 <= (0.995 if runs == 2 and not paired else 0.985)


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_few_runs_are_not_trusted_too_much(runs: int) -> None:
    """Runs that differ by 5 %, with hardly any difference within: plain bootstrap percentiles fail here."""
    random = np.random.default_rng(runs)

    def side() -> list[np.ndarray]:
        return [np.exp(random.normal(0, 0.05) + random.normal(0, 0.001, 60)) for _ in range(runs)]

    verdicts = [compare(side(), side()).estimates["p50"].verdict() for _ in range(300)]
    assert sum(verdict != "no difference proven" for verdict in verdicts) <= 0.07 * 300


def test_one_run_a_side_speaks_of_these_runs_only() -> None:
    runs = load(POOLS[0])
    comparison = compare(runs[:1], [runs[0] * 2])
    assert not comparison.between_runs
    assert not compare(runs[:5], runs[5:6]).between_runs
    ratio = comparison.ratios["p50"]
    assert ratio.value == pytest.approx(2)
    assert ratio.low > 1.5


def test_a_single_known_mean_has_no_interval() -> None:
    ratio = compare([np.array([3.0])], [np.array([3.3])]).ratios["mean"]
    assert ratio.value == pytest.approx(1.1)
    assert math.isnan(ratio.low)
    assert math.isnan(ratio.high)


def test_means_of_several_logs_have_one() -> None:
    a, b = ([np.array([value]) for value in values] for values in ((3.24, 3.25, 3.26), (3.5, 3.51, 3.52)))
    assert compare(a, b).estimates["mean"].verdict() == "slower"


def test_equal_series_without_any_variance() -> None:
    same = [np.full(50, 2.0)] * 3
    assert tuple(compare(same, same).ratios["p50"]) == pytest.approx((1, 1, 1))
    assert compare(same, same).estimates["p50"].verdict() == "no difference proven"


def test_no_value_is_left_out() -> None:
    quiet = [np.full(100, 1.0) for _ in range(4)]
    spiked = [np.concatenate([run[:-1], [1000.0]]) for run in quiet]
    comparison = compare(quiet, spiked)
    assert comparison.ratios["mean"].value == pytest.approx(10.99)
    assert comparison.ratios["p50"].value == 1


@settings(deadline=None, max_examples=20)
@given(
    sides=st.lists(
        st.lists(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=30), min_size=1, max_size=4),
        min_size=2,
        max_size=2,
    )
)
def test_swapping_the_sides_inverts_the_ratio(sides: list[list[list[float]]]) -> None:
    a, b = ([np.array(run) for run in side] for side in sides)
    forth, back = compare(a, b), compare(b, a)
    again = compare(a, b)
    for metric in METRICS:
        assert forth.ratios[metric].value == pytest.approx(1 / back.ratios[metric].value)
        assert np.array_equal(forth.ratios[metric], again.ratios[metric], equal_nan=True)
        assert not forth.ratios[metric].low > forth.ratios[metric].value


def test_bad_sides() -> None:
    run = np.ones(5)
    for a, b in (([], [run]), ([run], []), ([run], [np.empty(0)])):
        with pytest.raises(ValueError, match="at least one run"):
            compare(a, b)
    with pytest.raises(ValueError, match="equally many runs on both sides, not 1 and 2"):
        compare([run], [run, run], paired=True)


def test_the_t_tests_are_scipys() -> None:
    random = np.random.default_rng(0)
    a, b = ([np.exp(random.normal(shift, 0.05, 40)) for _ in range(6)] for shift in (0.0, 0.02))
    logs = [np.log([np.median(run) for run in side]) for side in (a, b)]
    for paired in (False, True):
        estimate = compare(a, b, paired=paired).estimates["p50"]
        plain = stats.ttest_rel(logs[1], logs[0]) if paired else stats.ttest_ind(logs[1], logs[0], equal_var=False)
        assert estimate.p_value == pytest.approx(plain.pvalue)
        interval = plain.confidence_interval(0.95)
        assert np.log(estimate.ratio()[1:]) == pytest.approx([interval.low, interval.high])
        assert estimate.freedom == pytest.approx(plain.df)


@pytest.mark.parametrize("freedom", [1, 2.7, 9, 500, math.inf])
def test_one_sided_tests_and_their_intervals_agree(freedom: float) -> None:
    assert student_t(0.975, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    estimate = Estimate(0.01, 0.004, freedom)
    low, high = estimate.ratio(0.90)[1:]
    assert estimate.p_at_least(high) == pytest.approx(0.05)
    assert estimate.p_at_most(low) == pytest.approx(0.05)
    assert estimate.p_at_most(1.0) == pytest.approx(stats.t.sf(2.5, freedom))
    assert estimate.p_value == pytest.approx(2 * stats.t.sf(2.5, freedom))
    # Equivalence at a margin is proven where the 90 % interval lies within it.
    assert estimate.p_not_equivalent(high - 1) == pytest.approx(0.05)
    assert estimate.scaled(2).ratio().value == pytest.approx(2 * estimate.ratio().value)


def test_what_is_not_known_has_no_p_value() -> None:
    unknown = Estimate(0.1, math.nan, math.nan)
    assert all(map(math.isnan, (unknown.p_value, unknown.p_at_least(1), unknown.p_not_equivalent(0.02))))


@pytest.mark.parametrize("runs", [2, 3, 7])
@pytest.mark.parametrize("paired", [False, True])
def test_runs_that_agree_to_the_last_digit_prove_nothing(runs: int, paired: bool) -> None:
    """Timings of two decimals: their spread is 0, or of the order of rounding, and is not that of the program."""
    a, b = ([np.full(5, ms)] * runs for ms in (10.00, 10.01))
    estimate = compare(a, b, paired=paired).estimates["p50"]
    assert estimate.too_coarse
    assert (estimate.p_value, estimate.verdict()) == (1.0, "no difference proven")
    assert estimate.p_not_equivalent(0.02) == estimate.p_at_least(1.5) == estimate.p_at_most(0.5) == 1.0
    assert compare(a, a, paired=paired).estimates["p50"].p_value == 1.0


@pytest.mark.parametrize(("few", "many"), [(2, 10), (3, 12)])
def test_sides_of_unequal_numbers_of_runs_differ_in_5_percent(few: int, many: int) -> None:
    """Of 2000 tries; with Welch's own degrees of freedom in 10.2 % and in 7.6 %."""
    rng, wrong = np.random.default_rng(few), 0
    for _ in range(2000):
        a, b = rng.normal(0, 0.01, few), rng.normal(0, 0.01, many)
        assert welch(a, b).freedom <= 2 * (few - 1)
        wrong += welch(a, b).p_value < 0.05
    assert wrong / 2000 <= 0.06


def test_equal_numbers_of_runs_have_welchs_own_degrees_of_freedom() -> None:
    a, b = np.random.default_rng(0).normal(0, (0.01, 0.03), (6, 2)).T
    known = stats.ttest_ind(b, a, equal_var=False)
    assert (welch(a, b).p_value, welch(a, b).freedom) == pytest.approx((known.pvalue, known.df))


def test_mean_statistics_are_geometric() -> None:
    assert mean_statistics([np.full(5, 1.0), np.full(9, 4.0)]) == pytest.approx(dict.fromkeys(METRICS, 2.0))


@pytest.mark.parametrize("runs", [3, 6])
def test_a_difference_of_differences_covers_what_two_sittings_hide(runs: int) -> None:
    """A and a reference on one day, B and the reference on another one, which is 30 % slower for both."""
    rng, covered, power, alarms = np.random.default_rng(runs), 0, 0, 0

    def sitting(effect: float, day: float) -> Comparison:
        side, reference = (
            [np.array([math.exp(shift + day + rng.normal(0, 0.01))]) for _ in range(runs)] for shift in (effect, 0.0)
        )
        return compare(reference, side, paired=True)

    for _ in range(TRIES):
        estimate = sitting(math.log(1.1), 0.3).minus(sitting(0.0, 0.0)).estimates["p50"]
        low, high = estimate.ratio()[1:]
        covered += low <= 1.1 <= high
        power += estimate.verdict() == "slower"
        alarms += sitting(0.0, 0.3).minus(sitting(0.0, 0.0)).estimates["p50"].verdict() != "no difference proven"
    assert 0.92 <= covered / TRIES <= 0.995
    assert power >= 0.8 * TRIES
    assert alarms <= MOST_ALARMS
