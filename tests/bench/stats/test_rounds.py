"""Rounds under a drift: the estimates, their rate of errors, and the differences that they find."""

import math

import numpy as np
import pytest
from scipy import stats

from dlrm_bench.bench.stats.repetitions import balanced_orders
from dlrm_bench.bench.stats.rounds import estimates_of_rounds
from dlrm_bench.bench.stats.statistics import Estimate

TRIES = 300


def places(things: int, rounds: int, seed: int) -> np.ndarray:
    """Place of each run of a ladder, [things, rounds]."""
    orders = balanced_orders(things, rounds, seed)
    return np.array([[things * r + order.index(thing) for r, order in enumerate(orders)] for thing in range(things)])


def estimates(logs: np.ndarray, positions: np.ndarray, pairs: list[tuple[int, int]]) -> list[Estimate]:
    found = estimates_of_rounds(logs, positions, pairs)
    assert None not in found
    return [each for each in found if each is not None]


def test_the_estimate_is_that_of_least_squares() -> None:
    """The estimate is that of all runs at once, on things, rounds and a common slope, also in an order that is not
    balanced."""
    rng = np.random.default_rng(0)
    things, rounds = 4, 5
    at = np.array([rng.permutation(things) + things * r for r in range(rounds)]).T
    logs = rng.normal(0, 0.01, at.shape) + 0.05 * at
    thing, number = np.repeat(np.arange(things), rounds), np.tile(np.arange(rounds), things)
    columns = [(thing == i).astype(float) for i in range(things)] + [(number == r).astype(float) for r in range(1, 5)]
    fitted = np.linalg.lstsq(np.column_stack([*columns, at.ravel()]), logs.ravel(), rcond=None)[0]
    pairs = [(0, 1), (0, 3), (2, 3)]
    for (i, j), estimate in zip(pairs, estimates(logs, at, pairs), strict=True):
        assert estimate.log == pytest.approx(fitted[j] - fitted[i])


def test_two_things_and_few_rounds_are_plain_pairs() -> None:
    rng = np.random.default_rng(1)
    for things, rounds in ((2, 5), (5, 3), (2, 2)):
        logs = rng.normal(0, 0.01, (things, rounds))
        (estimate,) = estimates(logs, places(things, rounds, 0), [(0, 1)])
        plain = stats.ttest_rel(logs[1], logs[0])
        assert estimate.p_value == pytest.approx(plain.pvalue)
        assert estimate.freedom == rounds - 1
    assert estimates_of_rounds(np.zeros((3, 1)), places(3, 1, 0), [(0, 1), (0, 2)]) == [None, None]


def test_an_order_that_never_changes_tells_no_drift_from_the_things() -> None:
    logs = np.random.default_rng(2).normal(0, 0.01, (4, 5))
    always = np.arange(20).reshape(5, 4).T
    (estimate,) = estimates(logs, always, [(0, 3)])
    assert estimate.log == pytest.approx(float((logs[3] - logs[0]).mean()))
    assert estimate.freedom == 4


def noise(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Noise of runs, standard deviation 1 % or less: normal, heavy-tailed, or of every second thing a tenth of that."""
    if kind == "heavy":
        return np.asarray(0.01 * rng.standard_t(3, shape) / math.sqrt(3))
    spread = np.where((np.arange(shape[0]) % 2 == 1) & (kind == "uneven"), 0.001, 0.01)
    return np.asarray(spread[:, None] * rng.normal(size=shape))


@pytest.mark.parametrize("kind", ["normal", "heavy", "uneven"])
@pytest.mark.parametrize("drift", ["none", "linear", "walk", "step"])
@pytest.mark.parametrize(("things", "rounds"), [(4, 5), (16, 5), (16, 4)])
def test_intervals_cover_as_they_say_under_any_drift(things: int, rounds: int, drift: str, kind: str) -> None:
    rng, covered = np.random.default_rng(0), []
    pairs = [(0, things - 1), (things - 2, things - 1)]
    for seed in range(TRIES):
        at = places(things, rounds, seed)
        wander = {
            "none": np.zeros(at.size),
            "linear": 0.02 * np.arange(at.size),
            "walk": np.cumsum(rng.normal(0, 0.01, at.size)),
            "step": 0.1 * (np.arange(at.size) >= rng.integers(1, at.size)),
        }[drift]
        for estimate in estimates(noise(rng, kind, at.shape) + wander[at], at, pairs):
            low, high = estimate.ratio()[1:]
            covered.append(low <= 1 <= high)
    assert 0.925 <= np.mean(covered) <= 0.995


def test_a_drift_hides_no_gain_of_ten_percent() -> None:
    """Sixteen things, five rounds, 2 % a run; with a correction for thirty comparisons. Plain pairs find 0 to 3 %."""
    rng, found, plain = np.random.default_rng(0), 0, 0
    for seed in range(TRIES):
        at = places(16, 5, seed)
        logs = rng.normal(0, 0.01, at.shape) + 0.02 * at
        logs[8:] -= math.log(1.1)
        (estimate,) = estimates(logs, at, [(0, 15)])
        found += estimate.p_value < 0.05 / 29
        plain += stats.ttest_rel(logs[15], logs[0]).pvalue < 0.05 / 29
    assert found >= 0.9 * TRIES
    assert plain <= 0.05 * TRIES
