"""Cross-cutting: raw days to a package that all checkers accept and its score, by the commands that a user types.

The ten runs are real ones, each with a process of its own: a rank forked from the server that has imported everything,
which the other tests use too. They cost about a second each; torchrun would add four.
"""

from pathlib import Path

import pytest

from dlrm_bench.bench.cli import main
from dlrm_bench.bench.mlperf.submission.package import open_packages
from dlrm_bench.bench.records.record import read_record

TARGET = 0.58


def check_ten_runs(runs: Path, target: float) -> None:
    """Asserts that ten different runs reached the target."""
    aucs = []
    for run in range(10):
        training = read_record(runs / f"run-{run}").run["training"]
        assert training is not None
        aucs.append(training["auc"])
    assert min(aucs) >= target
    assert len(set(aucs)) == 10


@pytest.mark.slow
def test_from_raw_days_to_a_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    raw, days, out, runs = (str(tmp_path / name) for name in ("raw", "days", "out", "runs"))
    tables = ["--preset", "smoke", "--table-scale", "0.02"]
    sizes = ["--days", "2", "--samples-per-day", "6000", "--skew", "2.0"]
    assert main(["data", "generate", "--raw", "tsv", raw, *tables, *sizes]) == 0
    assert main(["data", "preprocess", raw, days, *tables]) == 0
    assert main(["data", "check", days]) == 0
    training = ["--data.path", days, "--data.train-days", "1", "--model.table-scale", "0.02", "--pipeline", "static"]
    training += ["--local-batch-size", "256", "--optimizer.learning-rate", "0.03", "--evaluations-per-epoch", "3"]
    training += ["--warmup-iterations", "1", "--target-auc", str(TARGET), "--mlperf.org", "Example"]
    build = ["submission", "build", out, "--records", runs, "--nproc", "1", "--system", "two-cores"]
    assert main([*build, "--preset", "smoke", *training]) == 0
    assert "run 10 of 10" in capsys.readouterr().out
    (package,) = open_packages(Path(out))
    assert package.folder == Path(out) / "Example"
    assert (package.implementations / "two-cores" / "run_and_time.sh").read_text().count("torchrun") == 1

    status = main(["submission", "check", out, "--log", str(tmp_path / "said")])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "accepted" in printed
    assert "not asked in the open division" in printed
    assert (tmp_path / "said").read_text().count("INFO - SUCCESS") == 10

    assert main(["submission", "score", out]) == 0
    assert "minutes" in capsys.readouterr().out
    check_ten_runs(Path(runs), TARGET)

    (package.results / "result_7.txt").unlink()
    assert main(["submission", "score", out]) == 1
    assert "no result: 9 result logs: exactly 10 are needed" in capsys.readouterr().out
