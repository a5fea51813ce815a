"""Runs a command with the hook in its processes, and returns its ranks' diagnosis."""

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

from rich.console import Console

from . import text
from .baseline import Comparison, compare
from .diagnosis import Diagnosis, Pictures, diagnose, read_diagnosis, write_diagnosis
from .interpreter_lock import LockWatch
from .leaving import RankWatch, dead_ranks, ended_early, why
from .options import DoctorOptions
from .rank_file import iterations_needed
from .site_folder import Settings, environment_with_hook

EXIT_FAILED = 1
_LOOK_S = 0.05
"""Seconds between two looks for ranks that are gone."""
_LINES = 5
"""Number of lines of the script in the text; JSON and page hold more."""


class ExaminationError(Exception):
    """Raised where the examined command failed, or the examination itself; bad input raises ValueError."""


def doctor(console: Console, command: Sequence[str], options: DoctorOptions) -> int:
    """Examines the command and prints the findings; returns the exit status.

    ValueError for bad input, ExaminationError if the command fails.
    """
    if not command:
        raise ValueError("name the command after the flags: -- torchrun --nproc_per_node 2 train.py")
    options.check()
    before = None if options.baseline is None else read_diagnosis(options.baseline)  # before the command runs for long
    with TemporaryDirectory(prefix="doctor-") as folder:
        diagnosis, pictures = examine(command, Path(folder), options.warmup, options.iterations, options.keep_running)
        if options.traces is not None:
            options.traces.mkdir(parents=True, exist_ok=True)
            for trace in Path(folder).glob("*_trace.json.gz"):
                shutil.copy(trace, options.traces)
    comparison, refusal = _compared(before, diagnosis)
    print_diagnosis(console, diagnosis, comparison)
    if options.json is not None:
        write_diagnosis(diagnosis, options.json)
    if options.page is not None:
        from .page import write_page

        write_page(diagnosis, pictures, comparison, options.page)
        console.print(f"page {options.page}", soft_wrap=True, markup=False, highlight=False)
    if refusal is not None:
        raise refusal
    new = comparison.new_syncs() if comparison is not None and options.fail_on is not None else []
    for change in new:
        where = text.places(change.finding)[0]
        console.print(
            f"failed: a new {change.finding['kind']} at {where}", soft_wrap=True, markup=False, highlight=False
        )
    crashed = options.keep_running and diagnosis["status"] != 0  # otherwise it was the doctor that ended the ranks
    return EXIT_FAILED if new or crashed else 0


def _compared(before: Diagnosis | None, diagnosis: Diagnosis) -> tuple[Comparison | None, ValueError | None]:
    """Returns the comparison, or the reason that there is none: a diagnosis that took long is written before that is
    an error."""
    try:
        return (None if before is None else compare(before, diagnosis)), None
    except ValueError as error:
        return None, error


def examine(
    command: Sequence[str],
    folder: Path,
    warmup: int,
    iterations: int,
    keep_running: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> tuple[Diagnosis, Pictures]:
    """Runs the command; returns its ranks' diagnosis. Its ranks write their files into `folder`, which must exist.

    ExaminationError if the command fails, ValueError if it has too few iterations.
    """
    settings = Settings(folder=str(folder), warmup=warmup, iterations=iterations, keep_running=keep_running)
    needed = iterations_needed(warmup, iterations)
    ranks = RankWatch(folder)
    with LockWatch(folder) as watch:
        status = _run(command, environment_with_hook(folder / "site", settings, environment), ranks)
    lost = ranks.lost or dead_ranks(folder)
    if lost and not ended_early(folder):  # a launcher ends the ranks beside one that raised
        raise ExaminationError(
            f"rank {lost[0]} {why(folder, lost[0])}; the command ended with status {status}, and the doctor needs "
            f"{needed} iterations"
        )
    if status and not any(folder.glob("rank*.json")) and not any(folder.glob("rank*.error")):
        raise ExaminationError(f"`{shlex.join(command)}` ended with status {status} before the doctor was done")
    try:
        diagnosis, pictures = diagnose(folder, command, needed, watch.samples)
    except ValueError as error:
        if status:
            raise ExaminationError(f"`{shlex.join(command)}` ended with status {status}: {error}") from error
        raise
    except RuntimeError as error:
        raise ExaminationError(str(error)) from error
    diagnosis["status"] = status
    if status:
        diagnosis["notes"].append(f"the command ended with status {status} after its examination.")
    return diagnosis, pictures


def print_diagnosis(console: Console, diagnosis: Diagnosis, comparison: Comparison | None = None) -> None:
    """Prints the short text."""

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    say(text.heading(diagnosis))
    for line in ("", *text.rank_lines(diagnosis), ""):
        say(line)
    for number, finding in enumerate(diagnosis["findings"][: text.SHOWN], start=1):
        for line in text.finding_lines(number, finding):
            say(line)
    left = len(diagnosis["findings"]) - text.SHOWN
    say(f"({left} more findings in --json and --page)" if left > 0 else "" if diagnosis["findings"] else "no findings")
    for line in text.prediction_lines(diagnosis):
        say(f"at best: {line}")
    say("lines of the script that take longest, ms of an iteration (interval of 95 %):")
    for ms, blocked_ms, where in text.line_rows(diagnosis, _LINES):
        say(f"   {ms}, blocked {blocked_ms}: {where}")
    for line in text.collective_lines(diagnosis):
        say(line)
    if comparison is not None:
        for line in text.comparison_lines(comparison):
            say(line)
    for note in (*diagnosis["notes"], text.overhead(diagnosis)):
        say(f"note: {note}")


def _run(command: Sequence[str], environment: Mapping[str, str], ranks: RankWatch) -> int:
    """Returns the command's exit status. Its output goes where ours goes; a signal ends it, and then this process.

    A rank that is gone without a file ends the command too: the others would wait for it in a collective.
    """

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, end)
        process = subprocess.Popen(command, env=dict(environment))
        try:
            while True:
                try:
                    return process.wait(timeout=_LOOK_S)
                except subprocess.TimeoutExpired:
                    if ranks.look():
                        process.terminate()
                        ranks.end_others()
                        return process.wait()
        except BaseException:
            process.terminate()  # torchrun ends its ranks; Ctrl-C has reached it already
            process.wait()
            raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
