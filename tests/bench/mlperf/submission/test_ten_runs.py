"""Ten runs: their seeds, one that misses its target, and going on after an interruption. Real ones: test_chain.py."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dlrm_bench.bench.mlperf.submission import ten_runs as module
from dlrm_bench.bench.mlperf.submission.ten_runs import run_ten
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


def done(monkeypatch: pytest.MonkeyPatch, folder: Path, runs: Pretended) -> list[str]:
    monkeypatch.setattr(module, "run_forked", runs)
    return [record.name for record in run_ten(folder, 3, 40, ["--preset", "smoke"])]


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
