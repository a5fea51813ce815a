"""The differences that a number of runs can show, checked by simulation and against scipy.stats."""

import json
import math
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy import stats

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.stats.repetitions import (
    balanced_orders,
    detectable,
    detectable_by,
    detectable_range,
    drift_left,
    finds,
    finds_from,
    holm,
    runs_needed,
)
from dlrm_bench.bench.stats.series import AUTO_CONFIDENCE
from dlrm_bench.bench.stats.statistics import UNPROVEN, Estimate, compare, student_t


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


def test_what_so_many_runs_find_in_words() -> None:
    small = (0.0186, 0.031, 0.0891)
    assert finds(small) == "find differences from 3.10% (1.86% to 8.91%, with so few runs)"
    assert finds_from(small) == "3.10% (1.86% .. 8.91%)"
    large = (0.7, 1.5124, 1e10)  # beside a proven 20.8 x
    assert finds(large) == "find factors from 2.51 (70.00% to over 100 x, with so few runs)"
    assert finds_from(large) == "2.51 x (70.00% .. over 100 x)"
    assert finds((1e3, 1e10, math.inf)) == "find no factor below 100"


@pytest.mark.parametrize("freedom", [1, 4, 9])
def test_the_range_of_what_is_detectable_covers_it(freedom: int) -> None:
    """In 95 % of ladders the true detectable difference is in the range; the single figure of two rounds is
    anywhere."""
    rng, true = np.random.default_rng(0), detectable_by(Estimate(0.0, 0.01, freedom))
    seen = 0.01 * np.sqrt(rng.chisquare(freedom, 400) / freedom)
    ranges = [detectable_range(Estimate(0.0, float(error), freedom)) for error in seen]
    assert np.mean([low <= true <= high for low, _, high in ranges]) == pytest.approx(0.95, abs=0.025)
    assert all(low < value < high for low, value, high in ranges)
    values = [value for _, value, _ in ranges]
    assert max(values) / min(values) > 2


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


RESULTS = ROOT / "results"
AGAIN = ("07", "09", "10", "11", "14", "15", "22", "24", "26", "27", "28", "34", "38", "39", "47", "48")
"""Records with several runs of one configuration on one machine; 48 has reruns."""
KINDS = ("torchrec", "five-stage", "static")


LADDERS_OF_THE_SAME = {
    "torchrec": {"15-*": "stock", "22-*": "stock", "34-*": "stock", "47-*/three-pipelines": "stock"},
    "five-stage": {"15-*": "five-stage", "47-*/three-pipelines": "five-stage", "47-*/five-stage": "same"},
    "static": {"15-*": "static", "22-*": "static", "34-*": "static", "47-*/three-pipelines": "static"},
}
"""Ladders that ran one thing twice a round, on five machines, and the name of its two rungs."""


def same_runs(kind: str) -> list[np.ndarray]:
    """Logarithms of the medians of the runs of each A/A ladder of a pipeline, [2, rounds]."""
    ladders = []
    for pattern, name in LADDERS_OF_THE_SAME[kind].items():
        (ladder,) = RESULTS.glob(pattern)
        folders = [sorted(ladder.glob(f"[0-9]*-{name}-{side}")) for side in "ab"]
        medians = [[math.log(np.median(read_record(run).latencies_ms)) for run in side] for side in folders]
        ladders.append(np.array(medians))
    return ladders


@cache
def groups() -> dict[str, list[np.ndarray]]:
    """Logarithms of the medians of runs of one configuration on one machine, by kind of pipeline, from all of AGAIN."""
    found: dict[tuple[str, ...], list[float]] = {}
    for number in AGAIN:
        (folder,) = RESULTS.glob(f"{number}-*")
        for path in sorted(folder.rglob("run.json")):
            record = read_record(path.parent)
            if record.run["host"] is None and record.run["latency_ms"] is not None:
                config = {k: v for k, v in record.run["config"].items() if k not in ("run_id", "results_dir")}
                program = "" if (folder / "ladder.json").exists() else path.parent.parent.name  # before, after
                key = (config["pipeline"]["name"], number, program, json.dumps(config, sort_keys=True))
                found.setdefault(key, []).append(math.log(record.run["latency_ms"]["p50"]))
    return {
        kind: [np.array(runs) for (of, *_), runs in found.items() if of == kind and len(runs) > 1] for kind in KINDS
    }


