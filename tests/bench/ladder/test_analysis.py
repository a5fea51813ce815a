"""The results of recorded runs for the rungs of a ladder, and its tables."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.compare.comparison import compare_paths
from dlrm_bench.bench.ladder.analysis import (
    ladder_clock_table,
    ladder_spread_table,
    ladder_table,
    lucky,
    proven,
    read_judged_ladder,
)
from dlrm_bench.bench.records.ladder import read_ladder
from dlrm_bench.bench.stats.repetitions import finds_from
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


def test_the_clock_stands_beside_the_median(made: Path) -> None:
    ladder, _ = read_judged_ladder(made)
    rows = list(zip(*(column.cells for column in ladder_clock_table(ladder).columns), strict=True))
    assert [row[0] for row in rows] == ["a", "b", "c"]
    for row, rung in zip(rows, ladder["rungs"], strict=True):
        assert row[2:4] == (f"{rung['median_ms']:.3f}", f"{rung['by_clock_ms']:.3f}")
        assert float(row[1]) == pytest.approx(rung["timed_s"], abs=0.1)
        assert row[4:] == ("500", "1980")


def test_the_table_marks_what_is_not_proven(made: Path) -> None:
    ladder, _ = read_ladder(made)
    rows = list(zip(*(column.cells for column in ladder_table(ladder).columns), strict=True))
    assert rows[0][3:8] == ("", "", "", "", "")
    assert "~" not in str(rows[1][6])
    assert str(rows[2][6]).endswith("~")
    low, high = ladder["rungs"][1]["detectable_interval"] or (0.0, 0.0)
    assert str(rows[1][5]) == finds_from((low, ladder["rungs"][1]["detectable"] or 0.0, high))
    spread = ladder_spread_table(ladder)
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
    assert proven(ladder, "first") == proven(ladder, "previous") == set()
    judged = ladder["rungs"][1]["over_first"]
    assert judged is not None
    assert (judged["error"], judged["p_value"], judged["proven"]) == (None, None, False)


def test_ratios_and_intervals_are_rendered_from_the_estimates(made: Path) -> None:
    """ladder.json keeps logarithm, standard error and degrees of freedom; nothing is to be recovered from intervals."""
    for rung in read_ladder(made)[0]["rungs"][1:]:
        for judged, speedup, interval in (
            (rung["over_first"], rung["speedup_vs_first"], rung["ci95"]),
            (rung["over_previous"], rung["speedup_vs_previous"], rung["ci95_vs_previous"]),
        ):
            assert judged is not None
            assert interval is not None
            half = stats.t.ppf(0.975, judged["freedom"]) * judged["error"]
            expected = np.exp([-judged["log"], -judged["log"] - half, -judged["log"] + half])
            assert [speedup, *interval] == pytest.approx(list(expected))


def test_a_ladder_and_compare_say_the_same_of_two_rungs(made: Path) -> None:
    """For rungs whose runs are pairs in time, without a drift to remove: the same ratio either way round."""
    ladder = read_ladder(made)[0]
    (result,) = compare_paths([made / "a", made / "b"])
    assert result.speedup.value == pytest.approx(ladder["rungs"][1]["speedup_vs_first"], rel=0.05)
    assert result.verdict == "faster"
    assert "b" in proven(ladder, "first")


def test_an_older_ladder_is_judged_anew(made: Path) -> None:
    """Whatever its file says of intervals: they follow from the raw times."""
    path = made / "ladder.json"
    written = json.loads(path.read_text())
    older = json.loads(path.read_text())
    for rung in older["rungs"]:
        rung |= {"ci95": [0.1, 10.0], "ci95_vs_previous": [0.1, 10.0]}
        for field in ("spread", "detectable", "detectable_interval", "over_first", "over_previous", "agrees_by_luck"):
            del rung[field]
    path.write_text(json.dumps(older))
    judged, members = read_judged_ladder(made)
    assert judged == written
    assert {name: len(runs) for name, runs in members.items()} == {"a": 4, "b": 4, "c": 4}
