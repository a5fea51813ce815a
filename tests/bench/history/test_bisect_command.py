"""dlrm-bench bisect on a small repository, whose commits say how long an iteration takes; nothing is trained."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.history import bisect_command as module
from dlrm_bench.bench.history.arguments import BisectCommand
from tests.bench.made_records import configured, write
from tests.bench.records.full_disk import fails_after

FLAGS = ["--", "--preset", "smoke"]


def git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Six commits: 10 ms up to the third, then 11; the fifth changes a page alone."""
    root = tmp_path / "toy"
    (root / "launch").mkdir(parents=True)
    git(root, "init", "-q")
    found = []
    for i, ms in enumerate((10.0, 10.0, 10.0, 11.0, 11.0, 11.0)):
        if i == 4:
            (root / "README.md").write_text("words")
        else:
            (root / "launch" / "dlrm.py").write_text(f"{ms}\n# {i}\n")
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", str(i))
        found.append(git(root, "rev-parse", "HEAD"))
    monkeypatch.setattr(module, "ROOT", root)
    return found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the runs that are made, with the folder of their step, in place of torchrun."""
    runs: list[str] = []
    rng = np.random.default_rng(0)

    def torchrun(flags: list[str], processes: int, output: Path, launcher: Path) -> None:
        ms = float(launcher.read_text().split()[0])
        folder, name = Path(flags[flags.index("--results-dir") + 1]), flags[flags.index("--run-id") + 1]
        assert flags[:2] == ["--preset", "smoke"]
        assert (processes, output) == (2, folder / f"{name}.log")
        output.touch()
        runs.append(f"{folder.name}/{name}")
        write(folder / name, np.full(60, ms * np.exp(rng.normal(0, 0.003))), minute=len(runs), config=configured())

    monkeypatch.setattr(module, "torchrun", torchrun)
    return runs


def bisected(tmp_path: Path, *words: str) -> int:
    return main(["bisect", *words, "--nproc", "2", "--results-dir", str(tmp_path / "results"), *FLAGS])


def test_the_commit_is_found_and_every_worktree_removed(
    tmp_path: Path, commits: list[str], ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bisected(tmp_path, commits[0], "HEAD") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{commits[3][:12]} is the first slower commit (95.0 % sure, or more)" in said
    assert "assumes a single change of the time" in said
    assert not any(commits[4][:12] in run for run in ran), "its program is that of the commit before"
    assert [run.split("/")[1] for run in ran[:4]] == ["00-good", "00-candidate", "01-candidate", "01-good"]
    assert git(module.ROOT, "worktree", "list").count("\n") == 0


def test_an_interrupted_bisection_goes_on_and_runs_half_a_pair_again(
    tmp_path: Path,
    commits: list[str],
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = module.torchrun

    def interrupted(flags: list[str], processes: int, output: Path, launcher: Path) -> None:
        if len(ran) == 11:
            raise KeyboardInterrupt
        whole(flags, processes, output, launcher)

    monkeypatch.setattr(module, "torchrun", interrupted)
    assert bisected(tmp_path, commits[0], commits[5]) == 130
    (folder,) = (tmp_path / "results").iterdir()
    assert f"dlrm-bench bisect --resume {folder}" in capsys.readouterr().err
    assert main(["bisect", "--resume", str(folder), *FLAGS]) == 2
    monkeypatch.setattr(module, "torchrun", whole)
    kept, ran[:] = ran[:], []
    assert main(["bisect", "--resume", str(folder)]) == 0
    assert f"{commits[3][:12]} is the first slower commit" in " ".join(capsys.readouterr().out.split())
    assert set(kept) & set(ran) == {kept[-1]}
    (again,) = folder.glob("*/*.unfinished-1")
    assert again.name.startswith(kept[-1].split("/")[1])
    plan = folder / module.PLAN_JSON
    plan.write_text(plan.read_text().replace("boot ", "another boot "))
    assert main(["bisect", "--resume", str(folder)]) == 2
    assert "start a new bisection here" in capsys.readouterr().err


def test_a_disk_that_is_full_leaves_no_half_of_a_plan(tmp_path: Path, commits: list[str], ran: list[str]) -> None:
    asked = BisectCommand(good=commits[0], bad=commits[5], nproc=2, results_dir=tmp_path / "results")
    with fails_after(60):
        module.bisect_command(Console(quiet=True), FLAGS[1:], asked)
    (folder,) = (tmp_path / "results").iterdir()
    assert list(folder.iterdir()) == []
    assert ran == []


def test_a_folder_has_one_bisection_at_a_time(
    tmp_path: Path,
    commits: list[str],
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second one would put the pair aside that the first one is running."""
    whole, ended = module.torchrun, []

    def resumed(flags: list[str], processes: int, output: Path, launcher: Path) -> None:
        if len(ran) == 2:
            monkeypatch.setattr(module, "torchrun", whole)
            (folder,) = (tmp_path / "results").iterdir()
            ended.append(main(["bisect", "--resume", str(folder)]))
        whole(flags, processes, output, launcher)

    monkeypatch.setattr(module, "torchrun", resumed)
    assert bisected(tmp_path, commits[0], commits[5]) == 0
    assert ended == [2]
    (folder,) = (tmp_path / "results").iterdir()
    assert f"{folder}: another command runs this bisection: wait for its end" in capsys.readouterr().err
    assert not list(folder.glob("*/*.unfinished-*"))


