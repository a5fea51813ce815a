"""Ladders: their order, the remains of a run that fails, and the profiled runs. Real ones run in test_cli.py."""

import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench.ladder import run_ladder as module
from dlrm_bench.bench.ladder.analysis import ladder_host_table, ladder_table
from dlrm_bench.bench.ladder.run_ladder import plan_to_resume, run_ladder
from dlrm_bench.bench.ladder.verdict import verdict
from dlrm_bench.bench.records.ladder import Ladder, read_ladder, read_plan
from dlrm_bench.dlrm.runtime.command_line import FailedError
from tests.bench.ladder.made_ladders import SPEED, make, plan, pretend_runs
from tests.bench.ladder.made_ladders import made as made
from tests.bench.made_records import recorded_runs, write


def cells(ladder: Ladder, columns: slice) -> list[tuple[str, ...]]:
    table = ladder_host_table(ladder)
    assert table is not None
    return [tuple(map(str, row))[columns] for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_every_round_runs_every_rung_once_and_every_second_one_backwards(made: Path) -> None:
    order = read_ladder(made)[0]["order"]
    rounds = [[run_id.partition("-") for run_id in order[i : i + 3]] for i in range(0, 12, 3)]
    assert [[number for number, _, _ in ids] for ids in rounds] == [[f"{i:02d}"] * 3 for i in range(4)]
    names = [[name for _, _, name in ids] for ids in rounds]
    assert all(sorted(each) == ["a", "b", "c"] for each in names)
    assert (names[1], names[3]) == (names[0][::-1], names[2][::-1])


def test_a_command_starts_the_runs_in_place_of_ranks_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(recorded_runs())
    begun: list[tuple[str, ...]] = []

    def pretend(command: list[str], flags: list[str], output: Path) -> None:
        begun.append((*command, output.name))
        assert flags[-4:-1] == ["--results-dir", str(tmp_path), "--run-id"]
        write(tmp_path / flags[-1], next(runs), minute=len(begun))

    monkeypatch.setattr(module, "run_by", pretend)
    ended = list(run_ladder(plan(2, launch=["train.sbatch", "here"]), tmp_path))
    assert begun == [("train.sbatch", "here", f"{run_id}.log") for run_id in ended]
    assert read_plan(tmp_path).get("launch") == ["train.sbatch", "here"]


def test_profiled_runs_follow_all_that_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_profiled_run_that_fails_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_runs(monkeypatch, failing_profiles="b")
    make(tmp_path, rounds=2, host=True)
    ladder, members = read_ladder(tmp_path)
    assert len(members["b"]) == 2
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
    kept = f"finished runs, kept in {tmp_path}: {ran[0]}, {ran[1]}"
    assert caught.value.__notes__ == [f"{kept}; resume with dlrm-bench ladder --resume {tmp_path}"]


@pytest.mark.parametrize("ending", [FailedError("dead"), KeyboardInterrupt(), SystemExit(143)])
def test_what_ends_a_ladder_names_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException
) -> None:
    def pretend(flags: list[str], *_: Any) -> None:
        if any(tmp_path.glob("0*")):
            raise ending
        write(tmp_path / flags[flags.index("--run-id") + 1], recorded_runs()[0])

    monkeypatch.setattr(module, "run_forked", pretend)
    with pytest.raises(type(ending)):
        make(tmp_path)
    (kept,) = tmp_path.glob("0*")
    assert ending.__notes__[0].startswith(f"finished runs, kept in {tmp_path}: {kept.name}; resume with")


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, spread: float, fails_at: int | None = None) -> list[str]:
    """Runs of 60 iterations whose medians spread by `spread`; the one of this number leaves an unfinished folder."""
    random = np.random.default_rng(0)
    ran: list[str] = []

    def run(flags: list[str], *_: Any) -> None:
        run_id = flags[flags.index("--run-id") + 1]
        ran.append(run_id)
        if len(ran) - 1 == fails_at:
            (folder / run_id).mkdir()
            raise FailedError("the node went down")
        level = SPEED[run_id[-1]] * np.exp(random.normal(0, spread))
        write(folder / run_id, level * random.gamma(1e4, 1e-4, 60), minute=len(ran))

    monkeypatch.setattr(module, "run_forked", run)
    return ran


def test_rounds_go_on_until_they_find_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tmp_path, spread=0.01)
    said: list[str] = []
    runs = list(run_ladder(plan(rounds=40, detect=0.03), tmp_path, said.append))
    ladder, _ = read_ladder(tmp_path)
    assert 6 <= ladder["rounds"] < 20
    assert ladder["rounds"] % 2 == 0
    assert len(runs) == 3 * ladder["rounds"] == len(ladder["order"])
    assert ladder.get("detect") == 0.03
    assert said[0].startswith("2 rounds find factors from ")
    assert re.fullmatch(r"4 rounds find differences from \d+\.\d\d% \(.*\)(; 3\.00% takes about \d+)?", said[2])
    assert re.fullmatch(rf"{ladder['rounds']} rounds find differences from [0-2]\.\d\d% \(.*\)", said[-1])
    assert all((rung["detectable"] or 1) <= 0.03 for rung in ladder["rungs"][1:])
    assert "97 % interval" in [column.header for column in ladder_table(ladder).columns]


def test_rounds_end_where_the_limits_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    pretend(monkeypatch, tmp_path / "a", spread=0.1)
    assert len(list(run_ladder(plan(rounds=7, detect=0.001), tmp_path / "a"))) == 21
    pretend(monkeypatch, tmp_path / "b", spread=0.1)
    said: list[str] = []
    assert len(list(run_ladder(plan(rounds=7, minutes=1e-6), tmp_path / "b", said.append))) == 3
    assert said == ["another round would end after --max-minutes 1e-06: the ladder ends with 1 rounds"]


