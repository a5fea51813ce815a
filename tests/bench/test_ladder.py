"""Ladders: their order, what they say of recorded runs, and damage. Real ones run in test_cli.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import ladder as module
from bench.ladder import LADDER_JSON as FILE
from bench.ladder import LADDERS, Rung, draw_order, ladder_called, ladder_table, read_ladder, run_ladder, torchrun
from launch.dlrm import parse
from tests.bench.records import recorded_runs, write

RUNGS = (Rung("a", ("--precision", "fp32")), Rung("b", ("--precision", "bf16")), Rung("c", ()))
SPEED = {"a": 1.0, "b": 0.5, "c": 0.5}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ladder of three rungs and four rounds, of recorded runs: b takes half of a's time, c as long as b."""
    runs = iter(recorded_runs())
    ended: list[str] = []

    def pretend(flags: list[str], processes: int, output: Path) -> None:
        run_id, folder = flags[flags.index("--run-id") + 1], Path(flags[flags.index("--results-dir") + 1])
        assert flags[:2] == ["--seed", "3"]
        assert processes == 2
        write(folder / run_id, next(runs) * SPEED[run_id[-1]], minute=len(ended))
        ended.append(run_id)

    monkeypatch.setattr(module, "torchrun", pretend)
    steps = run_ladder(RUNGS, folder=tmp_path, processes=2, rounds=4, seed=1, flags=["--seed", "3"], command="cmd")
    assert list(steps) == ended
    return tmp_path


def test_every_round_runs_every_rung_once_in_a_drawn_order() -> None:
    order = draw_order(RUNGS, 20, seed=0)
    rounds = [[rung.name for r, rung in order if r == round_number] for round_number in range(20)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 3
    assert [r for r, _ in order] == sorted(r for r, _ in order)
    assert order == draw_order(RUNGS, 20, seed=0) != draw_order(RUNGS, 20, seed=1)


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
        (float(np.median(run)), run_id) for run, run_id in zip(members["a"].series, a["records"], strict=True)
    )
    assert a["record"] == medians[2][1]
    assert len(ladder["order"]) == 12
    assert (ladder["rounds"], ladder["seed"], ladder["command"]) == (4, 1, "cmd")


def test_the_table_marks_what_is_not_proven(made: Path) -> None:
    ladder, _ = read_ladder(made)
    rows = list(zip(*(column.cells for column in ladder_table(ladder).columns), strict=True))
    assert rows[0][2:6] == ("", "", "", "")
    assert "~" not in str(rows[1][4])
    assert str(rows[2][4]).endswith("~")


def test_one_round_has_no_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(flags: list[str], processes: int, output: Path) -> None:
        write(tmp_path / flags[-1], recorded_runs()[0])

    monkeypatch.setattr(module, "torchrun", pretend)
    list(run_ladder(RUNGS[:2], folder=tmp_path, processes=2, rounds=1, seed=0, flags=[], command=""))
    ladder, _ = read_ladder(tmp_path)
    assert ladder["rungs"][1]["ci95"] is None
    assert "one round: unknown" in list(ladder_table(ladder).columns[3].cells)


@pytest.mark.parametrize("name", LADDERS)
def test_every_rung_is_a_valid_configuration(name: str) -> None:
    rungs = ladder_called(name)
    configs = [parse(["--preset", "launch-bound", *rung.flags]) for rung in rungs]
    assert len({rung.name for rung in rungs}) == len(rungs)
    assert len(set(configs)) == (1 if name == "same" else len(rungs))


def test_unknown_ladders() -> None:
    with pytest.raises(ValueError, match="--rungs 'fast' is unknown: choose one of stock"):
        ladder_called("fast")


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"failed with status \d+:\n(.|\n)*--local-batch-size"):
        torchrun(["--preset", "smoke", "--local-batch-size", "0"], 1, tmp_path / "log")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"ladder\.json is corrupt at line 1 column 2"),
        (b"\xff", "is corrupt at byte 0"),
        (b"[]", "is no ladder of schema 1"),
        (b'{"schema": 2}', "is no ladder of schema 1"),
        (b'{"schema": 1, "rungs": [{"name": "a"}]}', r"lacks id, .*rungs\.flags"),
    ],
)
def test_damaged_ladders_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=r"ladder\.json cannot be read"):
        read_ladder(tmp_path)
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_ladder(tmp_path)


def test_a_ladder_without_one_of_its_members(made: Path) -> None:
    ladder: dict[str, Any] = json.loads((made / FILE).read_text())
    ladder["rungs"][1]["records"][0] = "gone"
    (made / FILE).write_text(json.dumps(ladder))
    with pytest.raises(ValueError, match=r"gone/run\.json is missing"):
        read_ladder(made)
