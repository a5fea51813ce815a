"""Cross-cutting: a submission of DLRMv4 under ruleset 6.1.0, by all checkers, with its reference convergence points."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_bench.bench.mlperf.submission.checkers import check_package
from dlrm_bench.bench.mlperf.submission.package import RESULT_NAMES, Package, open_packages
from dlrm_bench.bench.mlperf.submission.score import score_package
from dlrm_bench.dlrm.dlrmv4.data.mlperf_checksums import EVAL_SAMPLES, TRAIN_SAMPLES
from tests.bench.mlperf.submission.made_packages import description
from tests.dlrm.dlrmv4.test_ruleset import CLOSED, write_log


def made_package(folder: Path, evaluations: int) -> Package:
    """Ten runs of 200, 201, ... s, each of which reaches the target at the last of so many evaluations."""
    package = Package(folder / "Example", "fast", "dlrmv4")
    package.results.mkdir(parents=True)
    for run, name in enumerate(RESULT_NAMES):
        path = package.results / name
        aucs = (*(0.7 for _ in range(evaluations - 1)), 0.76)
        write_log(path, replace(CLOSED, seed=run), aucs=aucs)
        *lines, last = path.read_text().splitlines()
        stop = json.loads(last[8:])
        stop["time_ms"] += 200_000 + 1000 * run
        path.write_text("\n".join([*lines, f":::MLLOG {json.dumps(stop)}"]) + "\n")
    package.description.parent.mkdir()
    package.description.write_text(json.dumps(description()))
    source = package.implementations / "dlrm-bench" / "run.py"
    source.parent.mkdir(parents=True)
    source.write_text("pass\n")
    return package


def errors(package: Package, made_data: bool = False) -> list[str]:
    return [
        f"{v.checker}: {f.text}" for v in check_package(package, made_data=made_data) for f in v.findings if f.fatal
    ]


def test_a_package_is_accepted_and_scored(tmp_path: Path) -> None:
    """68.8 million samples: a little faster than the reference's 69.07, so that the score is scaled up."""
    package = made_package(tmp_path, 6)
    assert open_packages(tmp_path) == [package]
    assert errors(package) == []
    score = score_package(package)
    assert score.mean_epochs == 57_344_000 + 5 * 2_293_760
    assert score.scaling == pytest.approx(69_067_662 / 68_812_800, rel=1e-3)
    assert score.olympic_minutes == pytest.approx(204.5 / 60, abs=0.01)


def test_runs_that_converge_faster_than_the_reference_may_are_refused(tmp_path: Path) -> None:
    """64.2 million samples, below the 66.3 that the checker computes."""
    found = errors(made_package(tmp_path, 4))
    assert any(error.startswith("RCP: ") for error in found), found


@pytest.mark.slow
def test_a_package_of_made_data_is_accepted_where_that_is_said(tmp_path: Path) -> None:
    """Its numbers of samples and rates are its own, which no rule takes; anything else is refused all the same."""
    package = made_package(tmp_path, 6)
    for path in package.logs():
        text = path.read_text().replace(f'"value": {TRAIN_SAMPLES}', '"value": 180000').replace("closed", "open")
        path.write_text(text.replace(f'"value": {EVAL_SAMPLES}', '"value": 19000'))
    package.description.write_text(package.description.read_text().replace('"closed"', '"open"'))
    assert any("train_samples" in error for error in errors(package))
    assert errors(package, made_data=True) == []
    notes = [
        f.text for v in check_package(package, made_data=True) for f in v.findings if "MLPerf's own data" in f.text
    ]
    assert len(notes) == 10
    (first, *_) = package.logs()
    first.write_text(first.read_text().replace('"micro_batch_size", "value": 1024', '"micro_batch_size", "value": 0'))
    (error,) = errors(package, made_data=True)
    assert error.startswith("compliance: result_0.txt: CHECK for 'micro_batch_size' failed")


def test_a_ruleset_that_does_not_know_the_benchmark_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--ruleset 6\.0\.0 does not know dlrmv4: choose one of 6\.1\.0"):
        check_package(made_package(tmp_path, 6), "6.0.0")
