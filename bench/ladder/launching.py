"""Starts the launchers: as ranks forked from a server that has imported everything once, under torchrun, or through the
user's command.

The overhead of a run is that of imports: torchrun's own, then torch, torchrec and fbgemm on every rank. The fork server
(multiprocessing's) has run nothing and holds no CUDA context: each fork is a fresh process, and no run inherits
another's memory, graphs or communicators. Forks share the random choices of a process start, which are the server's:
the addresses of libraries and the seed of str's hash are equal in all runs of one dlrm-bench, and differ in the next.
"""

import contextlib
import ctypes
import io
import logging
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.machine.source import source_hash
from dlrm_bench.dlrm.runtime.command_line import FailedError

LAUNCHER = ROOT / "launch" / "dlrm.py"
MEASURE = ROOT / "launch" / "measure.py"

# launch.dlrm comes first: its settings must precede the others' imports. bench.cli is included because a forked rank
# imports the main module of the process that requested it.
_PRELOADED = [
    "dlrm_bench.launch.dlrm",
    "dlrm_bench.launch.measure",
    "dlrm_bench.bench.cli",
    # Modules that the above import once they have parsed their flags.
    "dlrm_bench.bench.summary",
    "dlrm_bench.bench.limits.measured",
    "dlrm_bench.bench.profile.profiled_run",
    "dlrm_bench.pipeline.static.pipeline",
    "dlrm_bench.pipeline.static_sequences.pipeline",
    "dlrm_bench.pipeline.torchrec.five_stage",
    "dlrm_bench.pipeline.torchrec.stock",
]
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PATIENCE_S = 5
"""Seconds that a rank has to close its log after its parent is gone; then it is killed."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals on which torch elastic, and so torchrun, ends its ranks."""