def pooled(kind: str) -> tuple[np.ndarray, float]:
    """Returns deviations of runs from others of their configuration and machine, and their standard deviation."""
    each = groups()[kind]
    scaled = [(runs - runs.mean()) * math.sqrt(len(runs) / (len(runs) - 1)) for runs in each]
    freedom = sum(len(runs) - 1 for runs in each)
    return np.concatenate(scaled), math.sqrt(sum(((runs - runs.mean()) ** 2).sum() for runs in each) / freedom)


def judged_different(a: np.ndarray, b: np.ndarray, paired: bool = False) -> bool:
    """Returns compare()'s verdict on runs with these logarithms of medians."""
    sides = ([np.exp(run)[None] for run in side] for side in (a, b))
    return compare(*sides, paired=paired).estimates["p50"].verdict() != UNPROVEN


@pytest.mark.parametrize("kind", KINDS)
def test_ladders_of_the_same_thing_prove_no_difference(kind: str) -> None:
    ladders = same_runs(kind)
    together = np.concatenate(ladders, axis=1)
    assert together.shape[1] >= 10
    several = [rounds for rounds in ladders if rounds.shape[1] > 1]
    assert len(several) >= 2
    assert not any(judged_different(a, b, paired=True) for a, b in [*several, together])


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_runs_of_the_same_thing_are_seldom_judged_different(kind: str) -> None:
    """About 5 % of all 126 ways to call five of the ten runs of one ladder A."""
    runs = same_runs(kind)[0].ravel()
    chosen = [list(five) for five in combinations(range(len(runs)), 5) if 0 in five]
    splits = [judged_different(runs[five], np.delete(runs, five)) for five in chosen]
    assert len(splits) == 126
    assert np.mean(splits) <= 0.06  # seven of 126


@pytest.mark.parametrize(("kind", "runs", "of"), [("torchrec", 49, 17), ("five-stage", 56, 18), ("static", 46, 15)])
def test_so_are_runs_of_several_machines(kind: str, runs: int, of: int) -> None:
    """Five and ten a side, drawn from what runs of all records differ by within their machine."""
    (pool, _), rng = pooled(kind), np.random.default_rng(0)
    assert len(pool) >= runs
    assert len(groups()[kind]) >= of
    draws = [judged_different(rng.choice(pool, n), rng.choice(pool, n)) for n in (5, 10) for _ in range(150)]
    assert np.mean(draws) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / len(draws))


@pytest.mark.parametrize(("kind", "tries"), [("torchrec", 20), ("five-stage", 20), ("static", 150)])
def test_2_percent_is_found_with_the_number_of_runs_that_is_printed(kind: str, tries: int) -> None:
    """The probability is 80 %, drawing runs from the recorded ones: 2 of static's, more than 250 of the others'."""
    (pool, spread), rng = pooled(kind), np.random.default_rng(1)
    needed = runs_needed(spread, 0.02, paired=False)
    assert needed is not None
    slower = math.log(1.02)
    found = [judged_different(rng.choice(pool, needed), rng.choice(pool, needed) + slower) for _ in range(tries)]
    assert np.mean(found) >= 0.8 - 2 * math.sqrt(0.8 * 0.2 / tries)


def test_intervals_of_rounds_that_ended_by_what_they_find_cover_95_percent() -> None:
    """Differences of logarithms spread by 1.25 and 1.5 times the one to find, the worst case."""
    rng, most = np.random.default_rng(0), 40
    factors = {n: math.log1p(detectable(0.001, n, True, confidence=AUTO_CONFIDENCE)) / 0.001 for n in range(6, 41, 2)}
    quantiles = {n: [student_t((1 + c) / 2, n - 1) for c in (AUTO_CONFIDENCE, 0.95)] for n in factors}
    drawn = np.concatenate([rng.normal(0, spread, (4000, most)) for spread in (1.25, 1.5)])
    covered = np.zeros(2)
    for row in drawn:
        rounds = next((n for n in factors if factors[n] * row[:n].std(ddof=1) <= 1), most)
        t = abs(row[:rounds].mean()) / (row[:rounds].std(ddof=1) / math.sqrt(rounds))
        covered += t <= np.array(quantiles[rounds])
    assert covered[0] / len(drawn) > 0.947
    assert covered[1] / len(drawn) < 0.94  # which is why
