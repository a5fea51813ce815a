"""Checks: what passes, what fails, and what so few runs cannot say; by simulation, how often each is wrong."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.bench.compare.checks import check_equivalence, check_regression, worst
from dlrm_bench.bench.compare.comparison import Result, Terms, compare_all
from dlrm_bench.bench.compare.sides import Side
from dlrm_bench.bench.compare.tables import result_as_json, verdict_in_words
from dlrm_bench.bench.stats.series import AUTO_CONFIDENCE
from dlrm_bench.bench.stats.statistics import compare
from tests.bench.compare.two_sides import compare_sides


def side(label: str, medians: np.ndarray, first: int = 0) -> Side:
    """Runs of one iteration each, every fourth minute from `first` on: sides of 0 and 1, then 1 and 0, and so on."""
    return Side(
        label=label,
        series=[np.array([median]) for median in medians],
        clock_ms=[*medians],
        finished=[f"{4 * (i // 2) + (3 - first if i % 2 else first):03d}" for i in range(len(medians))],
        machines=["x"] * len(medians),
        settings={},
        global_batch_size=1024,
        mean_only=False,
        warnings=[],
    )


def drawn(random: np.random.Generator, ratio: float, runs: int = 8, spread: float = 0.01) -> Result:
    """B takes `ratio` times A's time; runs spread by 1 %."""
    return _result(*(side("", np.exp(random.normal(np.log(middle), spread, runs))) for middle in (1.0, ratio)))


def _result(a: Side, b: Side) -> Result:
    comparison = compare(a.series, b.series)
    estimate = comparison.estimates["p50"]
    return Result(name="", a=a, b=b, comparison=comparison, estimate=estimate, p_value=estimate.p_value)


@pytest.mark.parametrize(
    ("a", "b", "regression", "equivalence"),
    [
        ([1, 1.001, 0.999], [1.001, 1, 1.002], "passed", "passed"),
        ([1, 1.001, 0.999], [0.9, 0.901, 0.9], "passed", "failed"),
        ([1, 1.001, 0.999], [1.011, 1.01, 1.0105], "passed", "passed"),  # proven slower, but by less than 2 %
        ([1, 1.001, 0.999], [1.05, 1.051, 1.049], "failed", "failed"),
        ([1, 1.004, 0.996], [1.022, 1.018, 1.025], "failed", "not enough runs"),
        ([1, 1.1, 0.9], [1.1, 0.9, 1], "not enough runs", "not enough runs"),
        ([1], [2], "not enough runs", "not enough runs"),
    ],
)
def test_outcomes(a: list[float], b: list[float], regression: str, equivalence: str) -> None:
    result = compare_sides(side("a", np.array(a)), side("b", np.array(b), first=1))
    assert check_regression(result, 0.02).outcome == regression
    assert check_equivalence(result, 0.02).outcome == equivalence


def test_texts_say_what_is_known_and_what_it_takes() -> None:
    unsure = compare_sides(side("a", np.array([1, 1.02, 0.98])), side("b", np.array([1.02, 0.98, 1]), first=1))
    text = check_regression(unsure, 0.02).text
    assert text.startswith("B is not proven slower, a regression of 2.00% not excluded: B takes 0.00% less time, at")
    assert "at 95 % confidence at most 6." in text
    assert text.endswith(" runs per side would decide it")
    one = compare_sides(side("a", np.array([1.0])), side("b", np.array([1.0]), first=1))
    assert check_equivalence(one, 0.02).text.startswith("1 and 1 runs: at least two per side are needed")
    assert check_regression(unsure, 0.0).outcome == "not enough runs"