def start_server() -> None:
    """Starts the fork server, unless this process has one; it imports the launchers in the current environment."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; torch reads it when it is imported
    # Imports check for a GPU: through NVML, because no fork of a process that has initialised CUDA can use CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    _source_of_server()
    forkserver.set_forkserver_preload(_PRELOADED)
    with _signal_handlers_kept():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the server from its start: it ends with this process
        forkserver.ensure_running()


def run_forked(flags: Sequence[str], processes: int, output: Path, launcher: Path = LAUNCHER) -> None:
    """Runs `launcher` once on `processes` ranks forked from the server, with their output in a file.

    Each rank gets the environment (as of the server's start), sys.argv and standard streams that torchrun would give
    it, and torch elastic supervises it from this process, as under torchrun. FailedError, with the rank's output, if a
    rank fails; ValueError, before any rank, if the program's files have changed since the server's start. A signal to
    this process ends the ranks, and then this process.
    """
    start_server()
    _await_server()
    _check_source()
    output.write_bytes(b"")
    with TemporaryDirectory() as logs, _elastic_logs_to(output), _signal_handlers_kept():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, _rank_main)(launcher, list(flags), output)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            status = failure.signal_name() if failure.exitcode < 0 else f"status {failure.exitcode}"
            raise FailedError(_failed(launcher, flags, f"rank {rank} ended with {status}", output)) from None
        except (RuntimeError, OSError) as error:  # raised by torch elastic, or because the server is gone
            raise FailedError(_failed(launcher, flags, f"it could not be run: {error}", output)) from error
        except SignalException as stop:
            raise _end_by(stop.sigval) from None


@cache
def _source_of_server() -> str:
    """Returns the hash of the program's files, as they were at the first call: before the server imports them."""
    return source_hash(ROOT)


def _check_source() -> None:
    """Raises ValueError if the program's files are not those that the server has imported: ranks would run the old
    ones, and record the hash and the commit of the new ones."""
    if source_hash(ROOT) != _source_of_server():
        raise ValueError(
            f"program files in {ROOT} have changed since this command started, which runs them as they were: restore "
            "them and continue (ladder --resume FOLDER, or the same submission build again), or begin anew elsewhere"
        )


def _await_server() -> None:
    """Waits until the server has imported everything.

    A rank requested earlier would be forked even after this process is gone, and print a traceback.
    """
    nothing = multiprocessing.get_context("forkserver").Process()
    nothing.start()
    nothing.join()


def torchrun(flags: Sequence[str], processes: int, output: Path, launcher: Path = LAUNCHER) -> None:
    """Runs `launcher` once under torchrun: `nsys profile` can follow its ranks, unlike forks.

    FailedError, with a rank's output, if it fails. A signal to this process ends torchrun with its ranks, and then this
    process; signals that this process was started to ignore, as by nohup, have no effect.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    status = _status_of([*torchrun, str(launcher), *flags], output)
    if status:
        raise FailedError(_failed(launcher, flags, f"torchrun ended with status {status}", output))


def run_by(command: Sequence[str], flags: Sequence[str], output: Path) -> None:
    """Runs launch/dlrm.py once through a command that starts it with these flags, on any hosts, and ends with it.

    FailedError, with a rank's output, if it fails. Signals: see `torchrun`.
    """
    status = _status_of([*command, *flags], output)
    if status:
        raise FailedError(_failed(LAUNCHER, flags, f"{shlex.join(command)} ended with status {status}", output))


def _status_of(command: Sequence[str], output: Path) -> int:
    """Runs a command to its end, with its output in a file; returns its status."""
    process: subprocess.Popen[bytes] | None = None
    stopped: int | None = None

    def forward(number: int, _: FrameType | None) -> None:
        nonlocal stopped
        if stopped is None:  # torchrun ends its ranks within 30 s; a second signal would end torchrun alone
            stopped = number
            if process is not None:
                process.send_signal(number)

    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # torchrun's choice too, made there with a warning
    with output.open("w", encoding="utf-8") as file, _signal_handlers_kept():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, forward)
        # In its own process group: otherwise Ctrl-C would reach it twice.
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_end_with_this_process(),
        )
        if stopped is not None:  # while it was being started
            process.send_signal(stopped)
        status = process.wait()
    if stopped is not None:
        raise _end_by(stopped)
    return status


def _end_with_this_process() -> Callable[[], None]:
    """Returns a function that makes a child receive SIGTERM when this process ends, even by SIGKILL: nothing else would
    end a torchrun."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl  # looked up here: between fork and exec, few calls are safe

    def call() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent had ended already
            os._exit(128 + signal.SIGTERM)

    return call


def _rank_main(launcher: Path, flags: list[str], output: Path) -> None:
    """Runs one forked rank as `python launcher flags` would."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torch treats a KeyboardInterrupt as a success
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sink = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(sink, stream.fileno())
    os.close(sink)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(write_through=True)  # as torchrun's -u: a killed rank leaves all of its output
    del os.environ["TORCHELASTIC_ERROR_FILE"]  # errors go to the file, not to torch elastic, which prints nothing
    sys.argv = [str(launcher), *flags]
    try:
        runpy.run_path(str(launcher), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise  # only then: after a success, torch elastic waits for the value that this function returns


def _end_with_parent() -> None:
    """Ends this rank once the process that started it is gone: the server lives as long as its forks."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _elastic_logs_to(output: Path) -> Iterator[None]:
    """Sends torch elastic's log to the file, as torchrun does, instead of to the terminal."""
    handler = logging.FileHandler(output, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(levelname).1s%(asctime)s %(message)s", "%m%d %H:%M:%S"))
    logs = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    for log in logs:
        log.addHandler(handler)
        log.propagate = False
    try:
        yield
    finally:
        for log in logs:
            log.removeHandler(handler)
            log.propagate = True
        handler.close()


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restores the signal handlers on exit; torch elastic sets some and never resets them."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_by(number: int) -> BaseException:
    """Returns the exception that ends this process as the signal would."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _failed(launcher: Path, flags: Sequence[str], how: str, output: Path) -> str:
    """Returns an error message from the ranks' output: first the errors that ranks report, then tracebacks of other
    ranks.

    The report of torch elastic itself, which says less, is left out.
    """
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    # torchrun indents a rank's output. Of ranks with the same error, the first is named.
    found = [match for line in lines if (match := re.match(r" *rank (\d+): error: (.*)", line))]
    said_by = {match[2]: match[1] for match in sorted(found, key=lambda match: -int(match[1]))}
    errors = [f"rank {rank}: error: {error}" for error, rank in reversed(said_by.items())]
    first = next((i for i, line in enumerate(lines) if line.startswith("rank ")), 0)
    last = next((i for i, line in enumerate(lines) if i > first and re.match(r"[EW]\d{4} ", line)), len(lines))
    others = [line for line in lines[max(first, last - 30) : last] if not re.match(r" *rank \d+: error: ", line)]
    message = "\n".join([*errors, *others, f"(full output: {output})"])
    return f"`{launcher.name} {shlex.join(flags)}` failed: {how}:\n{message}"
