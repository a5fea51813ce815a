"""What a ladder of recorded runs says of its rungs, and its tables."""

from pathlib import Path

import numpy as np
import pytest

from dlrm_bench.bench.analysis.ladder import ladder_table
from dlrm_bench.bench.records.ladder import read_ladder
from tests.bench.ladder.made_ladders import made as made
from tests.bench.ladder.made_ladders import make, pretend_runs


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
    assert rows[0][3:7] == ("", "", "", "")
    assert "~" not in str(rows[1][5])
    assert str(rows[2][5]).endswith("~")


def test_one_round_has_no_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_runs(monkeypatch)
    make(tmp_path, rounds=1)
    ladder, _ = read_ladder(tmp_path)
    assert ladder["rungs"][1]["ci95"] is None
    assert "one round: unknown" in list(ladder_table(ladder).columns[4].cells)
