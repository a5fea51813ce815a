"""What a ladder of recorded runs says of its rungs, and its tables."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.ladder.analysis import (
    AUTO_CONFIDENCE,
    ladder_spread_table,
    ladder_table,
    lucky,
    proven,
    read_judged_ladder,
)
from dlrm_bench.bench.records.ladder import Ladder, RungResult, read_ladder
from dlrm_bench.bench.stats.repetitions import detectable
from dlrm_bench.bench.stats.statistics import student_t
from tests.bench.ladder.made_ladders import made as made
from tests.bench.ladder.made_ladders import make, pretend_runs


def test_rounds_that_agree_by_luck_are_named() -> None:
    """Record 24's two ratios agree to 0.01 %, where the iterations of stock let 3 % be expected."""
    luck, none = (
        list(lucky(read_judged_ladder(next((ROOT / "results").glob(f"{number}-*")))[0])) for number in (24, 15)
    )
    (text,) = luck
    assert text.startswith("the ratios of peer-memory-bf16 to stock agree better from round to round (0.01%)")
    assert none == []


def test_speed_ups(made: Path) -> None:
    ladder, members = read_ladder(made)
    a, b, c = ladder["rungs"]
    assert (a["speedup_vs_first"], a["ci95"]) == (1, [1, 1])
    assert b["speedup_vs_first"] == b["speedup_vs_previous"] == pytest.approx(a["median_ms"] / b["median_ms"])
    assert b["ci95"] is not None
    assert b["ci95"][0] > 1
    assert c["ci95_vs_previous"] is not None
    assert c["ci95_vs_previous"][0] < 1 < c["ci95_vs_previous"][1]
    assert c["loss_difference"] == 0
    medians = sorted(
        (float(np.median(run.latencies_ms)), run_id) for run, run_id in zip(members["a"], a["records"], strict=True)
    )
    assert a["record"] == medians[2][1]
    assert len(ladder["order"]) == 12
    assert (ladder["rounds"], ladder["seed"], ladder["command"]) == (4, 1, "cmd")


def test_the_table_marks_what_is_not_proven(made: Path) -> None:
    ladder, _ = read_ladder(made)
    rows = list(zip(*(column.cells for column in ladder_table(ladder).columns), strict=True))
    assert rows[0][3:8] == ("", "", "", "", "")
    assert "~" not in str(rows[1][6])
    assert str(rows[2][6]).endswith("~")
    assert str(rows[1][5]) == f"{ladder['rungs'][1]['detectable']:.2%}"
    spread = ladder_spread_table(ladder)
    assert spread is not None
    assert [str(cell) for cell in spread.columns[3].cells] == ["unknown"] * 3  # one machine
    assert all(str(cell).endswith("%") for column in spread.columns[1:3] for cell in column.cells)


def test_one_round_has_no_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_runs(monkeypatch)
    make(tmp_path, rounds=1)
    ladder, _ = read_ladder(tmp_path)
    assert ladder["rungs"][1]["ci95"] is None
    table = ladder_table(ladder)
    assert list(table.columns[4].cells) == ["", "one round: unknown", "one round: unknown"]
    assert [str(cell).endswith(" ~") for cell in table.columns[3].cells] == [False, True, True]


def drawn_ladder(rounds: int, effects: list[float], rng: np.random.Generator) -> Ladder:
    """A ladder whose rungs' logarithms of time differ from the first rung's by `effects`, with noise of 1 % a run."""
    first = rng.normal(0, 0.01, rounds)
    rungs = [rung_of("first", 0.0, 0.0)]
    for i, effect in enumerate(effects):
        differences = first - (effect + rng.normal(0, 0.01, rounds))
        half = student_t(0.975, rounds - 1) * differences.std(ddof=1) / math.sqrt(rounds)
        rungs.append(rung_of(f"rung-{i}", float(differences.mean()), half))
    return Ladder(schema=1, id="x", created="", command="", rounds=rounds, seed=0, rungs=rungs, order=[])


def rung_of(name: str, log_speedup: float, half_width: float) -> RungResult:
    speedup, interval = math.exp(log_speedup), [math.exp(log_speedup - half_width), math.exp(log_speedup + half_width)]
    return RungResult(
        name=name,
        flags=[],
        record="",
        records=[],
        median_ms=1.0,
        speedup_vs_first=speedup,
        speedup_vs_previous=speedup,
        ci95=interval,
        ci95_vs_previous=interval,
        loss_difference=0.0,
    )


def test_one_rung_is_proven_where_its_interval_leaves_out_1() -> None:
    rng = np.random.default_rng(0)
    ladders = [drawn_ladder(4, [effect], rng) for effect in (0.0, -0.02, -0.05) for _ in range(50)]
    outside = [not ladder["rungs"][1]["ci95"][0] <= 1 <= ladder["rungs"][1]["ci95"][1] for ladder in ladders]  # type: ignore[index]
    assert [bool(proven(ladder, "first")) for ladder in ladders] == outside
    assert 0 < sum(outside) < len(outside)


def test_a_ladder_of_sixteen_equal_rungs_seldom_proves_anything() -> None:
    rng = np.random.default_rng(1)
    ladders = [drawn_ladder(5, [0.0] * 15, rng) for _ in range(1000)]
    assert np.mean([bool(proven(ladder, "first")) for ladder in ladders]) < 0.07
    alone = [any(not r["ci95"][0] <= 1 <= r["ci95"][1] for r in ladder["rungs"][1:]) for ladder in ladders]  # type: ignore[index]
    assert np.mean(alone) > 0.3


def test_a_large_difference_is_proven_among_many_rungs() -> None:
    ladder = drawn_ladder(5, [0.0] * 8 + [-0.5] + [0.0] * 7, np.random.default_rng(2))
    assert proven(ladder, "first") == proven(ladder, "previous") == {"rung-8"}


def test_one_round_proves_nothing() -> None:
    ladder = drawn_ladder(2, [-0.5], np.random.default_rng(0))
    ladder["rounds"] = 1
    for rung in ladder["rungs"]:
        rung["ci95"] = rung["ci95_vs_previous"] = None
    assert proven(ladder, "first") == set()


def test_an_older_ladder_is_judged_anew(made: Path) -> None:
    """Whatever its file says of intervals: they follow from the raw times."""
    path = made / "ladder.json"
    written = json.loads(path.read_text())
    older = json.loads(path.read_text())
    for rung in older["rungs"]:
        rung |= {"ci95": [0.1, 10.0], "ci95_vs_previous": [0.1, 10.0]}
        del rung["spread"], rung["detectable"]
    path.write_text(json.dumps(older))
    assert ladder_spread_table(read_ladder(made)[0]) is None
    judged, members = read_judged_ladder(made)
    assert judged == written
    assert {name: len(runs) for name, runs in members.items()} == {"a": 4, "b": 4, "c": 4}


def test_intervals_of_rounds_that_ended_by_what_they_find_cover_95_percent() -> None:
    """Differences of logarithms that spread by 1.25 and 1.5 times what is to be found, the worst there is."""
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
