"""Ladders: their order, what they say of recorded runs, and damage. Real ones run in test_cli.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench.analysis.ladder import LADDER_JSON as FILE
from dlrm_bench.bench.analysis.ladder import Ladder, ladder_host_table, ladder_table, read_ladder
from dlrm_bench.bench.ladder import run_ladder as module
from dlrm_bench.bench.ladder.launching import LAUNCHER, MEASURE
from dlrm_bench.bench.ladder.run_ladder import draw_order, run_ladder
from dlrm_bench.bench.ladder.rungs import Rung
from dlrm_bench.dlrm.command_line import FailedError
from tests.bench.made_records import instruments, recorded_runs, write

RUNGS = (Rung("a", ("--precision", "fp32"), "Nothing."), Rung("b", ("--precision", "bf16")), Rung("c", ()))
SPEED = {"a": 1.0, "b": 0.5, "c": 0.5}


def pretend_runs(monkeypatch: pytest.MonkeyPatch, failing_twins: str = "") -> list[str]:
    """Instead of real runs: records of recorded runs, and of twins; the list of ids of what ran, in order."""
    runs = iter(recorded_runs())
    ended: list[str] = []

    def pretend(flags: list[str], processes: int, output: Path, launcher: Path = LAUNCHER) -> None:
        run_id, folder = flags[flags.index("--run-id") + 1], Path(flags[flags.index("--results-dir") + 1])
        assert (launcher, flags[0] == "host") == ((MEASURE, True) if run_id.startswith("host-") else (LAUNCHER, False))
        if run_id.startswith("host-"):
            assert "--seed" in flags[1:]
            ended.append(run_id)
            if run_id[-1] in failing_twins:
                raise ValueError("out of memory")
            write(folder / run_id, recorded_runs()[0], instruments=instruments())
            return
        assert flags[:2] == ["--seed", "3"]
        assert processes == 2
        write(folder / run_id, next(runs) * SPEED[run_id[-1]], minute=len(ended))
        ended.append(run_id)

    monkeypatch.setattr(module, "run_forked", pretend)
    return ended


def make(folder: Path, rounds: int = 4, host: bool = False) -> list[str]:
    flags = ["--seed", "3"]
    runs = run_ladder(RUNGS, folder=folder, processes=2, rounds=rounds, seed=1, flags=flags, command="cmd", host=host)
    return list(runs)


def cells(ladder: Ladder, columns: slice) -> list[tuple[str, ...]]:
    table = ladder_host_table(ladder)
    assert table is not None
    return [tuple(map(str, row))[columns] for row in zip(*(column.cells for column in table.columns), strict=True)]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ladder of three rungs and four rounds, of recorded runs: b takes half of a's time, c as long as b."""
    ended = pretend_runs(monkeypatch)
    assert make(tmp_path) == ended
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
    assert rows[0][3:7] == ("", "", "", "")
    assert "~" not in str(rows[1][5])
    assert str(rows[2][5]).endswith("~")


def test_one_round_has_no_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_runs(monkeypatch)
    make(tmp_path, rounds=1)
    ladder, _ = read_ladder(tmp_path)
    assert ladder["rungs"][1]["ci95"] is None
    assert "one round: unknown" in list(ladder_table(ladder).columns[4].cells)


def test_twins_follow_all_that_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = pretend_runs(monkeypatch)
    assert make(tmp_path, rounds=2, host=True) == ended
    assert ended[6:] == ["host-a", "host-b", "host-c"]
    assert not any(run_id.startswith("host") for run_id in ended[:6])
    ladder, _ = read_ladder(tmp_path)
    assert ladder["order"] == ended[:6]
    assert ladder["rungs"][1]["host"] == {
        "record": "host-b",
        "cpu_ms": 12,
        "wall_ms": 12,
        "kernel_launches": 12,
        "graph_launches": 12,
        "stream_syncs": 12,
        "d2h_copies": 12,
        "gpu_idle_fraction": 0.875,
    }
    assert [rung["note"] for rung in ladder["rungs"]] == ["Nothing.", "", ""]
    assert cells(ladder, slice(7))[0] == ("a", "12.000", "12", "12", "12", "12", "88%")


def test_a_twin_that_fails_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_runs(monkeypatch, failing_twins="b")
    make(tmp_path, rounds=2, host=True)
    ladder, members = read_ladder(tmp_path)
    assert len(members["b"].series) == 2
    assert ladder["rungs"][1]["host"] is None
    assert cells(ladder, slice(1, 7)) == [
        *cells(ladder, slice(1, 7))[:1],
        ("missing",) * 6,
        *cells(ladder, slice(1, 7))[2:],
    ]
    assert "missing" not in cells(ladder, slice(1, 7))[2]


def test_a_member_that_ends_within_its_warm_up_ends_the_ladder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def pretend(flags: list[str], *_: Any) -> None:
        run_id = flags[flags.index("--run-id") + 1]
        ran.append(run_id)
        write(tmp_path / run_id, recorded_runs()[0] if len(ran) < 3 else np.empty(0))

    monkeypatch.setattr(module, "run_forked", pretend)
    with pytest.raises(
        ValueError, match=r"after 10 iterations, within its warm-up: lower --warmup-iterations"
    ) as caught:
        make(tmp_path)
    assert len(ran) == 3
    assert str(caught.value).startswith(str(tmp_path / ran[2]))
    assert caught.value.__notes__ == [f"finished before, and kept in {tmp_path}: {ran[0]}, {ran[1]}"]


@pytest.mark.parametrize("ending", [FailedError("dead"), KeyboardInterrupt(), SystemExit(143)])
def test_what_ends_a_ladder_names_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException
) -> None:
    def pretend(flags: list[str], *_: Any) -> None:
        if any(tmp_path.iterdir()):
            raise ending
        write(tmp_path / flags[flags.index("--run-id") + 1], recorded_runs()[0])

    monkeypatch.setattr(module, "run_forked", pretend)
    with pytest.raises(type(ending)):
        make(tmp_path)
    (kept,) = tmp_path.iterdir()
    assert ending.__notes__ == [f"finished before, and kept in {tmp_path}: {kept.name}"]


def test_a_ladder_from_before_twins_is_read(made: Path) -> None:
    ladder: dict[str, Any] = json.loads((made / FILE).read_text())
    p99 = [rung.pop("p99_ms") for rung in ladder["rungs"]]
    for rung in ladder["rungs"]:
        del rung["note"], rung["host"]
    (made / FILE).write_text(json.dumps(ladder))
    read, _ = read_ladder(made)
    assert [rung["p99_ms"] for rung in read["rungs"]] == p99
    assert ladder_host_table(read) is None


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
