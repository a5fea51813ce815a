"""Runs on forked ranks: that they are what torchrun would start, and how they fail and are stopped."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.ladder import launching
from dlrm_bench.bench.ladder.launching import LAUNCHER, MEASURE, _failed, run_by, run_forked, torchrun
from dlrm_bench.bench.records.record import read_record
from dlrm_bench.bench.run_files import LOG_NAME
from dlrm_bench.dlrm.runtime.command_line import FailedError
from tests.launched import PATIENCE_S, end, fork, ranks_naming, wait, wait_until, wait_until_training

SMOKE = ["--preset", "smoke", "--data.source", "random", "--data.random-batches", "2", "--local-batch-size", "64"]
UNTIL = ["--target-auc", "None", "--iterations"]
SHORT = [*SMOKE, *UNTIL, "20", "--warmup-iterations", "5"]
LONG = [*SMOKE, *UNTIL, "1000000"]


def ranks_of(folder: Path) -> list[int]:
    """Process ids of the forked ranks of the run x in `folder`: their command line is the fork server's, their output
    is the run's."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "fd" / "1").readlink() == folder / "x.log":
                pids.append(int(process.name))
        except OSError:  # not ours, or ended
            continue
    return sorted(pids)


def while_training(folder: Path, what: Callable[[], None]) -> threading.Thread:
    """Calls `what` from a thread once the run x in `folder` has begun to train."""

    def wait() -> None:
        wait_until_training(folder / "x" / LOG_NAME, lambda: ranks_of(folder))
        what()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_forked_run_is_as_one_under_torchrun(tmp_path: Path) -> None:
    place = ["--results-dir", str(tmp_path), "--run-id"]
    for start, run_id in ((run_forked, "forked"), (torchrun, "torchrun"), (run_forked, "again")):
        start([*SHORT, *place, run_id], 2, tmp_path / f"{run_id}.log")
    forked, other, again = (read_record(tmp_path / run_id) for run_id in ("forked", "torchrun", "again"))
    assert forked.losses.tolist() == other.losses.tolist() == again.losses.tolist()
    assert forked.iterations_ms.shape == other.iterations_ms.shape == (2, 20)
    assert forked.run["command"].replace("--run-id forked", "--run-id torchrun") == other.run["command"]
    output = (tmp_path / "forked.log").read_text()
    assert output.startswith("forked: torchrec, sparse-dist; latency")
    assert f"record       {tmp_path / 'forked'}" in output


@pytest.mark.slow
def test_a_profiled_run_starts_so_too(tmp_path: Path) -> None:
    run_forked(["host", *SMOKE, "--results-dir", str(tmp_path), "--run-id", "x"], 2, tmp_path / "x.log", MEASURE)
    run = read_record(tmp_path / "x").run
    assert run["host"] is not None
    assert run["command"].startswith("torchrun --nproc_per_node=2 launch/measure.py host --preset smoke")


def test_a_command_gets_the_flags_and_says_why_it_failed(tmp_path: Path) -> None:
    output = tmp_path / "x.log"
    run_by(["echo", "hosts"], ["--preset", "smoke"], output)
    assert output.read_text() == "hosts --preset smoke\n"
    failing = ["sh", "-c", "echo rank 3: error: no data; exit 4"]
    with pytest.raises(FailedError, match=r"(?s)ended with status 4.*rank 3: error: no data"):
        run_by(failing, ["--preset", "smoke"], output)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--local-batch-size", "0"], r"--local-batch-size is 0"),
        (["--precision", "tf32"], r"rank 0: error: --precision tf32 needs a GPU"),
    ],
)
def test_a_run_that_fails_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    message = rf"`dlrm\.py --preset smoke .*` failed: rank 0 ended with status 2:\n(.|\n)*{why}"
    with pytest.raises(FailedError, match=message):
        run_forked([*SHORT, *arguments, "--results-dir", str(tmp_path)], 1, tmp_path / "x.log")
    assert capfd.readouterr() == ("", "")  # torch elastic's account is in the file
    assert "failed (exitcode: 2)" in (tmp_path / "x.log").read_text()


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)  # a shell's background job ignores it
    kill = while_training(tmp_path, lambda: os.kill(ranks_of(tmp_path)[-1], signal.SIGKILL))
    # torch elastic names one of those that it finds ended: the one that was killed, or one that missed it by then.
    with pytest.raises(FailedError, match=r"failed: rank (1 ended with SIGKILL|0 ended with status 1):"):
        run_forked([*LONG, "--results-dir", str(tmp_path), "--run-id", "x"], 2, tmp_path / "x.log")
    kill.join()
    assert not ranks_of(tmp_path)
    assert signal.getsignal(signal.SIGINT) is handler


def run_x(folder: Path) -> int:
    """Runs one long member, called x, in a process forked from the server, whose ranks the same server forks.

    Returns the status that the exception asks for. A fresh process and its own server would import all for seconds.
    """
    launching.start_server = forkserver._forkserver.ensure_running = lambda: None
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it, and so does its fork
    try:
        run_forked([*LONG, "--results-dir", str(folder), "--run-id", "x"], 2, Path("x.log"))
    except KeyboardInterrupt:
        return 130
    return 0


