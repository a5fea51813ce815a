"""Change points: how often a series without one has one, what is found, and how well place and size are known."""

import numpy as np
import pytest

from dlrm_bench.bench.stats.change_points import FEWEST_POINTS, change_points
from dlrm_bench.bench.stats.statistics import welch


def noise(rng: np.random.Generator, kind: str, points: int) -> np.ndarray:
    """1 % from point to point: normal, or Student's t of three degrees of freedom."""
    return 0.01 * (rng.standard_t(3, points) / 3**0.5 if kind == "heavy" else rng.normal(size=points))


@pytest.mark.parametrize("kind", ["normal", "heavy"])
@pytest.mark.parametrize("points", [8, 24])
def test_few_series_without_a_change_have_one(kind: str, points: int) -> None:
    """5 % of 120 are 6; 13 and more are rarer than one in 200."""
    rng = np.random.default_rng(0)
    assert sum(bool(change_points(noise(rng, kind, points))) for _ in range(120)) < 13


@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_a_step_is_found_with_its_place_and_size(kind: str) -> None:
    """3 % in the later half of 24 points of 1 %."""
    rng, found, places, sizes = np.random.default_rng(1), 0, 0, 0
    for _ in range(60):
        changes = change_points(noise(rng, kind, 24) + 0.03 * (np.arange(24) >= 12))
        if len(changes) != 1:
            continue
        found += 1
        (change,) = changes
        assert change.low <= change.at <= change.high
        assert change.p_value <= 0.05
        places += change.low <= 12 <= change.high
        low, high = change.estimate.ratio()[1:]
        sizes += low <= np.exp(0.03) <= high
    assert found >= 50
    assert min(places, sizes) >= 0.85 * found


def test_an_excursion_is_two_changes_and_a_staircase_each_step() -> None:
    rng = np.random.default_rng(2)
    places = np.arange(40)
    excursion = noise(rng, "normal", 40) + 0.06 * ((places >= 15) & (places < 25))
    assert [change.at for change in change_points(excursion)] == [15, 25]
    staircase = noise(rng, "normal", 40) + 0.05 * (places >= 10) + 0.05 * (places >= 28)
    first, second = change_points(staircase)
    assert (first.at, second.at) == (10, 28)
    assert first.estimate == welch(staircase[:10], staircase[10:28])
    assert second.estimate == welch(staircase[10:28], staircase[28:])


def test_what_has_no_change() -> None:
    assert change_points([]) == []
    assert change_points([0.0] * (FEWEST_POINTS - 2) + [1.0]) == []
    assert change_points([0.5] * 30) == []


def test_one_point_is_no_change() -> None:
    series = noise(np.random.default_rng(3), "normal", 20)
    series[10] += 1
    assert change_points(series) == []


def test_a_clear_change_of_a_noiseless_series() -> None:
    (change,) = change_points([0.0] * 6 + [1.0] * 6)
    assert (change.at, change.low, change.high) == (6, 6, 6)
    assert (change.estimate.log, change.estimate.error) == (1.0, 0.0)


def test_the_same_series_has_the_same_changes() -> None:
    series = noise(np.random.default_rng(4), "normal", 30) + 0.01 * (np.arange(30) >= 14)
    assert change_points(series) == change_points(series)
