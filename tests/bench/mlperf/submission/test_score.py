"""The score, compared with published ones and with MLPerf's own summary of the same package."""

import json
import shutil
from pathlib import Path

import pytest

from dlrm_bench.bench.mlperf.submission.checkers import run_checkers
from dlrm_bench.bench.mlperf.submission.score import _other_scaling, olympic_mean, score_package, score_table
from tests.bench.mlperf.submission.made_packages import BEGIN_MS, made_package, published, write_log


def test_fastest_and_slowest_are_dropped() -> None:
    assert olympic_mean([3, 100, 1, 2]) == 2.5
    assert olympic_mean([5.0, 5.0, 5.0]) == 5.0


@pytest.mark.parametrize(
    ("system", "ruleset", "minutes"),
    [("h200_ngc24.04_merlin_hugectr", "6.0.0", 3.4688), ("eos_n8_ngc24.04_merlin_hugectr", "4.0.0", 1.3467)],
)
def test_published_runs_have_their_published_factor(tmp_path: Path, system: str, ruleset: str, minutes: float) -> None:
    """minutes: mean of the eight, of the published times. Ruleset 6.0.0 has one more reference at large batches."""
    package, factor = published(tmp_path, system)
    (package.results / "scaling.json").write_text(json.dumps({"scaling_factor": factor}))
    score = score_package(package, ruleset)
    assert score.invalid == []
    assert score.olympic_minutes == pytest.approx(minutes, abs=5e-5)
    assert score.scaling == pytest.approx(factor, rel=1e-12)
    assert score.minutes == pytest.approx(minutes * factor, abs=5e-5)
    assert score.notes == [f"scaling.json in the package names the same factor, {factor:.6f}"]


def test_mlperfs_own_summary_agrees(tmp_path: Path) -> None:
    """Runs that converged faster than the reference, whose score is scaled; one of them did not converge.

    The summary scales by what the package checker wrote, and does not by what it computes itself.
    """
    package = made_package(tmp_path, epoch_num=0.75)
    late = BEGIN_MS + 50_000_000
    write_log(package.results / "result_4.txt", seed=4, start_ms=late, stop_ms=late + 1000, auc=0.79, status="aborted")
    score = score_package(package)
    assert score.scaling == pytest.approx(0.7614583333 / 0.75)
    assert score.notes == ["result_4.txt did not converge: it counts as the slowest run, which is dropped"]
    theirs = tmp_path / "theirs"
    shutil.copytree(package.folder, theirs / "Example")
    arguments = ["Example", "training", "6.0.0"]
    commands = [("package_checker", arguments), ("result_summarizer", [*arguments, "--csv", "summary.csv"])]
    text = run_checkers([(f"mlperf_logging.{name}", words) for name, words in commands], theirs)[1]
    (row,) = json.loads((theirs / "summary.json").read_text())
    assert row["dlrm_dcnv2"] == pytest.approx(score.minutes, rel=1e-9), text
    assert not (package.results / "scaling.json").exists()


def test_the_open_division_is_not_scaled(tmp_path: Path) -> None:
    package = made_package(tmp_path, submission_division="open", epoch_num=0.1)
    score = score_package(package)
    assert score.scaling == 1
    assert score.minutes == score.olympic_minutes == pytest.approx((201 + 208) / 2 / 60)
    table = score_table(score)
    assert [*table.columns[0].cells] == [f"result_{run}.txt" for run in range(10)]
    assert [*table.columns[6].cells] == ["dropped, fastest", *["yes"] * 8, "dropped, slowest"]


def test_what_has_no_result(tmp_path: Path) -> None:
    package = made_package(tmp_path, submission_division="open")
    for run in (2, 6):
        write_log(package.results / f"result_{run}.txt", seed=run, status="aborted", submission_division="open")
    (package.results / "result_9.txt").unlink()
    score = score_package(package)
    assert score.minutes is None
    assert score.invalid == [
        "9 result logs: exactly 10 are needed",
        "2 runs did not converge (result_2.txt, result_6.txt): one may",
    ]


def test_a_scaling_file_without_a_factor(tmp_path: Path) -> None:
    (tmp_path / "scaling.json").write_text("[]")
    with pytest.raises(ValueError, match=r"scaling\.json names no scaling_factor"):
        _other_scaling(tmp_path / "scaling.json", 1.0)
