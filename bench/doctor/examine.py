"""dlrm-bench doctor -- COMMAND: runs the command with the hook in it, and says what its ranks found.

dlrm-bench doctor --page doctor.html -- torchrun --nproc_per_node 8 train.py ...
"""

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.table import Table

from dlrm_bench.bench.doctor import text
from dlrm_bench.bench.doctor.baseline import Comparison, compare
from dlrm_bench.bench.doctor.diagnosis import Diagnosis, Timeline, diagnose, read_diagnosis, write_diagnosis
from dlrm_bench.bench.doctor.interpreter_lock import LockWatch
from dlrm_bench.bench.doctor.rank_file import MARKED, SETTLING, TRACED
from dlrm_bench.bench.doctor.site_folder import Settings, environment_with_hook
from dlrm_bench.dlrm.runtime.command_line import EXIT_FAILED, FailedError

NEW_SYNCS = "new-syncs"


def doctor(
    console: Console,
    command: Sequence[str],
    *,
    warmup: int,
    iterations: int,
    keep_running: bool,
    json: Path | None,
    page: Path | None,
    traces: Path | None,
    baseline: Path | None,
    fail_on: str | None,
) -> int:
    """Examines the command and prints what is found; returns the exit status. ValueError for bad input."""
    if not command:
        raise ValueError("name the command: dlrm-bench doctor -- torchrun --nproc_per_node 2 train.py")
    if warmup < 1 or iterations < 1:
        raise ValueError(f"--warmup {warmup} and --iterations {iterations}: at least one of each is needed")
    if fail_on not in (None, NEW_SYNCS):
        raise ValueError(f"--fail-on {fail_on!r} is unknown: it takes {NEW_SYNCS}")
    if fail_on is not None and baseline is None:
        raise ValueError(f"--fail-on {NEW_SYNCS} needs --baseline, an earlier run's --json")
    before = None if baseline is None else read_diagnosis(baseline)  # before the command runs for long
    with TemporaryDirectory(prefix="dlrm-bench-doctor-") as folder:
        diagnosis, timeline = examine(command, Path(folder), warmup, iterations, keep_running)
        if traces is not None:
            traces.mkdir(parents=True, exist_ok=True)
            for trace in Path(folder).glob("*_trace.json.gz"):
                shutil.copy(trace, traces)
    comparison = None if before is None else compare(before, diagnosis)
    print_diagnosis(console, diagnosis, comparison)
    if json is not None:
        write_diagnosis(diagnosis, json)
    if page is not None:
        from dlrm_bench.bench.doctor.page import write_page

        write_page(diagnosis, timeline, comparison, page)
        console.print(f"page {page}", soft_wrap=True, markup=False, highlight=False)
    new = comparison.new_syncs() if comparison is not None and fail_on is not None else []
    for change in new:
        where = text.places(change.finding)[0]
        console.print(
            f"failed: a new {change.finding['kind']} at {where}", soft_wrap=True, markup=False, highlight=False
        )
    return EXIT_FAILED if new else 0


def examine(
    command: Sequence[str],
    folder: Path,
    warmup: int,
    iterations: int,
    keep_running: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> tuple[Diagnosis, Timeline]:
    """Runs the command; what its ranks found. Its ranks leave their files in `folder`, which must be there.

    FailedError if the command fails, ValueError if it has too few iterations.
    """
    settings = Settings(folder=str(folder), warmup=warmup, iterations=iterations, keep_running=keep_running)
    with LockWatch(folder) as watch:
        status = _run(command, environment_with_hook(folder / "site", settings, environment))
    needed = warmup + iterations + SETTLING + TRACED + SETTLING + MARKED
    if status and not any(folder.glob("rank*.*")):
        raise FailedError(f"`{shlex.join(command)}` ended with status {status} before the doctor was done")
    try:
        diagnosis, timeline = diagnose(folder, command, needed, watch.samples)
    except ValueError as error:
        if status:
            raise FailedError(f"`{shlex.join(command)}` ended with status {status}: {error}") from error
        raise
    except RuntimeError as error:
        raise FailedError(str(error)) from error
    if status:
        diagnosis["notes"].append(f"the command ended with status {status} after its examination.")
    return diagnosis, timeline


def print_diagnosis(console: Console, diagnosis: Diagnosis, comparison: Comparison | None = None) -> None:
    """Prints the short text."""

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    say(text.heading(diagnosis))
    table = Table(*text.COLUMNS, box=box.SIMPLE_HEAD)
    for row in text.rank_rows(diagnosis):
        table.add_row(*row)
    console.print(table)
    for number, finding in enumerate(diagnosis["findings"][: text.SHOWN], start=1):
        for line in text.finding_lines(number, finding):
            say(line)
    left = len(diagnosis["findings"]) - text.SHOWN
    say(f"({left} more findings in --json and --page)" if left > 0 else "" if diagnosis["findings"] else "no findings")
    for line in text.prediction_lines(diagnosis):
        say(f"at best: {line}")
    if comparison is not None:
        for line in text.comparison_lines(comparison):
            say(line)
    for note in (*diagnosis["notes"], text.overhead(diagnosis)):
        say(f"note: {note}")


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The command's exit status. What it prints goes where ours goes; a signal ends it, and then this process."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, end)
        process = subprocess.Popen(command, env=dict(environment))
        try:
            return process.wait()
        except BaseException:
            process.terminate()  # torchrun ends its ranks; Ctrl-C has reached it already
            process.wait()
            raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