def test_rungs_of_auto_ladders_are_checked_at_their_own_confidence() -> None:
    """Five runs a side, whose one-sided p value lies between 3 % and 5 %."""
    logs = np.array([0.0, 0.01, -0.01, 0.02, -0.02])
    a, b = (side(name, np.exp(logs + shift)) for name, shift in (("a", 0), ("b", 0.02)))
    usual = _result(a, b)
    auto = _result(*(replace(each, confidence=AUTO_CONFIDENCE) for each in (a, b)))
    limit = next(size for size in np.arange(0.02, 0.1, 0.0005) if 0.035 < usual.estimate.p_at_least(1 + size) < 0.045)
    assert check_regression(usual, limit).outcome == check_equivalence(usual, limit).outcome == "passed"
    assert check_regression(auto, limit).outcome == check_equivalence(auto, limit).outcome == "not enough runs"
    assert "at 97 % confidence at most" in check_regression(auto, limit).text
    assert "the 94 % interval of B's time" in check_equivalence(auto, limit).text
    assert "the 90 % interval of B's time" in check_equivalence(usual, limit).text


def test_runs_that_agree_to_the_last_digit_answer_no_check() -> None:
    result = compare_sides(side("a", np.full(4, 10.0)), side("b", np.full(4, 10.01), first=1))
    for check in (check_regression(result, 0.02), check_equivalence(result, 0.02)):
        assert check.outcome == "not enough runs"
        assert check.text.startswith("the timings are too coarse")
    assert verdict_in_words(result).startswith("no difference proven: the timings are too coarse")
    assert result_as_json(result)["detectable"] is result_as_json(result)["detectable_interval"] is None
    assert any("more digits" in note for note in result.notes)


def test_a_regression_of_the_limit_passes_in_at_most_5_percent_of_tries() -> None:
    random = np.random.default_rng(0)
    outcomes = [check_regression(drawn(random, 1.02), 0.02).outcome for _ in range(200)]
    assert outcomes.count("passed") <= 0.08 * 200
    assert outcomes.count("failed") > 0.85 * 200


def test_the_same_program_fails_in_at_most_5_percent_of_tries_and_mostly_passes() -> None:
    random = np.random.default_rng(1)
    checked = [check_regression(drawn(random, 1.0), 0.02).outcome for _ in range(200)]
    assert checked.count("failed") <= 0.05 * 200
    assert checked.count("passed") > 0.9 * 200
    assert checked.count("not enough runs") > 0


def test_a_difference_of_the_margin_is_called_equivalent_in_at_most_5_percent_of_tries() -> None:
    random = np.random.default_rng(2)
    for ratio in (1.02, 1 / 1.02):
        checked = [check_equivalence(drawn(random, ratio), 0.02).outcome for _ in range(150)]
        assert checked.count("passed") <= 0.085 * 150
        assert checked.count("failed") <= 0.06 * 150
    same = [check_equivalence(drawn(random, 1.0), 0.02).outcome for _ in range(100)]
    assert same.count("passed") > 0.8 * 100


def test_the_worst_outcome_counts(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    passed, failed = (check_regression(drawn(random, ratio, runs=20), 0.02) for ratio in (0.9, 1.2))
    unsure = check_regression(drawn(random, 1.0, spread=0.2), 0.02)
    assert worst([passed, unsure, failed]) == "failed"
    assert worst([passed, unsure]) == "not enough runs"
    assert worst([passed]) == worst([]) == "passed"


def test_an_order_that_allows_no_verdict_answers_no_check() -> None:
    """Whatever the times are: three runs after three others, with a stored baseline's distance and without."""
    a, b = side("a", np.array([1, 1.001, 0.999])), side("b", np.array([0.9, 0.901, 0.9]))
    for last in ("100", "2026-11-22"):
        after = replace(b, finished=[f"{last}-{i}" for i in range(3)])
        result = compare_sides(a, after)
        assert result.verdict == "no verdict"
        for check in (check_regression(result, 0.02), check_equivalence(result, 0.02)):
            assert check.outcome == "no verdict"
            assert check.text.startswith("all runs of A came before those of the other side")
        assert worst([check_regression(result, 0.02)]) == "no verdict"
        (accepted,) = compare_all([("", a, after)], Terms(accept_blocked_order=True))
        assert accepted.verdict == "faster"
        assert check_regression(accepted, 0.02).outcome == "passed"
    elsewhere = compare_sides(a, replace(side("b", np.array([0.9, 0.901, 0.9]), first=1), machines=["y"] * 3))
    assert "on different machines" in check_regression(elsewhere, 0.02).text
