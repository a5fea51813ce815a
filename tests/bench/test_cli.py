"""dlrm-bench as its users call it: every sub-command, its exit status, its errors."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from dlrm_bench.bench import ROOT, started_runs
from dlrm_bench.bench.cli import main
from dlrm_bench.bench.console import console
from dlrm_bench.bench.ladder import run_ladder
from dlrm_bench.bench.ladder.analysis import ladder_table, read_judged_ladder
from dlrm_bench.bench.ladder.launching import run_forked
from dlrm_bench.bench.machine.source import source_hash, version
from dlrm_bench.bench.records import record
from dlrm_bench.bench.records.json_file import read_json
from dlrm_bench.dlrm.runtime.command_line import FailedError
from tests.bench.ladder.made_ladders import make, pretend_runs
from tests.bench.made_records import recorded_runs, telemetry, write
from tests.bench.mlperf.test_published_logs import LOGS

RUNS = recorded_runs()
SMOKE = ["--preset", "smoke", "--data.source", "random", "--data.random-batches", "2", "--local-batch-size", "64"]
SHORT = [*SMOKE, "--target-auc", "None", "--iterations", "60"]


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """Folders of eight runs each, alternating in time; B takes twice as long."""
    for i in range(8):
        write(tmp_path / "a" / f"run{i}", RUNS[2 * i], minute=2 * i)
        write(tmp_path / "b" / f"run{i}", RUNS[2 * i + 1] * 2, minute=2 * i + 1)
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_compare_prints_a_verdict(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *two]) == 0
    out = capsys.readouterr().out
    assert re.search(r"B is slower, 0\.\d{4} times as fast as A \(median; ", out)
    assert "95 % interval" in out
    assert main(["compare", two[0], two[1], str(LOGS)]) == 0
    assert capsys.readouterr().out.count("Latency of an iteration") == 2


def test_names_of_folders_are_printed_without_escape_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, name in enumerate(("a\x1b[2J", "b\x9b31m")):
        write(tmp_path / name / "run", RUNS[i], minute=i)
    assert main(["compare", *(str(path) for path in sorted(tmp_path.iterdir()))]) == 0
    assert main(["compare", str(tmp_path / "\x1b[31mnowhere"), str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "\\x1b[2J" in said.out
    assert "\\x1b[31mnowhere" in said.err
    assert not {"\x1b", "\x9b"} & set(said.out + said.err)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"{version(ROOT)}\n"
    assert version(ROOT).startswith(f"dlrm-bench {number}, ")
    assert version(ROOT).endswith(f", source {source_hash(ROOT)[:12]}")


@pytest.mark.parametrize(("limit", "status", "same"), [("2%", 1, 5), ("2", 1, 5), ("90%", 1, 0), ("300%", 0, 0)])
def test_fail_on(two: tuple[str, str], limit: str, status: int, same: int) -> None:
    """Runs that differ by 16 % cannot exclude a regression of 2 %, not even of a side from itself."""
    assert main(["compare", *two, "--fail-on", limit]) == status
    assert main(["compare", two[1], two[0], "--fail-on", limit]) == 0  # faster is no regression
    assert main(["compare", two[0], two[0], "--fail-on", limit]) == same


def test_equivalent(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *two, "--equivalent", "2%"]) == 1
    assert main(["compare", two[0], two[0], "--equivalent", "2%"]) == 5
    capsys.readouterr()
    assert main(["compare", two[0], two[0], "--equivalent", "50%", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["checks"][0]["outcome"] == "passed"
    assert main(["compare", *two, "--equivalent", "0%"]) == 2
    assert "name a margin" in capsys.readouterr().err


def test_checks_need_runs_and_a_percentage(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", two[0] + "/run0", two[1] + "/run0", "--fail-on", "2%"]) == 5
    assert "not enough runs: 1 and 1 runs: at least two per side" in capsys.readouterr().out
    for bad in ("much", "-1%", "nan"):
        assert main(["compare", *two, f"--fail-on={bad}"]) == 2
        assert f"--fail-on {bad!r} is not a percentage" in capsys.readouterr().err


def test_strict(two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *two, "--strict"]) == 0
    throttled = write(tmp_path / "c", RUNS[0], telemetry=telemetry(throttled=True))
    assert main(["compare", two[0], str(throttled)]) == 0
    assert "warning: " in capsys.readouterr().out
    assert main(["compare", two[0], str(throttled), "--strict"]) == 2
    assert "c: throttled (power cap)" in capsys.readouterr().err


def test_json(two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *two, "--json", "--fail-on", "2%"]) == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "slower"


def test_each_record_is_read_once(two: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counting(path: Path) -> object:
        read.append(path)
        return read_json(path)

    monkeypatch.setattr(record, "read_json", counting)
    every = sorted(tmp_path.glob("*/run*/run.json"))
    assert main(["compare", *two]) == 0
    assert sorted(read) == every
    pretend_runs(monkeypatch)
    ladder = tmp_path / "ladder"
    ladder.mkdir()
    read.clear()
    ran = make(ladder, rounds=2, host=True)
    members = sorted(ladder / run_id / "run.json" for run_id in ran)
    assert sorted(read) == members
    read.clear()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report")]) == 0
    assert sorted(read) == sorted([*every, *members])


def test_what_two_ladders_differ_in_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not of each rung again, with its labels."""
    for name, ran_by in (("x", "1"), ("y", "2")):
        pretend_runs(monkeypatch)
        (tmp_path / name).mkdir()
        make(tmp_path / name, rounds=2)
        for file in (tmp_path / name).glob("*/run.json"):
            run = json.loads(file.read_text())
            run["provenance"]["environment"]["NCCL_MAX_CTAS"] = ran_by
            file.write_text(json.dumps(run))
    assert main(["compare", str(tmp_path / "x"), str(tmp_path / "y")]) == 0
    out = capsys.readouterr().out
    assert out.count("NCCL_MAX_CTAS") == 1
    assert "warning: environment variable NCCL_MAX_CTAS differs: 1 in A, 2 in B\n" in out