def test_ends_alone_are_a_sitting_of_a_history(
    tmp_path: Path, commits: list[str], ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bisected(tmp_path, commits[0], commits[5], "--ends", "--max-pairs", "4") == 0
    assert [run.split("/")[0] for run in ran] == [commits[5][:12]] * 8
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"{commits[5][:12]} 4 0\.9\d\d \(.*\) as after it records", said)
    (folder,) = (tmp_path / "results").iterdir()
    assert main(["history", str(folder)]) == 0  # by toy records, which are all of one program
    same = ["HEAD~2", "HEAD~1", "--ends", "--max-pairs", "4"]
    assert bisected(tmp_path / "same", *same) == 0, "a commit that changes no file of the program has a place too"


def test_what_proves_nothing_has_status_5(
    tmp_path: Path, commits: list[str], ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bisected(tmp_path, commits[0], commits[2], "--max-pairs", "6") == 5
    assert "no difference proven between both ends in 6 pairs" in " ".join(capsys.readouterr().out.split())


def test_a_commit_that_fails_is_left_out(
    tmp_path: Path,
    commits: list[str],
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = module.torchrun

    def failing(flags: list[str], processes: int, output: Path, launcher: Path) -> None:
        if launcher.read_text() == "11.0\n# 3\n":
            raise ValueError("it does not run")
        whole(flags, processes, output, launcher)

    monkeypatch.setattr(module, "torchrun", failing)
    assert bisected(tmp_path, commits[0], commits[5]) == 5
    said = " ".join(capsys.readouterr().out.split())
    assert f"one of {commits[3][:12]}, {commits[5][:12]} is the first slower commit" in said
    assert "cannot be run" in said


@pytest.mark.parametrize(("number", "status"), [(0, 2), (5, 5)])
def test_the_reason_of_a_failed_run_is_said(
    tmp_path: Path,
    commits: list[str],
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    status: int,
) -> None:
    """That of GOOD ends the bisection; that of BAD is its answer, or with --ends a failure."""
    whole = module.torchrun

    def failing(flags: list[str], processes: int, output: Path, launcher: Path) -> None:
        if launcher.read_text().endswith(f"# {number}\n"):
            raise ValueError("out of memory")
        whole(flags, processes, output, launcher)

    monkeypatch.setattr(module, "torchrun", failing)
    assert bisected(tmp_path, commits[0], commits[5]) == status
    said = capsys.readouterr()
    assert "out of memory" in (said.err if status == 2 else said.out)
    assert (f"{commits[5][:12]} cannot be run" in said.out) == (status == 5)
    assert bisected(tmp_path / "ends", commits[0], commits[5], "--ends") == (2 if status == 2 else 1)


def test_a_folder_without_commits_is_not_told_to_fetch_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of an installed package, even within somebody's checkout of another program."""
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "0")
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path / "site-packages")
    assert main(["bisect", "HEAD", "HEAD", *FLAGS]) == 2
    assert "site-packages is no checkout that git can read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere", "HEAD"], "commit nowhere is not in"),
        (["--", "--preset", "smoke"], "name two commits and the flags of a run"),
        (["HEAD", "HEAD~3"], "does not have .* in its history"),
        (["HEAD~2", "HEAD~1"], "changes the program: there is nothing to find"),
        (["HEAD~5", "HEAD", "--max-pairs", "2"], "--max-pairs is 2: 4 are needed"),
        (["HEAD~5", "HEAD", "--confidence", "1"], "--confidence is 1: it lies between 0 and 1"),
        (["HEAD~5", "HEAD", "--", "--run-id", "x"], "--run-id is set by this command"),
        (["--resume", "/nowhere"], "name the folder of a bisection"),
        (["--resume", "/nowhere", "--max-pairs", "80"], "continues with the plan .*: leave out --max-pairs"),
        (["--resume", "/nowhere", "--ends", "--nproc", "4"], "leave out --nproc, --ends"),
    ],
)
def test_what_is_wrong_is_said(
    commits: list[str], words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [] if "--" in words or "--resume" in words else FLAGS
    assert main(["bisect", *words, *flags]) == 2
    import re

    assert re.search(says, " ".join(capsys.readouterr().err.split()))
