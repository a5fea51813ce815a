"""A ladder as one family of comparisons: its rate of errors, the differences that it finds, and lucky rounds."""

import math

import numpy as np
import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.compare.sides import Side
from dlrm_bench.bench.ladder import comparisons
from dlrm_bench.bench.ladder.analysis import read_judged_ladder
from dlrm_bench.bench.ladder.comparisons import JudgedRung, agreement_by_luck, as_judged, judge_sides
from dlrm_bench.bench.stats.series import AUTO_CONFIDENCE, CONFIDENCE
from tests.bench.stats.rates import side
from tests.bench.stats.test_rounds import places


def drawn(
    rng: np.random.Generator,
    rounds: int,
    effects: list[float],
    seed: int = 0,
    drift: float = 0.0,
    confidence: float = CONFIDENCE,
) -> list[JudgedRung]:
    """Rungs whose logarithms of time differ from the first one's by `effects`, with noise of 1 % a run."""
    at = places(len(effects) + 1, rounds, seed)
    logs = rng.normal(0, 0.01, at.shape) + np.array([0.0, *effects])[:, None] + drift * at
    return judge_sides(
        [
            Side(
                label=f"rung-{i}",
                series=[np.array([math.exp(value)]) for value in of_rung],
                clock_ms=[math.exp(value) for value in of_rung],
                finished=[f"{place:05d}" for place in when],
                machines=["x"] * rounds,
                settings={},
                global_batch_size=1024,
                mean_only=False,
                warnings=[],
                confidence=confidence,
            )
            for i, (of_rung, when) in enumerate(zip(logs, at, strict=True))
        ]
    )


def proven(rungs: list[JudgedRung]) -> set[tuple[str, str]]:
    """(rung, the one that it is proven to differ from)."""
    results = [result for rung in rungs for result in (rung.over_first, rung.over_previous) if result is not None]
    return {(result.b.label, result.a.label) for result in results if (as_judged(result) or {}).get("proven")}


@pytest.mark.slow
@pytest.mark.parametrize("things", [3, 8, 16])
@pytest.mark.parametrize("confidence", [CONFIDENCE, AUTO_CONFIDENCE])
def test_a_ladder_of_the_same_thing_seldom_shows_a_word_anywhere(things: int, confidence: float) -> None:
    """Over the first rung and over the one before, together; corrected apart they were 9 to 11 %."""
    rng, tries = np.random.default_rng(1), 400
    alarms = [bool(proven(drawn(rng, 5, [0.0] * (things - 1), t, 0.0, confidence))) for t in range(tries)]
    assert np.mean(alarms) <= 1 - confidence + 2 * math.sqrt((1 - confidence) * confidence / tries)


def test_a_large_difference_is_proven_among_many_rungs() -> None:
    rungs = drawn(np.random.default_rng(2), 5, [0.0] * 8 + [-0.5] + [0.0] * 6)
    assert proven(rungs) == {("rung-9", "rung-0"), ("rung-9", "rung-8"), ("rung-10", "rung-9")}
    assert rungs[9].over_first is not None
    assert rungs[9].over_first.speedup.value == pytest.approx(math.exp(0.5), rel=0.03)
    assert rungs[9].over_first.comparisons == 29  # rung 1 has one comparison, not two


def test_a_drift_hides_no_gain_and_makes_none() -> None:
    """2 % a run, 16 rungs: a gain of 10 % from the eighth on is found by at least 80 %, and nothing where there is
    none in at most 5 %."""
    rng, tries = np.random.default_rng(3), 150
    gained = [proven(drawn(rng, 5, [0.0] * 7 + [-math.log(1.1)] * 8, t, 0.02)) for t in range(tries)]
    assert np.mean([("rung-15", "rung-0") in each for each in gained]) >= 0.8
    assert np.mean([("rung-8", "rung-7") in each for each in gained]) >= 0.8
    none = [proven(drawn(rng, 5, [0.0] * 15, t, 0.02)) for t in range(tries)]
    assert np.mean([bool(each) for each in none]) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / tries)


def test_the_first_rung_and_one_round_are_compared_with_nothing() -> None:
    (first, second) = drawn(np.random.default_rng(0), 1, [-0.5])
    assert (first.over_first, first.over_previous, as_judged(first.over_first)) == (None, None, None)
    assert second.over_first is not None
    assert (second.over_first.verdict, second.over_first.detectable) == ("no difference proven", None)
    assert agreement_by_luck(second) is None


def test_lucky_rounds_of_any_comparison_of_the_table_are_named() -> None:
    """Two rounds of record 09 whose launch-threads agrees with the rung before as no iterations let expect."""
    ladder, _ = read_judged_ladder(next((ROOT / "results").glob("09-*")))
    named = {rung["name"] for rung in ladder["rungs"] if rung["agrees_by_luck"]}
    assert "launch-threads" in named


def test_each_lucky_comparison_of_a_rung_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons, "lucky", lambda *_: 0.05)
    *_, second, third = drawn(np.random.default_rng(0), 3, [0.0, 0.0])
    assert [str(agreement_by_luck(rung)).count(" agree better ") for rung in (second, third)] == [1, 2]
    assert "rung-2 to rung-0 agree" in str(agreement_by_luck(third))
    assert "rung-2 to rung-1 agree" in str(agreement_by_luck(third))


def test_rungs_whose_times_agree_to_the_last_digit_prove_nothing_and_say_why() -> None:
    """Ten milliseconds and 10.01, round after round, in timings of two decimals."""
    at = places(2, 4, seed=0)
    logs = np.log([[10.00] * 4, [10.01] * 4])
    _, second = judge_sides([side(f"rung-{i}", *row) for i, row in enumerate(zip(logs, at, strict=True))])
    assert (as_judged(second.over_first) or {})["proven"] is False
    assert "rung-1 to rung-0 agree to the last digit" in str(agreement_by_luck(second))