def test_a_resumed_ladder_has_its_minutes_for_its_own_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes a minute. The first command ends within the third round; the other one makes as many rounds as fit
    into its 11 minutes: the rounds that were there take none of them, and say nothing of how long a round takes."""
    pretend(monkeypatch, tmp_path, spread=0.01, fails_at=6)
    with pytest.raises(FailedError):
        list(run_ladder(plan(rounds=9, minutes=11), tmp_path))
    again = pretend(monkeypatch, tmp_path, spread=0.01)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 60 * len(again)))
    list(run_ladder(plan_to_resume(tmp_path), tmp_path))
    assert len(again) == 9
    assert read_ladder(tmp_path)[0]["rounds"] == 5


def test_a_folder_has_one_ladder_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_runs(monkeypatch)
    running = run_ladder(plan(), tmp_path)
    done = [next(running)]
    (tmp_path / "01-a").mkdir()  # that of a run which has begun
    with pytest.raises(ValueError, match=f"{tmp_path}: another command runs this ladder: wait for its end"):
        list(run_ladder(plan_to_resume(tmp_path), tmp_path))
    assert not list(tmp_path.glob("*.unfinished-*"))
    (tmp_path / "01-a").rmdir()
    done += running
    assert read_ladder(tmp_path)[0]["order"] == done


def test_rounds_that_agree_to_the_last_digit_find_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(flags: list[str], *_: Any) -> None:
        run_id = flags[flags.index("--run-id") + 1]
        write(tmp_path / run_id, np.full(60, 10.0 * SPEED[run_id[-1]]), minute=len(list(tmp_path.glob("0*/run.json"))))

    monkeypatch.setattr(module, "run_forked", run)
    said: list[str] = []
    assert len(list(run_ladder(plan(rounds=8, detect=0.03), tmp_path, said.append))) == 24
    assert said[-1] == "8 rounds find no factor below 100; 3.00% takes too many"
    ladder, _ = read_ladder(tmp_path)
    assert [rung["detectable"] for rung in ladder["rungs"]] == [None] * 3
    assert "b: no difference proven, 2.00 times as fast as a in 8 rounds" in " ".join(verdict(tmp_path))
    assert "2.000 x ~" in ladder_table(ladder).columns[3].cells
    assert "find differences from 0.00%" not in " ".join(verdict(tmp_path))


def test_an_interrupted_ladder_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = pretend(monkeypatch, tmp_path, spread=0.01, fails_at=7)
    with pytest.raises(FailedError):
        list(run_ladder(plan(), tmp_path))
    with pytest.raises(ValueError, match="finish it with dlrm-bench ladder --resume"):
        read_ladder(tmp_path)
    again = pretend(monkeypatch, tmp_path, spread=0.01)
    resumed = plan_to_resume(tmp_path)
    assert resumed == plan()
    runs = list(run_ladder(resumed, tmp_path))
    assert again == runs[7:]
    assert again[0] == ran[7]
    assert (tmp_path / f"{ran[7]}.unfinished-1").is_dir()
    assert read_ladder(tmp_path)[0]["order"] == runs
    with pytest.raises(ValueError, match="is a finished ladder"):
        plan_to_resume(tmp_path)


def test_a_ladder_without_all_its_profiled_runs_makes_these_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a limit had ended the rounds: no round is added."""
    pretend_runs(monkeypatch)
    whole, ended = module.run_forked, []

    def interrupted(flags: list[str], *others: Any) -> None:
        if flags[-1] == "host-b":
            (tmp_path / "host-b").mkdir()
            raise KeyboardInterrupt
        whole(flags, *others)

    monkeypatch.setattr(module, "run_forked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ended += list(run_ladder(plan(4, minutes=1e-6, host=True), tmp_path))
    before, _ = read_ladder(tmp_path)
    assert [rung["host"] is None for rung in before["rungs"]] == [False, True, True]
    again = pretend_runs(monkeypatch)
    ended += run_ladder(plan_to_resume(tmp_path), tmp_path)
    assert again == ["host-b", "host-c"]
    assert ended == [*before["order"], "host-a", "host-b", "host-c"]
    after, _ = read_ladder(tmp_path)
    assert after["order"] == before["order"]
    assert all(rung["host"] for rung in after["rungs"])
    assert [{**rung, "host": None} for rung in after["rungs"]] == [{**rung, "host": None} for rung in before["rungs"]]
    with pytest.raises(ValueError, match="is a finished ladder"):
        plan_to_resume(tmp_path)


def test_a_full_disk_at_the_end_of_a_ladder_leaves_one_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_runs(monkeypatch)
    running = run_ladder(plan(), tmp_path)
    done = [next(running) for _ in range(12)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            next(running, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert pretend_runs(monkeypatch) == []
    assert list(run_ladder(plan_to_resume(tmp_path), tmp_path)) == done
    assert read_ladder(tmp_path)[0]["order"] == done


@pytest.mark.parametrize(("field", "value"), [("node", "another"), ("source", {"commit": "0123"})])
def test_a_ladder_is_not_resumed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    pretend(monkeypatch, tmp_path, spread=0.01, fails_at=1)
    begun: Any = {**plan(), field: value}
    with pytest.raises(FailedError):
        list(run_ladder(begun, tmp_path))
    with pytest.raises(ValueError, match="was started "):
        plan_to_resume(tmp_path)
    with pytest.raises(ValueError, match=r"plan\.json cannot be read"):
        plan_to_resume(tmp_path / "absent")
