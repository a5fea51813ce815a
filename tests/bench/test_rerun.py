"""Refusals and messages of a rerun; a committed record and its rerun show that it runs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench import ROOT, rerun
from dlrm_bench.bench.cli import main
from dlrm_bench.bench.compare.repeat import repeating_flags
from dlrm_bench.bench.machine.source import git, source_hash, source_of_commit
from dlrm_bench.bench.records.json_file import read_json
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.rerun import Rerun
from tests.bench.ladder.made_ladders import make, pretend_runs
from tests.bench.made_records import configured, edit, recorded_runs, write
from tests.launched import wait_until

RUNS = recorded_runs()
IN_A_CHECKOUT = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")


def made(folder: Path, **git_state: Any) -> Path:
    return write(folder, RUNS[0], git={"commit": None, "dirty": None, **git_state}, config=configured(seed=7))


@IN_A_CHECKOUT
@pytest.mark.parametrize(
    ("state", "says"),
    [
        (
            {},
            "without its commit, but .* has other source code than made it: install or check out the version that did",
        ),
        ({"source": "789abc"}, "without its commit"),
        ({"commit": "0123abc" * 5, "dirty": False}, "is not in .*: fetch it"),
        ({"commit": "--batch", "dirty": False}, "git.commit is '--batch', which names no commit"),
    ],
)
def test_what_cannot_be_had_again(tmp_path: Path, state: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rerun.rerun(made(tmp_path / "record", **state), 1, None, tmp_path)


@IN_A_CHECKOUT
def test_without_git_nothing_is_to_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = made(tmp_path / "record", commit="0123abc" * 5, dirty=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="is no checkout that git can read"):
        rerun.rerun(record, 1, None, tmp_path)


def test_no_processes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rerun", str(made(tmp_path / "record")), "--nproc", "0"]) == 2
    assert "--nproc is 0: at least one process is needed" in capsys.readouterr().err


@IN_A_CHECKOUT
def test_the_commits_own_code_runs_its_own_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to torchrun, which sees worktree, flags and environment; all are gone afterwards."""
    monkeypatch.setenv("SOURCE_COMMIT", "0123abc")
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    commit = git(ROOT, "rev-parse", "HEAD")
    assert commit is not None
    seen: list[Path] = []

    def torchrun(flags: list[str], processes: int, output: Path, launcher: Path) -> None:
        tree = launcher.parents[1]
        assert git(tree, "rev-parse", "HEAD") == commit
        assert os.environ["PYTHONPATH"] == f"{tree}{os.pathsep}/theirs"
        assert "SOURCE_COMMIT" not in os.environ
        assert "--seed=7" in flags or flags[flags.index("--seed") + 1] == "7"  # HEAD's way, whichever it is
        assert processes == 2
        seen.append(tree)

    monkeypatch.setattr(rerun, "torchrun", torchrun)
    record = made(tmp_path / "record", commit=commit, dirty=False, source=source_of_commit(ROOT, commit))
    done = rerun.rerun(record, 2, None, tmp_path / "again")
    assert (len(seen), done.notes) == (2, [])
    assert not seen[0].exists()
    assert str(seen[0]) not in (git(ROOT, "worktree", "list") or "")
    assert (os.environ["SOURCE_COMMIT"], os.environ["PYTHONPATH"]) == ("0123abc", "/theirs")


def test_a_copy_without_git_reruns_what_it_made_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records alone: their hash is that of its files, and the commit that they name goes on with them."""
    (tmp_path / "copy").mkdir()
    for name in ("bench", "dlrm", "kernels", "launch", "pipeline"):
        (tmp_path / "copy" / name).symlink_to(ROOT / name)
    (tmp_path / "copy" / "dlrm_bench").symlink_to(ROOT / "dlrm_bench")
    monkeypatch.setattr(rerun, "ROOT", tmp_path / "copy")
    monkeypatch.setenv("SOURCE_COMMIT", "456def")
    started: list[tuple[Path, str | None]] = []

    def torchrun(flags: list[str], processes: int, output: Path, launcher: Path) -> None:
        started.append((launcher, os.environ.get("SOURCE_COMMIT")))

    monkeypatch.setattr(rerun, "torchrun", torchrun)
    own = made(tmp_path / "own", commit="0123abc", source=source_hash(tmp_path / "copy"))
    assert rerun.rerun(own, 1, None, tmp_path / "again").notes == []
    assert started == [(tmp_path / "copy" / "launch" / "dlrm.py", "0123abc")]
    assert os.environ["SOURCE_COMMIT"] == "456def"
    for i, source in enumerate((None, "789abc")):
        other = made(tmp_path / f"other-{i}", commit="0123abc", source=source)
        with pytest.raises(
            ValueError, match=r"is of commit 0123abc, but .* has other source code than made it: run it"
        ):
            rerun.rerun(other, 1, None, tmp_path / "again")
    started.clear()
    unnamed = made(tmp_path / "installed", source=source_hash(tmp_path / "copy"))  # as an installed package makes them
    assert rerun.rerun(unnamed, 1, None, tmp_path / "again-2").notes == []
    assert started == [(tmp_path / "copy" / "launch" / "dlrm.py", None)]


@IN_A_CHECKOUT
def test_a_checkout_reruns_what_an_installed_package_of_the_same_files_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(rerun, "torchrun", lambda flags, processes, output, launcher: started.append(launcher))
    assert rerun.rerun(made(tmp_path / "installed", source=source_hash(ROOT)), 1, None, tmp_path / "again").notes == []
    assert started == [ROOT / "launch" / "dlrm.py"]


@IN_A_CHECKOUT
@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"dirty": None, "source": "456def"}, "is not that of its commit"),
        ({"dirty": None}, "may have been changed"),
        ({"dirty": True}, "was changed"),
        ({"dirty": False}, None),
    ],
)
def test_doubts_about_the_source(tmp_path: Path, state: dict[str, Any], says: str | None) -> None:
    record = rerun.read_record(made(tmp_path / "record", commit=git(ROOT, "rev-parse", "HEAD"), **state))
    notes = rerun._program_of(record).notes
    assert [says in note for note in notes] == [True] if says else notes == []


@IN_A_CHECKOUT
def test_a_killed_rerun_leaves_no_worktree(tmp_path: Path) -> None:
    """Nor its torchrun: both are waited for, while the rerun itself gets SIGKILL."""
    commit = git(ROOT, "rev-parse", "HEAD")
    assert commit is not None
    record = made(tmp_path / "record", commit=commit, dirty=False, source=source_of_commit(ROOT, commit))
    told, temporary = tmp_path / "told", tmp_path / "temporary"
    temporary.mkdir()
    # A launcher that only sleeps takes torchrun's place, in a process of its own.
    program = f"""
