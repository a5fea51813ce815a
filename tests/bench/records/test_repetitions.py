"""What so many runs can show, checked by simulation and against scipy.stats."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from dlrm_bench.bench.records.repetitions import (
    balanced_orders,
    detectable,
    drift_left,
    holm,
    runs_needed,
)


@pytest.mark.parametrize(("runs", "paired"), [(3, True), (5, True), (5, False), (12, False)])
def test_what_is_detectable_is_found_in_four_of_five_tries(runs: int, paired: bool) -> None:
    rng, spread, tries = np.random.default_rng(0), 0.01, 4000
    difference = math.log1p(detectable(spread, runs, paired))
    a = rng.normal(0, 0 if paired else spread, (tries, runs))
    b = rng.normal(difference, spread, (tries, runs))
    p = (stats.ttest_1samp(b - a, 0, axis=1) if paired else stats.ttest_ind(a, b, axis=1)).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.02)


def test_more_comparisons_need_larger_differences() -> None:
    """The smallest p value of ten must pass Bonferroni's 0.005, as t tests of drawn runs show."""
    rng, tries = np.random.default_rng(0), 4000
    difference = math.log1p(detectable(0.01, 6, True, comparisons=10))
    p = stats.ttest_1samp(rng.normal(difference, 0.01, (tries, 6)), 0, axis=1).pvalue
    assert np.mean(p < 0.005) == pytest.approx(0.8, abs=0.02)
    assert detectable(0.01, 2, True, comparisons=1000) > 1
    assert detectable(1.0, 2, True, comparisons=1000) > 1e200  # not infinite, and no overflow


def test_one_run_detects_nothing() -> None:
    assert detectable(0.01, 1, True) == math.inf


@pytest.mark.parametrize("paired", [True, False])
def test_the_runs_needed_are_the_fewest(paired: bool) -> None:
    needed = runs_needed(0.01, 0.005, paired)
    assert needed is not None
    assert detectable(0.01, needed, paired) <= 0.005 < detectable(0.01, needed - 1, paired)
    assert runs_needed(0.01, 0.005, paired, most=needed - 1) is None
    assert runs_needed(0.0, 0.02, paired) == 2
    assert runs_needed(0.01, 0.0, paired) is None


def test_holm_by_hand() -> None:
    """The worked values of R's p.adjust(c(0.01, 0.04, 0.03), "holm")."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    corrected = holm([math.nan, 0.02])
    assert math.isnan(corrected[0])
    assert corrected[1] == 0.02


def test_holm_keeps_false_alarms_of_a_null_ladder_rare() -> None:
    rng = np.random.default_rng(0)
    alarms = [min(holm(list(rng.random(16)))) < 0.05 for _ in range(4000)]
    assert np.mean(alarms) == pytest.approx(0.05, abs=0.012)


@pytest.mark.parametrize("items", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("rounds", [1, 2, 4, 7])
def test_every_round_runs_everything_once(items: int, rounds: int) -> None:
    orders = balanced_orders(items, rounds, seed=3)
    assert [sorted(order) for order in orders] == [list(range(items))] * rounds


@pytest.mark.parametrize("items", [2, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_a_linear_drift_cancels_over_each_pair_of_rounds(items: int, seed: int) -> None:
    positions = np.array([np.argsort(order) for order in balanced_orders(items, 6, seed)])
    for first, second in zip(positions[::2], positions[1::2], strict=True):
        assert set(first + second) == {items - 1}


def test_each_thing_follows_each_other_one_equally_often() -> None:
    items = 6
    follows = np.zeros((items, items))
    for order in balanced_orders(items, 2 * items, seed=0)[::2]:
        for before, after in pairwise(order):
            follows[before, after] += 1
    assert (follows[~np.eye(items, dtype=bool)] == 1).all()


def test_orders_follow_from_the_seed() -> None:
    assert balanced_orders(16, 4, 1) == balanced_orders(16, 4, 1) != balanced_orders(16, 4, 2)


@pytest.mark.parametrize(
    ("sides", "left"),
    [
        ("ABBA", 0),
        ("ABBABAAB", 0),
        ("ABABAB", 1),
        ("AB", 1),
        ("BA", -1),
        ("ABBAAB", 1 / 3),
        ("AABB", 2),
        ("AA", math.inf),
    ],
)
def test_drift_left(sides: str, left: float) -> None:
    assert drift_left(["AB".index(side) for side in sides]) == pytest.approx(left)
