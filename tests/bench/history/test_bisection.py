"""Bisection on simulated pairs: the right commit, how often another, and what is said where nothing is proven."""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dlrm_bench.bench.history.bisection import CannotRunError, Finding, Pair, Step, bisect, decide, looks_of

COMMITS = [f"c{i:02d}" for i in range(20)]


def simulated(
    rng: np.random.Generator, effect: Callable[[str], float], spread: float = 0.01
) -> Callable[[str], Iterator[Pair]]:
    """Pairs whose runs differ by `spread`, on a machine that drifts from pair to pair."""

    def pairs(commit: str) -> Iterator[Pair]:
        number = 0
        while True:
            day = 0.02 * number
            good, candidate = rng.normal(day, spread, 2)
            yield Pair(np.array([math.exp(good)]), np.array([math.exp(candidate + effect(commit))]))
            number += 1

    return pairs


def found(pairs: Callable[[str], Iterator[Pair]], most: int = 40) -> Finding:
    *steps, finding = bisect(COMMITS, pairs, 0.95, most)
    assert isinstance(finding, Finding)
    assert list(finding.steps) == steps
    return finding


@pytest.mark.parametrize("size", [0.05, -0.05])
def test_the_first_commit_after_the_change_is_found(size: float) -> None:
    """Wrong in 5 % of tries at most; of 20 that would be 1, and 4 are rarer than one in fifty."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(20):
        at = int(rng.integers(len(COMMITS)))
        finding = found(simulated(rng, lambda commit, at=at: size * (COMMITS.index(commit) >= at)))  # type: ignore[misc]
        wrong += finding.first != COMMITS[at]
        assert finding.confidence >= 0.95
        assert len(finding.steps) <= 6
    assert wrong < 4


def test_a_large_change_takes_few_pairs_and_a_small_one_more() -> None:
    pairs = []
    for size in (0.5, 0.03):
        finding = found(simulated(np.random.default_rng(1), lambda commit, size=size: size * (commit >= "c07")))  # type: ignore[misc]
        assert finding.first == "c07"
        assert finding.between == ["c07"]
        pairs.append([step.pairs for step in finding.steps])
    assert set(pairs[0]) == {4}
    assert sum(pairs[0]) < sum(pairs[1])


def test_without_a_change_nothing_is_found() -> None:
    rng, somewhere = np.random.default_rng(2), 0
    for _ in range(40):
        finding = found(simulated(rng, lambda commit: 0.0), most=12)
        if finding.first is None:
            assert (finding.between, len(finding.steps)) == (COMMITS, 1)
            assert finding.steps[0].place == "undecided"
        somewhere += finding.first is not None
    assert somewhere < 4  # the first step's share of 5 % is 0.8 %


def test_commits_that_cannot_run_are_left_out_and_named() -> None:
    of_change = simulated(np.random.default_rng(3), lambda commit: 0.2 * (commit >= "c07"))

    def pairs(commit: str) -> Iterator[Pair]:
        if commit in ("c06", "c07", "c09"):
            raise CannotRunError("does not run")
        yield from of_change(commit)

    finding = found(pairs)
    assert finding.first == "c08"
    assert finding.between == ["c06", "c07", "c08"]
    refused = [step for step in finding.steps if step.place == "cannot run"]
    assert [(step.commit, step.reason) for step in refused] == [
        (name, "does not run") for name in ("c09", "c07", "c06")
    ]

    def none(commit: str) -> Iterator[Pair]:
        raise CannotRunError("does not run")
        yield

    assert found(none).steps[0].place == "cannot run"


def test_other_errors_end_the_bisection() -> None:
    def of_the_good_commit(commit: str) -> Iterator[Pair]:
        raise ValueError("the good commit does not run")
        yield

    with pytest.raises(ValueError, match="the good commit does not run"):
        found(of_the_good_commit)


def test_a_candidate_that_fails_after_some_pairs_is_undecided_and_keeps_them() -> None:
    whole = simulated(np.random.default_rng(0), lambda commit: 0.2)

    def pairs(commit: str) -> Iterator[Pair]:
        yield from itertools.islice(whole(commit), 3)
        raise CannotRunError("the disk is full")

    step = decide("c", pairs("c"), None, 0.01, 20)
    assert (step.place, step.pairs, step.reason) == ("undecided", 3, "the disk is full")
    assert step.estimate is not None
    assert step.estimate.log == pytest.approx(0.2, abs=0.05)


def test_a_candidate_in_the_middle_stays_undecided() -> None:
    pairs = simulated(np.random.default_rng(4), lambda commit: 0.1)
    step = decide("c", pairs("c"), 0.1, 0.01, 20)
    assert (step.place, step.pairs) == ("undecided", 20)
    assert isinstance(step, Step)
    middle = simulated(np.random.default_rng(6), lambda commit: 0.2 if commit == "c19" else 0.1)
    finding = found(middle)
    assert (finding.first, len(finding.between)) == ("c19", 20)
    assert [step.place for step in finding.steps] == ["after", "undecided", "undecided"]


def test_looks_come_ever_later_and_end_with_the_most() -> None:
    assert looks_of(40) == [4, 6, 10, 14, 20, 28, 40]
    assert (looks_of(4), looks_of(5), looks_of(6)) == ([4], [4, 5], [4, 6])


def test_one_candidate_needs_one_step() -> None:
    *steps, finding = bisect(["c"], simulated(np.random.default_rng(5), lambda commit: 0.3), 0.95, 40)
    assert isinstance(finding, Finding)
    assert (finding.first, finding.between, len(steps)) == ("c", ["c"], 1)
