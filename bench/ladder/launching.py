"""Starts the launchers: as ranks forked from a server that has imported everything once, under torchrun, or by a
command of the user's.

The cost of a run beside itself is that of imports: torchrun's own, then torch, torchrec and fbgemm on every rank. The
fork server (multiprocessing's) has run nothing and holds no CUDA context: a fork of it is a fresh process, and no run
inherits another's memory, graphs or communicators. Forks share what a process draws when it starts: the addresses of
its libraries and the seed of str's hash are the server's for all runs of one dlrm-bench, and differ for the next.
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
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dlrm_bench.bench import ROOT
from dlrm_bench.dlrm.runtime.command_line import FailedError

LAUNCHER = ROOT / "launch" / "dlrm.py"
MEASURE = ROOT / "launch" / "measure.py"

# launch.dlrm first: its settings must precede the others' imports. bench.cli because a forked rank imports the main
# module of the process that asked for it.
_PRELOADED = [
    "dlrm_bench.launch.dlrm",
    "dlrm_bench.launch.measure",
    "dlrm_bench.bench.cli",
    # Imports that these modules make once they know their flags.
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
"""Seconds in which a rank whose parent is gone can close its log, before it is killed."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals upon which torch elastic, and so torchrun, ends its ranks."""


def start_server() -> None:
    """Starts the fork server, unless this process has one; it imports the launchers in the current environment."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's choice too; torch reads it when it is imported
    # Imports ask whether there is a GPU: by NVML, because no fork of a process that has initialised CUDA can use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    forkserver.set_forkserver_preload(_PRELOADED)
    with _signal_handlers_kept():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's from its start: it ends with this process
        forkserver.ensure_running()


def run_forked(flags: Sequence[str], processes: int, output: Path, launcher: Path = LAUNCHER) -> None:
    """Runs `launcher` once on `processes` ranks forked from the server; its output goes to a file.

    Each rank gets the environment (that of the server's start), sys.argv and standard streams that torchrun would give
    it, and torch elastic watches over it from this process, as under torchrun. FailedError with the rank's output if
    one fails. A signal to this process ends the ranks, and then this process.
    """
    start_server()
    _await_server()
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
        except (RuntimeError, OSError) as error:  # of torch elastic, or of a server that is gone
            raise FailedError(_failed(launcher, flags, f"it could not be run: {error}", output)) from error
        except SignalException as stop:
            raise _end_by(stop.sigval) from None


def _await_server() -> None:
    """Waits until the server has imported everything.

    A rank asked for earlier would be forked even after this process is gone, and print a traceback.
    """
    nothing = multiprocessing.get_context("forkserver").Process()
    nothing.start()
    nothing.join()


def torchrun(flags: Sequence[str], processes: int, output: Path, launcher: Path = LAUNCHER) -> None:
    """Runs `launcher` once under torchrun, which `nsys profile` can follow into the ranks, unlike forks.

    FailedError with a rank's output if it fails. A signal to this process ends torchrun with its ranks, and then this
    process; a signal that it was started to ignore, as by nohup, does nothing.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    status = _status_of([*torchrun, str(launcher), *flags], output)
    if status:
        raise FailedError(_failed(launcher, flags, f"torchrun ended with status {status}", output))


def run_by(command: Sequence[str], flags: Sequence[str], output: Path) -> None:
    """Runs launch/dlrm.py once by a command that starts it with these flags, on any hosts, and ends with it.

    FailedError with a rank's output if it fails. Signals: see `torchrun`.
    """
    status = _status_of([*command, *flags], output)
    if status:
        raise FailedError(_failed(LAUNCHER, flags, f"{shlex.join(command)} ended with status {status}", output))


def _status_of(command: Sequence[str], output: Path) -> int:
    """Runs a command to its end, its output in a file; returns its status."""
    process: subprocess.Popen[bytes] | None = None
    stopped: int | None = None

    def forward(number: int, _: FrameType | None) -> None:
        nonlocal stopped
        if stopped is None:  # while torchrun ends its ranks, which it does within 30 s, another one would end it alone
            stopped = number
            if process is not None:
                process.send_signal(number)

    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # what torchrun chooses too, with a warning
    with output.open("w", encoding="utf-8") as file, _signal_handlers_kept():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, forward)
        # In its own process group, or Ctrl-C would reach it twice.
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_end_with_this_process(),
        )
        if stopped is not None:  # as it was being started
            process.send_signal(stopped)
        status = process.wait()
    if stopped is not None:
        raise _end_by(stopped)
    return status


def _end_with_this_process() -> Callable[[], None]:
    """Returns a function that has a child get a SIGTERM when this process ends, by SIGKILL too: nothing else would end
    a torchrun."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl  # found here: between fork and exec, little is safe

    def call() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it had ended already
            os._exit(128 + signal.SIGTERM)

    return call


def _rank_main(launcher: Path, flags: list[str], output: Path) -> None:
    """Runs one forked rank as `python launcher flags` would."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torch takes a KeyboardInterrupt for a success
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sink = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(sink, stream.fileno())
    os.close(sink)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(write_through=True)  # torchrun's -u: a rank that is killed has said what it said
    del os.environ["TORCHELASTIC_ERROR_FILE"]  # an error goes to the file, not to torch elastic, which stays silent
    sys.argv = [str(launcher), *flags]
    try:
        runpy.run_path(str(launcher), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise  # and not otherwise: torch elastic would wait for what this function returns


def _end_with_parent() -> None:
    """Ends this rank once the process that started it is gone: the server lives on as long as its forks do."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _elastic_logs_to(output: Path) -> Iterator[None]:
    """Sends the log of torch elastic to the file, as torchrun does, instead of to the terminal."""
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
    """Restores the signal handlers at its end; torch elastic sets some and never resets them."""
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
    """Returns an error made of the ranks' output: first the errors that they report, then the tracebacks of other
    ranks.

    torch elastic's own account of the failure, which says less, is left out.
    """
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    # torchrun indents a rank's output. Of ranks with the same error, the first is named.
    found = [match for line in lines if (match := re.match(r" *rank (\d+): error: (.*)", line))]
    said_by = {match[2]: match[1] for match in sorted(found, key=lambda match: -int(match[1]))}
    errors = [f"rank {rank}: error: {error}" for error, rank in reversed(said_by.items())]
    first = next((i for i, line in enumerate(lines) if line.startswith("rank ")), 0)
    last = next((i for i, line in enumerate(lines) if i > first and re.match(r"[EW]\d{4} ", line)), len(lines))
    others = [line for line in lines[max(first, last - 30) : last] if not re.match(r" *rank \d+: error: ", line)]
    message = "\n".join([*errors, *others, f"(all of it: {output})"])
    return f"`{launcher.name} {shlex.join(flags)}` failed: {how}:\n{message}"
