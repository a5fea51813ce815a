"""Cross-cutting: made parquet to a package that all checkers of ruleset 6.1.0 accept and its score, by the commands
of a user.

The ten runs are real ones, as in test_chain.py.
"""

from pathlib import Path

import pytest

import dlrm_bench.dlrm.dlrmv4.data.builder  # noqa: F401 - so that the runs' server compiles its loops (conftest.py)
from dlrm_bench.bench.cli import main
from dlrm_bench.bench.mlperf.submission.package import open_packages
from dlrm_bench.dlrm.dlrmv4.data.raw_events import RAW_FILE
from tests.bench.mlperf.submission.test_chain import check_ten_runs

TARGET = 0.75
"""The checker refuses less in either division."""
HISTORY = ["--history", "24"]


@pytest.mark.slow
def test_from_parquet_to_a_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    preset = ["--preset", "smoke-dlrmv4"]
    made, days, out, runs = (str(tmp_path / name) for name in ("made", "days", "out", "runs"))
    sizes = ["--users", "4000", "--days", "40"]
    assert main(["data", "generate", *preset, made, *HISTORY, *sizes, "--raw"]) == 0
    assert (Path(made) / RAW_FILE).is_file()
    assert main(["data", "preprocess", *preset, made, days, *HISTORY]) == 0
    assert main(["data", "check", *preset, days]) == 0
    training = [*preset, "--data.path", days, "--pipeline", "static", "--target-auc", str(TARGET)]
    training += ["--model.max-history", "24", "--model.input-dropout", "0", "--model.layer-dropout", "0"]
    training += ["--optimizer.learning-rate", "0.003", "--optimizer.ramp-steps", "20"]
    training += ["--evaluations-per-epoch", "20", "--warmup-iterations", "1", "--mlperf.org", "Example"]
    build = ["submission", "build", out, "--records", runs, "--nproc", "1", "--system", "two-cores"]
    assert main([*build, *training]) == 0
    assert "run 10 of 10" in capsys.readouterr().out
    (package,) = open_packages(Path(out))
    assert package.benchmark == "dlrmv4"

    status = main(["submission", "check", out, "--made-data"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "ruleset 6.1.0" in printed
    assert "accepted except for values that MLPerf's own data decides" in printed
    assert printed.count("note: compliance: result_") == 10, "their numbers of samples and rates, and nothing else"

    assert main(["submission", "score", out]) == 0
    assert "minutes" in capsys.readouterr().out
    check_ten_runs(Path(runs), TARGET)
