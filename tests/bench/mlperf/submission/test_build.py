"""Builds from ten runs: order, refusals of runs that do not belong together, files that are kept, and scripts that a
shell understands."""

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.machine.source import PROGRAM, git_state, source_hash
from dlrm_bench.bench.mlperf.submission import build as module
from dlrm_bench.bench.mlperf.submission.build import build, read_given
from dlrm_bench.bench.mlperf.submission.package import RESULT_NAMES, arrangement
from dlrm_bench.bench.records.json_file import whole_file
from tests.bench.made_records import recorded_runs, write
from tests.bench.mlperf.submission.made_packages import BEGIN_MS, write_log

RUNS = recorded_runs()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Ten logs without records; those with higher numbers began earlier."""
    folder = tmp_path / "logs"
    folder.mkdir()
    for run, name in enumerate(RESULT_NAMES):
        write_log(folder / name, seed=run, start_ms=BEGIN_MS - 10_000 * run)
    return folder


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Ten records with logs."""
    folder = tmp_path / "runs"
    for run in range(10):
        record = write(folder / f"run-{run}", RUNS[run], minute=run, git=git_state(ROOT))
        write_log(record / "result_0.txt", seed=run, start_ms=BEGIN_MS + 10_000 * run)
    return folder


def edit_record(record: Path, change: dict[str, Any]) -> None:
    path = record / "run.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {key: content[key] | value for key, value in change.items()}))


def test_logs_alone_are_arranged_in_the_order_of_their_beginnings(tmp_path: Path, logs: Path) -> None:
    built = build(tmp_path / "out", read_given([logs]), "fast")
    package = built.package
    assert package.folder == tmp_path / "out" / "Example"
    for place, path in enumerate(package.logs()):
        assert path.read_bytes() == (logs / RESULT_NAMES[9 - place]).read_bytes()
    assert built.described
    assert "cooling" in built.missing
    assert "have no records" in built.notes[0]
    assert [finding for finding in arrangement(package) if finding.fatal] == []


def test_records_say_more(tmp_path: Path, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "describe_host", lambda: {"host_storage_type": "NVMe SSD"})
    given = read_given([records])
    assert all(run.record is not None for run in given)
    built = build(tmp_path / "out", given, None)
    assert built.package.system == "8_x_Fast_dlrm-bench"
    scripts = built.package.implementations / built.package.system
    assert sorted(path.name for path in scripts.iterdir()) == [
        "8_x_Fast_dlrm-bench_dlrm-bench.json", "README.md", "init_datasets.sh", "run.json", "run_and_time.sh",
        "setup.sh",
    ]  # fmt: skip
    for script in scripts.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
        assert script.stat().st_mode & 0o111
    configuration = json.loads((scripts / "8_x_Fast_dlrm-bench_dlrm-bench.json").read_text())
    assert configuration["config"]["local_batch_size"] == given[0].record["config"]["local_batch_size"]  # type: ignore[index]
    record = json.loads((scripts / "run.json").read_text())  # which logs name as config_filename
    assert record == given[0].record
    source = built.package.implementations / "dlrm-bench"
    program = [sys.executable, source / "launch" / "dlrm.py", "--print-config"]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(program, cwd=tmp_path, env=alone, capture_output=True, text=True, check=True).stdout
    assert json.loads(shown)["preset"] == "smoke"
    assert {path.name for path in (source / "dlrm_bench").iterdir() if path.is_symlink()} < {
        path.name for path in source.iterdir()
    }
    assert all((source / "kernels" / "dense" / name).is_file() for name in ("fused_cross.cu", "hopper.cuh"))
    for link in (path for name in PROGRAM for path in (ROOT / name).rglob("*") if path.is_symlink()):
        (source / link.relative_to(ROOT)).unlink()
        (source / link.relative_to(ROOT)).symlink_to(os.readlink(link))
    assert source_hash(source) == source_hash(ROOT)
    assert os.access(source / "launch" / "slurm" / "train.sbatch", os.X_OK)
    assert not (source / "tests").exists()
    assert not [path for path in source.rglob("*") if path.name.startswith(".") or " " in path.name]