def start_ladder(folder: Path) -> Any:
    (process,) = fork(1, folder, run_x, folder)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_ladder_ends_everything(tmp_path: Path, number: signal.Signals, status: int) -> None:
    process = start_ladder(tmp_path)
    while_training(tmp_path, lambda: os.kill(process.pid, number)).join()
    assert wait([process], tmp_path).statuses == [status]
    assert not ranks_of(tmp_path)
    log = (tmp_path / "x" / LOG_NAME).read_text()
    assert '"status": "aborted"' in log
    assert f"stopped by {number.name}" in (tmp_path / "x.log").read_text()


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_a_signal_to_what_started_a_command_ends_it(tmp_path: Path, name: str, status: int) -> None:
    """Here the command sends it, and would sleep for an hour."""
    number = signal.Signals[name]
    before = signal.signal(number, signal.default_int_handler)  # a shell's background job ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt if name == "SIGINT" else SystemExit) as ended:
            run_by(["sh", "-c", "kill -$0 $PPID; exec sleep 3600", name.removeprefix("SIG")], [], tmp_path / "x.log")
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert name == "SIGINT" or ended.value.args == (status,)


@pytest.mark.slow
def test_a_signal_to_what_started_torchrun_ends_everything(tmp_path: Path) -> None:
    script, results = tmp_path / "script.py", tmp_path / "results"
    script.write_text(
        "import os, pathlib, threading\n"
        f"pathlib.Path({str(tmp_path)!r}, 'rank_' + os.environ['RANK']).touch()\n"
        "threading.Event().wait()\n"
    )
    call = (
        "import signal, sys; from pathlib import Path; from dlrm_bench.bench import cli, started_runs;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a shell's background job ignores it
        f"started_runs.MEASURE = Path({str(script)!r});"
        f"sys.exit(cli.main(['host', '--nproc', '2', '--results-dir', {str(results)!r}, '--preset', 'smoke']))"
    )
    process = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(list(tmp_path.glob("rank_*"))) == 2, "the ranks have started")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert said == ""
        wait_until(lambda: not list(ranks_naming(str(script))), "the ranks have ended")
    finally:
        end([process], str(script))


def test_ctrl_c_while_the_server_imports_says_nothing(tmp_path: Path) -> None:
    results, gate = tmp_path / "results", tmp_path / "gate"
    (tmp_path / "slow_to_import.py").write_text(f"open({str(gate)!r}).read()\n")
    os.mkfifo(gate)
    command = ["ladder", "--rungs", "cpu", "--nproc", "2", "--results-dir", str(results), *LONG]
    call = (
        "import signal, sys; from dlrm_bench.bench import cli; from dlrm_bench.bench.ladder import launching;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a shell's background job ignores it
        "launching._PRELOADED = ['slow_to_import'];"
        f"sys.exit(cli.main({command}))"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    process = subprocess.Popen(
        [sys.executable, "-c", call],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    writers: list[int] = []

    def importing() -> bool:
        with contextlib.suppress(OSError):  # nobody reads it yet
            writers.append(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    try:
        wait_until(importing, "the server imports")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        os.close(writers.pop())  # the import goes on
        _, said = process.communicate(timeout=PATIENCE_S)  # the server's too, to its end
        assert said == ""
        (ladder,) = results.iterdir()
        assert not [path for path in ladder.iterdir() if path.is_dir()], "a run"
    finally:
        end([process], str(tmp_path))


def test_what_a_rank_knows_comes_before_another_ones_traceback(tmp_path: Path) -> None:
    output = tmp_path / "x.log"
    known, trace = (
        "rank 1: error: day_0.npy: dense feature 3 is nan",
        ["rank 0 failed:", *["  gloo"] * 60, "RuntimeError"],
    )
    twice = ["rank 3: error: x", "  rank 2: error: x"]
    output.write_text("\n".join(["warning", known, *trace, "E1121 00:00:00 elastic", *twice]))
    first, *lines = _failed(LAUNCHER, ["--seed", "1"], "rank 0 ended with status 1", output).splitlines()
    assert first == "`dlrm.py --seed 1` failed: rank 0 ended with status 1:"
    assert lines[:2] == [known, "rank 2: error: x"]
    assert lines[2:] == [*trace[-30:], f"(full output: {output})"]


def test_no_rank_outlives_a_ladder_that_is_killed(tmp_path: Path) -> None:
    process = start_ladder(tmp_path)
    while_training(tmp_path, process.kill).join()
    assert wait([process], tmp_path).statuses == [-signal.SIGKILL]
    wait_until(lambda: not ranks_of(tmp_path), "the ranks have ended")


@pytest.mark.gpu
def test_forked_ranks_have_a_gpu(tmp_path: Path) -> None:
    """Starts from a shell, as a process that has not asked CUDA for anything; the fork server must not have either."""
    place = ["--nproc", "1", "--results-dir", str(tmp_path)]
    command = [
        sys.executable,
        "-m",
        "dlrm_bench.bench.cli",
        "ladder",
        "--rungs",
        "same",
        "--rounds",
        "1",
        "--host",
        *place,
    ]
    subprocess.run([*command, *SHORT], cwd=ROOT, check=True, timeout=300)
    (ladder,) = tmp_path.iterdir()
    for run_id in ("00-same-a", "00-same-b", "host-same-a", "host-same-b"):
        run = read_record(ladder / run_id).run
        assert run["machine"]["gpus"] == 1
        assert (run["gpu"] is not None) == run_id.startswith("host")
