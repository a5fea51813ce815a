"""Ten runs: their seeds, one that misses its target, and going on after an interruption. Real ones: test_chain.py."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dlrm_bench.bench.mlperf.submission import ten_runs as module
from dlrm_bench.bench.mlperf.submission.ten_runs import TEN_RUNS_JSON, run_ten
from dlrm_bench.dlrm.runtime.command_line import FailedError
from tests.bench.mlperf.submission.made_packages import write_log


class Pretended:
    """Takes the place of run_forked; the runs in `missing` miss their target, those in `failing` leave no record."""

    def __init__(self, missing: Sequence[int] = (), failing: Sequence[int] = ()) -> None:
        self.missing, self.failing = missing, failing
        self.flags: list[list[str]] = []

    def __call__(self, flags: Sequence[str], processes: int, output: Path) -> None:
        self.flags.append([*flags])
        assert processes == 3
        folder = Path(flags[flags.index("--results-dir") + 1]) / flags[flags.index("--run-id") + 1]
        run = int(folder.name.removeprefix("run-"))
        folder.mkdir()
        if run in self.failing:
            raise FailedError("a rank failed")
        write_log(folder / "result_0.txt", status="aborted" if run in self.missing else "success")
        (folder / "run.json").touch()
        if run in self.missing:
            raise FailedError("rank 0 ended with status 3")


def done(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    runs: Pretended,
    *,
    seed: int = 40,
    flags: Sequence[str] = ("--preset", "smoke"),
) -> list[str]:
    monkeypatch.setattr(module, "run_forked", runs)
    return [record.name for record in run_ten(folder, 3, seed, flags)]


def test_each_run_has_its_seed_and_one_may_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Pretended(missing=[3])
    assert done(monkeypatch, tmp_path, runs) == [f"run-{run}" for run in range(10)]
    assert runs.flags[0] == ["--preset", "smoke", "--seed", "40", "--results-dir", str(tmp_path), "--run-id", "run-0"]
    assert [flags[3] for flags in runs.flags] == [str(seed) for seed in range(40, 50)]
    assert done(monkeypatch, tmp_path, runs := Pretended()) == [f"run-{run}" for run in range(10)]
    assert runs.flags == []


def test_a_second_miss_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Pretended(missing=[1, 4, 6])
    with pytest.raises(FailedError, match=r"run-1 and run-4 in .* missed the target AUC"):
        done(monkeypatch, tmp_path, runs)
    assert len(runs.flags) == 5


def test_a_failed_run_ends_it_and_is_not_taken_for_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedError, match="a rank failed"):
        done(monkeypatch, tmp_path, Pretended(failing=[2]))
    with pytest.raises(ValueError, match=r"run-2 is left from an interrupted run: remove it"):
        done(monkeypatch, tmp_path, Pretended())
    (tmp_path / "run-2").rmdir()
    runs = Pretended()
    assert len(done(monkeypatch, tmp_path, runs)) == 10
    assert len(runs.flags) == 8


def test_finished_runs_of_other_flags_seeds_or_programs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(monkeypatch, tmp_path, Pretended())
    runs, slower = Pretended(), ("--preset", "smoke", "--optimizer.learning-rate", "0.001")
    with pytest.raises(ValueError, match=r"holds runs of other flags: choose another --records"):
        done(monkeypatch, tmp_path, runs, flags=slower)
    with pytest.raises(ValueError, match=r"holds runs of other flags and --first-seed: choose another --records"):
        done(monkeypatch, tmp_path, runs, flags=slower, seed=0)
    with pytest.raises(ValueError, match=r"holds runs of other --nproc: choose"):
        list(run_ten(tmp_path, 2, 40, ["--preset", "smoke"]))
    with monkeypatch.context() as patch:
        patch.setattr(module, "source_hash", lambda root: "of a later commit")
        with pytest.raises(ValueError, match=r"holds runs of other program files: choose"):
            done(monkeypatch, tmp_path, runs)
    assert len(done(monkeypatch, tmp_path, runs)) == 10
    assert runs.flags == []


def test_finished_runs_of_unknown_flags_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions left them that wrote no plan."""
    done(monkeypatch, tmp_path, Pretended())
    (tmp_path / TEN_RUNS_JSON).unlink()
    with pytest.raises(ValueError, match=rf"without {TEN_RUNS_JSON}, .* choose another --records, or .* --runs "):
        done(monkeypatch, tmp_path, Pretended())


def test_flags_with_which_no_run_has_finished_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedError):
        done(monkeypatch, tmp_path, Pretended(failing=[0]), flags=["--preset", "smoke", "--local-batch-size", "0"])
    (tmp_path / "run-0").rmdir()
    assert len(done(monkeypatch, tmp_path, Pretended())) == 10
    with pytest.raises(ValueError, match="holds runs of other flags"):
        done(monkeypatch, tmp_path, Pretended(), flags=["--preset", "smoke", "--local-batch-size", "0"])