def test_what_is_there_is_kept(tmp_path: Path, records: Path) -> None:
    given = read_given([*sorted(records.iterdir())])
    package = build(tmp_path / "out", given, "fast").package
    edited = (
        package.description,
        package.implementations / "fast" / "README.md",
        package.implementations / "dlrm-bench" / "README.md",
    )
    for path in edited:
        path.write_text('{"cooling": "water"}')
    again = build(tmp_path / "out", given, "fast")
    assert not again.described
    assert all(path.read_text() == '{"cooling": "water"}' for path in edited)
    write_log(package.results / "result_0.txt", seed=77)
    with pytest.raises(ValueError, match=r"has logs of other runs, which are never replaced"):
        build(tmp_path / "out", given, "fast")


def test_other_source_than_that_of_the_runs_is_not_packaged(tmp_path: Path, records: Path) -> None:
    for run in records.iterdir():
        edit_record(run, {"git": {"commit": "0123abc", "dirty": False, "source": "456def"}})
    with pytest.raises(ValueError, match=r"run-0 was made by .* check commit 0123abc out and build there"):
        build(tmp_path / "out", read_given([records]), "fast")
    assert not (tmp_path / "out").exists()
    for run in records.iterdir():
        edit_record(run, {"git": {"dirty": True, "commit": None}})
    with pytest.raises(ValueError, match=r"check their commit out, with its uncommitted changes, and build"):
        build(tmp_path / "out", read_given([records]), "fast")


def test_a_package_that_has_its_source_takes_no_other(
    tmp_path: Path, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = read_given([records])
    source = build(tmp_path / "out", given, "fast").package.implementations / "dlrm-bench" / "launch" / "dlrm.py"
    was = source.read_bytes()
    monkeypatch.setattr(module, "source_hash", lambda root: "of a later commit")
    build(tmp_path / "out", given, "fast")
    assert source.read_bytes() == was


def test_runs_without_a_hash_of_their_source_are_noted(tmp_path: Path, records: Path) -> None:
    for run in records.iterdir():
        edit_record(run, {"git": {"source": None, "commit": "0123abc", "dirty": False}})
    (note,) = build(tmp_path / "out", read_given([records]), "fast").notes
    assert "have no hash of their source (commit 0123abc)" in note


def test_logs_of_a_build_that_was_killed_are_completed(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = read_given([logs])

    def killed(path: Path) -> AbstractContextManager[IO[bytes]]:
        if not path.name.startswith("result_3"):
            return whole_file(path)
        path.with_name(f"{path.name}.tmp").write_bytes(given[3].log.path.read_bytes()[:100])  # which a kill leaves
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "whole_file", killed)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "out", given, "fast")
    package = build(tmp_path / "out", given, "fast").package
    assert [path.read_bytes() for path in package.logs()] == [run.log.path.read_bytes() for run in given]
    assert sorted(path.name for path in package.results.iterdir()) == sorted(RESULT_NAMES)


def test_runs_that_do_not_belong_together(tmp_path: Path, records: Path) -> None:
    edit_record(records / "run-3", {"config": {"local_batch_size": 999, "seed": 5}, "git": {"commit": "other"}})
    write_log(records / "run-4" / "result_0.txt", seed=3, start_ms=BEGIN_MS + 40_000)
    given = read_given([records])
    with pytest.raises(ValueError, match="these runs do not make a submission") as error:
        build(tmp_path / "out", given, "fast")
    assert "has the seed 3 of" in str(error.value)
    assert "the runs differ in config local_batch_size" in str(error.value)
    assert "the runs differ in git commit" in str(error.value)
    assert "seed: submit" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_ten_runs_are_needed(tmp_path: Path, logs: Path) -> None:
    with pytest.raises(ValueError, match=r"--runs names 9 runs .*: a submission has exactly 10"):
        read_given(sorted(logs.iterdir())[:9])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is not a result log, a record or a folder of them"):
        read_given([tmp_path / "empty"])