import sys
from pathlib import Path
from dlrm_bench.bench import rerun
from dlrm_bench.bench.ladder.launching import run_by
sleeps = [sys.executable, "-c", "import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); "
          "time.sleep(600)"]
rerun.torchrun = lambda flags, processes, output, launcher: run_by(sleeps, [], output)
rerun.rerun(Path({str(record)!r}), 1, None, Path({str(tmp_path / "again")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"TMPDIR": str(temporary)})
    try:
        wait_until(lambda: told.exists() and told.read_text() != "", "the run is started")
        (folder,) = temporary.glob("dlrm-bench-rerun-*")
        assert str(folder) in (git(ROOT, "worktree", "list") or "")
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not folder.exists(), "the worktree is removed")
    assert str(folder) not in (git(ROOT, "worktree", "list") or "")
    wait_until(lambda: not Path(f"/proc/{told.read_text()}").exists(), "what it started has ended")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model/bottom_mlp": ["32", "16", "--resume", "/planted"]}, r"config.model.bottom_mlp is .*a whole number"),
        ({"model/bottom_mlp": "512 256 128"}, r"config.model.bottom_mlp is .*a list"),
        ({"checkpoint.path": "/etc"}, r"config.'checkpoint.path' is not a field"),
        ({"mlperf/org": "--resume=/planted"}, r"config.mlperf.org is '--resume=/planted', expected a text"),
        ({"mlperf": {"org": "x", "--resume": "y"}}, r"config.mlperf.'--resume' is not a field"),
        ({"pipeline/cuda_graph": "--x"}, r"config.pipeline.'cuda_graph' is not a field"),
        ({"pipeline/row_wise": 1}, r"config.pipeline.row_wise is 1, expected true or false"),
        ({"seed": True}, r"config.seed is True, expected a whole number"),
        ({"precision": "fp4"}, r"config.precision is 'fp4', expected one of"),
        ({"optimizer/learning_rate": "1"}, r"config.optimizer.learning_rate is '1', expected a finite number"),
        ({"world_size": 2.0}, r"config.world_size is 2.0, expected a whole number"),
        ({"global_batch_size": 0}, r"config.global_batch_size is 0, expected a positive number"),
        ({"preset": None}, r"config.preset is None, expected a text"),
        ({"pipeline": None}, r"config.pipeline is None, expected an object with a name"),
        ({"pipeline": {}}, r"config.pipeline is \{\}, expected an object with a name"),
        ({"data": []}, r"config.data is \[\], expected an object"),
    ],
)
def test_a_record_does_not_steer_the_program_that_reruns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    """No process is started, neither with today's code nor with that of the record's commit."""
    record = made(tmp_path / "record", commit=git(ROOT, "rev-parse", "HEAD"))
    config = read_json(record / "run.json")["config"]
    for name, value in changes.items():
        block, slash, field = name.rpartition("/")
        if slash:
            config[block][field] = value
        else:
            config[name] = value
    edit(record, config=config)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process is started"))
    for use in (lambda: rerun.rerun(record, 1, None, tmp_path), lambda: repeating_flags(read_record(record))):
        with pytest.raises(ValueError, match=f"run.json.*{says}"):
            use()


def test_the_command_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = made(tmp_path / "record", commit="0123abc", dirty=False)
    for i in range(2):
        write(tmp_path / "again" / str(i), RUNS[i + 1], config=configured(seed=7))
    monkeypatch.setattr(rerun, "rerun", lambda *_: Rerun(tmp_path / "again", ["a doubt"]))
    assert main(["rerun", str(record)]) == 0
    said = capsys.readouterr().out
    assert "95 % interval" in said
    assert "warning: a doubt" in said
    assert "1 and 2. One run per side" in said
    assert main(["rerun", str(record), "--rounds", "0"]) == 2


def test_a_rung_is_compared_with_all_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_runs(monkeypatch)
    make(tmp_path)
    repeated: list[Path] = []

    def pretend(path: Path, *_: Any) -> Rerun:
        repeated.append(path)
        return Rerun(tmp_path / "00-c", [])

    monkeypatch.setattr(rerun, "rerun", pretend)
    assert main(["rerun", str(tmp_path / "b")]) == 0
    assert repeated == [tmp_path / "00-b"]
    assert "runs: 4 and 1." in capsys.readouterr().out
    assert main(["rerun", str(tmp_path.parent / f"{tmp_path.name}*" / "b")]) == 0  # which no shell expands
    assert main(["rerun", str(tmp_path / "01-b")]) == 0
    assert repeated[1:] == [tmp_path / "00-b", tmp_path / "01-b"]