def test_bad_input_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["compare", str(tmp_path)], "compare needs two sides"),
        (["compare", str(tmp_path), str(tmp_path)], "holds no run.json"),
        (
            ["compare", "a", "b", "--preset", "smoke"],
            "--preset is a flag of launch/dlrm.py, and this",
        ),
        (["tables", str(tmp_path), "--preset", "smoke"], "--preset is a flag of launch/dlrm.py, and this"),
        ([], "bisect}; `dlrm-bench COMMAND --help` explains each command"),
        (["compere"], "Unrecognized options: compere; `dlrm-bench COMMAND --help` explains each command"),
        (["ladder", "--rouns", "3"], "Unrecognized options: --rouns, 3; perhaps you meant --rounds or --rungs"),
        (["ladder", "--rounds", "x"], "Error parsing --rounds: no type matching INT|{auto}"),
        (["ladder", "--rungs", "none"], "--rungs 'none' is unknown"),
        (["ladder", "--rounds", "0"], "--rounds is 0"),
        (["ladder", "--detect", "1%"], "--detect is for --rounds auto"),
        (["ladder", "--rounds", "auto", "--detect", "0%"], "no number of rounds finds a zero difference"),
        (["ladder", "--rounds", "auto", "--max-rounds", "1"], "--max-rounds is 1"),
        (["ladder", "--max-minutes", "0"], "--max-minutes is 0"),
        (["ladder", "--max-minutes", "nan"], "--max-minutes is nan"),
        (["ladder", "--max-minutes", "inf"], "--max-minutes is inf"),
        (["ladder", "--resume", str(tmp_path)], "plan.json cannot be read"),
        (["ladder", "--resume", str(tmp_path), "--seed", "1"], "leave out --seed"),
        (["ladder", "--nproc", "0"], "--nproc is 0"),
        (["ladder", "--launch", "no-such-command"], "--launch 'no-such-command': there is no such command"),
        (["ladder", "--launch", "true", "--host"], "--host is for local ranks"),
        (["ladder", "--launch", "srun 'a"], '--launch "srun \'a": No closing quotation'),
        (["ladder", "--rungs", "cpu", *SMOKE, "--pipeline", "static"], "--pipeline is set by the rungs"),
        (["ladder", "--preset=zoo-dlrm", "--pipeline=five-stage"], "--pipeline is set by the rungs of stock"),
        (["ladder", "--rungs", "cpu", *SMOKE, "--precision", "bf16"], "--precision is set by every rung"),
        (["ladder", "--rungs", "reading", *SMOKE, "--data.source=one_hot"], "--data.source is set by every rung"),
        (["ladder", "--preset", "smoke", "--rungs", "cpu"], "--rungs is a flag of dlrm-bench"),
        (["limits", "--preset", "smoke", "--results-dir=x"], "--results-dir is a flag of dlrm-bench"),
        (["host", "--nproc", "1", *SMOKE, "--run_id=x"], "--run-id is set by this command: leave it out"),
        (["host"], "name either a record or --preset"),
        (["limits"], "name --from LIMITS, or --preset"),
        (["limits", "--from", str(tmp_path)], "limits.json cannot be read"),
        (["report", str(tmp_path / "absent")], "absent does not exist"),
        (["report"], "name records, or folders of them"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert message in error


def test_files_that_are_no_folders_are_named(
    two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for arguments in (
        ["host", str(file)],
        ["limits", "--above", str(file), *SMOKE],
        ["host", "--results-dir", str(file), *SMOKE],
        ["limits", "--results-dir", str(file), *SMOKE],
        ["ladder", "--rungs", "cpu", "--results-dir", str(file), *SHORT],
        ["report", two[0], "--out", str(file)],
        ["compare", two[0], "/dev/null"],
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {file}" if "/dev/null" not in arguments else "error: /dev/null")
        assert error.count("\n") == 1


def test_a_run_that_fails_is_no_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise FailedError("rank 1 died")

    monkeypatch.setattr(started_runs, "torchrun", fail)
    monkeypatch.setattr(run_ladder, "run_forked", fail)
    for command in (["host"], ["limits"], ["ladder", "--rungs", "cpu"]):
        assert main([*command, "--results-dir", str(tmp_path), *SHORT]) == 1
        assert capsys.readouterr().err == "error: rank 1 died\n"


def test_an_interrupted_command_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(started_runs, "torchrun", interrupt)
    monkeypatch.setattr(run_ladder, "run_forked", interrupt)
    for command in (["host"], ["ladder", "--rungs", "cpu"]):
        assert main([*command, "--results-dir", str(tmp_path), *SHORT]) == 130
        assert capsys.readouterr().err == ""


def test_a_profiled_run_has_the_processes_that_are_asked_for(
    two: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[int] = []

    def measure(what: str, flags: list[str], processes: int, results_dir: Path) -> None:
        started.append(processes)
        raise FailedError

    monkeypatch.setattr(started_runs, "measure", measure)
    record = f"{two[0]}/run0"
    assert [main(["host", record]), main(["host", record, "--nproc", "3"])] == [1, 1]
    assert started == [2, 3]
    capsys.readouterr()
    assert main(["host", record, "--nproc", "0"]) == 2
    assert "--nproc is 0" in capsys.readouterr().err
    assert started == [2, 3]


@pytest.mark.parametrize("flags", [["--json"], []])
def test_a_reader_may_leave(two: tuple[str, str], flags: list[str]) -> None:
    command = [sys.executable, "-m", "dlrm_bench.bench.cli", "compare", *two, *flags]
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert process.stderr == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nvtx_ranges_need_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(started_runs, "torchrun", run_forked)  # which imports nothing anew
    assert main(["host", "--nvtx", "--nproc", "1", "--results-dir", str(tmp_path), *SMOKE]) == 1
    assert "NVTX ranges need a GPU" in capsys.readouterr().err
    assert [path.suffix for path in tmp_path.iterdir()] == [".log"]  # and no folder of a run


def test_from_a_shell() -> None:
    command = [sys.executable, "-m", "dlrm_bench.bench.cli", "compare", str(LOGS), str(LOGS)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    assert process.returncode == 0
    assert process.stderr == ""
    assert "3.250" in process.stdout


@pytest.mark.slow
def test_ladder_host_limits_and_report_for_real(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rungs of the CPU, each profiled too, limits beside one of them, and the page from all of it."""
    place = ["--nproc", "1", "--results-dir", str(tmp_path / "results")]
    short = ["--iterations", "20", "--warmup-iterations", "4", "--target-auc", "None"]
    assert main(["ladder", "--rungs", "cpu", "--rounds", "1", "--host", *place, *SMOKE, *short]) == 0
    out = capsys.readouterr().out
    assert "static-fp32" in out
    assert "no GPU" in out
    assert "missing" not in out
    (folder,) = (tmp_path / "results").glob("*-cpu-smoke-ladder")
    (record, *_) = folder.glob("00-stock-fp32")
    assert main(["host", str(record), *place]) == 0
    out = capsys.readouterr().out
    assert "kernel launches" in out
    assert "an iteration in time, ms (host)" in out
    (profiled,) = (tmp_path / "results").glob("*-cpu-smoke-host")
    assert len(list(profiled.glob("trace_rank*.json.gz"))) == 1
    monkeypatch.setattr(started_runs, "torchrun", run_forked)  # which host has shown, and imports nothing anew
    assert main(["limits", "--above", str(record), str(profiled), *place, *SMOKE]) == 0
    out = capsys.readouterr().out
    assert "all-to-all: pooled vectors" in out
    assert "least time of its computation" in out
    assert "rates measured by " in out
    (limits,) = (tmp_path / "results").glob("*-cpu-smoke-limits/limits.json")
    rates = {c["name"]: c["amount"] / c["ms"] for c in json.loads(limits.read_text())["ceilings"]}
    fastest = max(rates["memory: copy"], rates["memory: add in place"])
    assert rates["memory traffic: table update"] == pytest.approx(fastest)
    assert main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Distance to the floor" in page
    assert "static-fp32" in page


def test_what_reads_records_imports_little(tmp_path: Path) -> None:
    """Each of these takes a tenth of a second or more to import, so that a command answers at once without them."""
    sides = [str(write(tmp_path / name, RUNS[0])) for name in ("a", "b")]
    for arguments, unneeded in (
        (["--help"], {"numpy", "rich", "scipy", "matplotlib", "torch"}),
        (["compare", *sides], {"matplotlib", "torch"}),
    ):
        program = (
            "import sys\nfrom dlrm_bench.bench.cli import main\n"
            f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\nprint('imported', *sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        (imported,) = (line.split() for line in done.stdout.splitlines() if line.startswith("imported "))
        assert unneeded & set(imported) == set()


def test_no_table_is_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Record 38's, whose rungs have longer names here."""
    monkeypatch.setenv("COLUMNS", "100")
    ladder, _ = read_judged_ladder(ROOT / "results" / "38-2xh200-512-a-gpu-fair-baselines")
    for factor in (1, 3):
        for rung in ladder["rungs"]:
            rung["name"] *= factor
        console().print(ladder_table(ladder))
        said = capsys.readouterr().out
        assert "\N{HORIZONTAL ELLIPSIS}" not in said
        assert "previous" in said
        assert all(rung["name"] in said for rung in ladder["rungs"])
        assert "10.155 .. 42.572" in said
