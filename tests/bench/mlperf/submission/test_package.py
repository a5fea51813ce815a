"""The tree of a submission: finding it, and its defects."""

import json
from pathlib import Path

import pytest

from dlrm_bench.bench.mlperf.submission.package import BYPASSES, Package, arrangement, open_packages, read_run
from tests.bench.mlperf.submission.made_packages import description, made_package, write_log


def fatal(package: Package) -> list[str]:
    return [finding.text.replace(f"{package.folder}/", "") for finding in arrangement(package) if finding.fatal]


def notes(package: Package) -> list[str]:
    return [finding.text.replace(f"{package.folder}/", "") for finding in arrangement(package) if not finding.fatal]


def test_a_package_is_found_by_its_folder_or_the_one_above(tmp_path: Path) -> None:
    made = [made_package(tmp_path, name) for name in ("a", "b")]
    for folder in (tmp_path, tmp_path / "Example"):
        assert open_packages(folder) == made
        assert open_packages(folder, "b") == made[1:]
    with pytest.raises(ValueError, match=r"--system c: .*results has a, b"):
        open_packages(tmp_path, "c")
    assert [*arrangement(made[0])] == []


def test_what_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a submission: .* found none"):
        open_packages(tmp_path / "nowhere")
    (tmp_path / "Org" / "results" / "sys").mkdir(parents=True)
    with pytest.raises(ValueError, match="has no system with a folder dlrm_dcnv2"):
        open_packages(tmp_path)
    (tmp_path / "Other" / "results").mkdir(parents=True)
    with pytest.raises(ValueError, match="found 2 of them"):
        open_packages(tmp_path)


def test_a_log_has_one_run(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    (tmp_path / "log").write_text((tmp_path / "log").read_text() * 2)
    with pytest.raises(ValueError, match="log holds 2 runs"):
        read_run(tmp_path / "log")


def test_logs_are_result_0_to_result_9(tmp_path: Path) -> None:
    package = made_package(tmp_path)
    (package.results / "result_3.txt").rename(package.results / "result_10.txt")
    assert fatal(package) == []  # a published one has other names
    assert notes(package)[0].startswith(
        "results/fast/dlrm_dcnv2: result_10.txt: the names by the rules are result_0.txt to"
    )
    write_log(package.results / "result_11.txt", seed=11, start_ms=1)
    assert fatal(package) == [
        "results/fast/dlrm_dcnv2 has 11 result logs, but a submission exactly 10: result_3.txt missing; result_10.txt, "
        "result_11.txt too many"
    ]


def test_runs_of_one_configuration(tmp_path: Path) -> None:
    package = made_package(tmp_path)
    write_log(
        package.results / "result_1.txt", seed=1, start_ms=1, global_batch_size=65536, submission_platform="Other"
    )
    write_log(package.results / "result_2.txt", seed=3, start_ms=2, status="aborted")
    write_log(package.results / "result_4.txt", seed=4, start_ms=3, status="aborted")
    (package.results / "result_6.txt").write_bytes((package.results / "result_5.txt").read_bytes())
    (package.results / "result_8.txt").write_text("nothing")
    results = "results/fast/dlrm_dcnv2"
    assert fatal(package) == [
        f"{package.results}/result_8.txt holds no MLPerf run: no well-formed ':::MLLOG' event begins one".replace(
            f"{package.folder}/", ""
        ),
        "the runs differ in platform (8 x Fast, Other): submit runs of one configuration",
        "the runs differ in global_batch_size (55296, 65536): submit runs of one configuration",
        f"{results}/result_3.txt has the seed 3 of result_2.txt: each run needs its own",
        f"{results}/result_6.txt has the seed 5 of result_5.txt: each run needs its own",
        f"{results}/result_6.txt began in the same millisecond as result_5.txt: submit ten distinct runs",
        "2 runs did not converge (result_2.txt, result_4.txt): one may, and counts as the slowest",
    ]


def test_the_description_is_that_of_the_logs(tmp_path: Path) -> None:
    package = made_package(tmp_path)
    file = "systems/fast.json"
    package.description.write_text(json.dumps(description(division="open", status="Preview", cooling="")))
    assert fatal(package) == [
        f"{file}: division is 'open', but 'closed' in the logs: edit the file",
        f"{file}: status is 'Preview', but onprem of the logs is 'Available on-premise' there: edit the file",
    ]
    assert notes(package) == [f"{file}: still to be filled in: cooling"]
    package.description.unlink()
    assert fatal(package) == [
        f"{file} cannot be read (No such file or directory): build the package, or write the file"
    ]


def test_source_code_and_bypasses(tmp_path: Path) -> None:
    package = made_package(tmp_path)
    (package.implementations / "dlrm-bench" / "run.py").unlink()
    (package.results / BYPASSES).write_text("rcp-bypass")
    assert fatal(package) == [
        "benchmarks/dlrm_dcnv2/implementations holds no source code: the rules require it in both divisions"
    ]
    assert "turns checkers off" in notes(package)[0]
