"""Ladders: their order, the remains of a run that fails, and the profiled runs. Real ones run in test_cli.py."""

import re
import resource
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.ladder import launching
from dlrm_bench.bench.ladder import run_ladder as module
from dlrm_bench.bench.ladder.analysis import ladder_host_table, ladder_table
from dlrm_bench.bench.ladder.run_ladder import plan_to_resume, run_ladder
from dlrm_bench.bench.ladder.verdict import verdict
from dlrm_bench.bench.machine.source import git_state
from dlrm_bench.bench.records.ladder import Ladder, read_ladder, read_plan
from dlrm_bench.dlrm.runtime.command_line import FailedError
from tests.bench.ladder.made_ladders import SPEED, make, plan, pretend_runs
from tests.bench.ladder.made_ladders import made as made
from tests.bench.made_records import recorded_runs, write


def cells(ladder: Ladder, columns: slice) -> list[tuple[str, ...]]:
    table = ladder_host_table(ladder)
    assert table is not None
    return [tuple(map(str, row))[columns] for row in zip(*(column.cells for column in table.columns), strict=True)]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a program that ladders take for this one; the ladder is in tmp_path / "ladder"."""
    file = tmp_path / "program" / "bench" / "clock.py"
    file.parent.mkdir(parents=True)
    file.write_text("old")
    (tmp_path / "ladder").mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path / "program")
    return file


def replace_forks(monkeypatch: pytest.MonkeyPatch, program: Path, run: Callable[[str], None]) -> None:
    """Replaces what run_forked starts by run(id of the run), and its server by one that the first run starts."""
    monkeypatch.setattr(launching, "ROOT", program.parents[1])
    monkeypatch.setattr(launching.forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(launching, "_await_server", lambda: None)
    monkeypatch.setattr(launching, "elastic_launch", lambda *_: lambda launcher, flags, output: run(flags[-1]))
    monkeypatch.setattr(launching, "_source_of_server", cache(launching._source_of_server.__wrapped__))


def test_no_run_follows_a_change_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Path) -> None:
    """It would run the old program, and be recorded as a run of the new one."""
    ladder, ran = tmp_path / "ladder", list[str]()

    def run(run_id: str) -> None:
        ran.append(run_id)
        write(ladder / run_id, recorded_runs()[len(ran)], minute=len(ran), git=git_state(program.parents[1]))
        if len(ran) == 4:
            program.write_text("new")

    replace_forks(monkeypatch, program, run)
    with pytest.raises(ValueError, match=r"program files in .*program have changed since this command started") as why:
        make(ladder)
    assert len(ran) == 4
    assert why.value.__notes__[0].startswith(f"finished runs, kept in {ladder}: {', '.join(ran)}; resume with")
    with pytest.raises(ValueError, match="was started from other source code"):
        plan_to_resume(ladder)
    program.write_text("old")
    assert len(list(run_ladder(plan_to_resume(ladder), ladder))) == len(ran) == 12
    assert len(set(ran)) == 12


def test_a_change_of_the_program_before_the_profiled_runs_is_named_in_their_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Path
) -> None:
    ladder = tmp_path / "ladder"

    def run(run_id: str) -> None:
        write(ladder / run_id, recorded_runs()[0], git=git_state(program.parents[1]))
        if len(list(ladder.glob("*/run.json"))) == 3:
            program.write_text("new")

    replace_forks(monkeypatch, program, run)
    make(ladder, rounds=1, host=True)
    assert [rung["host"] for rung in read_ladder(ladder)[0]["rungs"]] == [None] * 3
    assert "have changed since this command started" in (ladder / "host-b.log").read_text()


def test_runs_of_other_programs_are_no_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Path) -> None:
    """A command of --launch starts what is there."""
    ladder, ran = tmp_path / "ladder", list[str]()

    def run_by(command: list[str], flags: list[str], output: Path) -> None:
        ran.append(flags[-1])
        if len(ran) == 3:
            program.write_text("new")
        write(ladder / flags[-1], recorded_runs()[0], git=git_state(program.parents[1]))

    monkeypatch.setattr(module, "run_by", run_by)
    with pytest.raises(ValueError, match="was made by other program files than this ladder") as why:
        list(run_ladder(plan(2, launch=["train.sbatch"]), ladder))
    assert str(why.value).startswith(str(ladder / ran[2]))
    assert ran[1] in why.value.__notes__[0]
    assert ran[2] not in why.value.__notes__[0]
    program.write_text("old")
    with pytest.raises(ValueError, match=f"move {ran[2]} out of .* and resume"):
        list(run_ladder(plan_to_resume(ladder), ladder))
    assert len(ran) == 3
    (ladder / ran[2]).rename(tmp_path / "other")
    assert len(list(run_ladder(plan_to_resume(ladder), ladder))) == 6
    assert ran[3] == ran[2]


def test_a_commit_of_texts_alone_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tmp_path, spread=0.01, fails_at=1)
    begun = plan()
    begun["source"] |= {"commit": "0123abc", "dirty": False}
    with pytest.raises(FailedError):
        list(run_ladder(begun, tmp_path))
    assert plan_to_resume(tmp_path) == begun


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
        write(tmp_path / flags[-1], next(runs), minute=len(begun), git=git_state(ROOT))

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
        write(folder / run_id, level * random.gamma(1e4, 1e-4, 60), minute=len(ran), git=git_state(ROOT))

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
    pretend_runs(monkeypatch, git=git_state(ROOT))
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
