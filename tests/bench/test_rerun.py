"""What a rerun refuses and says; that it runs, a committed record and its rerun show."""

import os
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench import ROOT, rerun
from dlrm_bench.bench.cli import main
from dlrm_bench.bench.machine.source import git, source_hash, source_of_commit
from dlrm_bench.bench.rerun import Rerun
from tests.bench.ladder.made_ladders import make, pretend_runs
from tests.bench.made_records import configured, recorded_runs, write

RUNS = recorded_runs()
IN_A_CHECKOUT = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")


def made(folder: Path, **git_state: Any) -> Path:
    return write(folder, RUNS[0], git={"commit": None, "dirty": None, **git_state}, config=configured(seed=7))


@IN_A_CHECKOUT
@pytest.mark.parametrize(
    ("state", "says"), [({}, "names no commit"), ({"commit": "0123abc" * 5, "dirty": False}, "is not in .*: fetch it")]
)
def test_what_cannot_be_had_again(tmp_path: Path, state: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rerun.rerun(made(tmp_path / "record", **state), 1, None, tmp_path)


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
        assert flags[flags.index("--seed") + 1] == "7"
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
    (tmp_path / "copy" / "dlrm_bench").symlink_to(".")
    monkeypatch.setattr(rerun, "ROOT", tmp_path / "copy")
    monkeypatch.setenv("SOURCE_COMMIT", "456def")
    started: list[tuple[Path, str]] = []

    def torchrun(flags: list[str], processes: int, output: Path, launcher: Path) -> None:
        started.append((launcher, os.environ["SOURCE_COMMIT"]))

    monkeypatch.setattr(rerun, "torchrun", torchrun)
    own = made(tmp_path / "own", commit="0123abc", source=source_hash(tmp_path / "copy"))
    assert rerun.rerun(own, 1, None, tmp_path / "again").notes == []
    assert started == [(tmp_path / "copy" / "launch" / "dlrm.py", "0123abc")]
    assert os.environ["SOURCE_COMMIT"] == "456def"
    for i, source in enumerate((None, "789abc")):
        other = made(tmp_path / f"other-{i}", commit="0123abc", source=source)
        with pytest.raises(ValueError, match="other source code"):
            rerun.rerun(other, 1, None, tmp_path / "again")


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
    notes = rerun._commit_of(record)[1]
    assert [says in note for note in notes] == [True] if says else notes == []


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
    assert "1 and 2. With one run on a side" in said
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
