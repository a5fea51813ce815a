"""The MLPerf log of one run: every event in the order that the rules require, and the official check of the file.

A benchmark's ruleset has its own keys.
"""

import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlperf_logging.mllog import constants
from mlperf_logging.mllog.mllog import MLLogger

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.config import MLPerfConfig
from dlrm_bench.bench.mlperf.published_logs import read_mlperf_log

RunStatus = Literal["success", "aborted"]


class _LogFile(logging.FileHandler):
    """Flushes after each event; keeps in memory the lines that the file may lose, and the first failure instead of a
    traceback."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mode="x", encoding="utf-8")
        self.lines: list[str] = []
        self.failure: OSError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{self.format(record)}\n")
        super().emit(record)

    def write(self, lines: str) -> None:
        """Adds lines that are not events."""
        self.lines.append(lines)
        try:
            assert self.stream is not None
            self.stream.write(lines)
            self.flush()
        except OSError as error:
            self.failure = self.failure or error

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.failure = self.failure or error

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # the rest of the buffer does not fit either
            self.failure = self.failure or error


class MLPerfLog:
    """Writes the MLPerf events of one run to `path`, which must not exist yet (FileExistsError).

    Global rank 0 passes a path. Every other rank passes None, so that no method does anything. An event has reached the
    file when its method returns. Any thread may call close(), after which nothing more is logged. `epoch_num` is always
    the trained fraction of the epoch of `train_samples` samples, 0 to 1.

    counted: train_samples if the ruleset counts samples (Ruleset.counts_samples). Events then have samples_count beside
    epoch_num, and the training between two evaluations is a block, instead of one epoch.
    """

    def __init__(self, path: Path | None, counted: int | None = None) -> None:
        # A Logger made directly is in no registry and has no parent: instances cannot write into each other's files,
        # and nothing reaches the root logger or the console, as mllog's own module-level logger would.
        logger = logging.Logger("dlrm_bench.bench.mlperf.log", level=logging.INFO)
        self._file = None if path is None else _LogFile(path)
        if self._file is not None:
            logger.addHandler(self._file)
        # mllog uses root_dir as a regular expression, to make the paths of call sites relative. The stack offset
        # names the caller of our public methods as the call site: one step for each of event, _log and the method.
        self._mllog = MLLogger(logger, default_stack_offset=3, root_dir=re.escape(str(ROOT)))
        self._logger = logger
        self._lock = threading.RLock()
        self._closed = path is None
        self._running = False
        self._open_eval: float | None = None
        self._eval_begun = 0.0
        self.evaluation_s: list[float] = []
        """Seconds from eval_start to eval_stop of each evaluation, also where nothing is logged."""
        self._counted = counted
        self._in_block = False

    def go_on(self, lines: str) -> None:
        """Starts with the lines of an interrupted run, whose training continues: no event before an evaluation is
        logged again."""
        self._write(lines)
        self._running = True
        self._in_block = lines.rfind(f'"{constants.BLOCK_START}"') > lines.rfind(f'"{constants.BLOCK_STOP}"')

    def note(self, text: str) -> None:
        """Adds a line for human readers, which the checkers ignore."""
        self._write(f"# {text}\n")

    def _write(self, lines: str) -> None:
        with self._lock:
            if self._file is not None and not self._closed:
                self._file.write(lines)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the log."""
        return self._file is not None

    @property
    def text(self) -> str:
        """The log so far, even if the file could not be written."""
        return "" if self._file is None else "".join(self._file.lines)

    @property
    def failure(self) -> OSError | None:
        """The error, such as a full disk, because of which the file lacks a part of the log; None if the file is
        complete."""
        return None if self._file is None else self._file.failure

    def cache_clear(self, value: bool) -> None:
        """Logs whether the page cache was dropped before the run."""
        self._log(self._mllog.event, constants.CACHE_CLEAR, value)

    def init_start(self) -> None:
        """Begins the initialisation, which may touch no training data."""
        self._log(self._mllog.start, constants.INIT_START)

    def submission(self, benchmark: str, config: MLPerfConfig, platform: str) -> None:
        """Logs the submitter and the submission; `platform` names the system if config.platform does not."""
        for key, value in (
            (constants.SUBMISSION_BENCHMARK, benchmark),
            (constants.SUBMISSION_ORG, config.org),
            (constants.SUBMISSION_DIVISION, config.division),
            (constants.SUBMISSION_STATUS, config.status),
            (constants.SUBMISSION_PLATFORM, config.platform or platform),
        ):
            self._log(self._mllog.event, key, value)

    def hyperparameters(self, values: Sequence[tuple[str, Any]]) -> None:
        """Logs everything that the closed division fixes or requires, as keys and values."""
        for key, value in values:
            self._log(self._mllog.event, key, value)

    def init_stop(self) -> None:
        """Ends the initialisation."""
        self._log(self._mllog.end, constants.INIT_STOP)

    def run_start(self) -> None:
        """Begins the timed run; the first training sample may be read from here on."""
        with self._lock:
            self._running = True
            self._log(self._mllog.start, constants.RUN_START)

    def epoch_start(self) -> None:
        """Begins the only epoch, or the first block."""
        if self._counted is None:
            self._log(self._mllog.start, constants.EPOCH_START, epoch_num=0)
        else:
            self.block_start(0.0)

    def block_go_on(self, epoch_num: float) -> None:
        """Begins a block, unless one is open: training goes on after the log of an interrupted run."""
        with self._lock:
            if not self._in_block:
                self.block_start(epoch_num)

    def block_start(self, epoch_num: float) -> None:
        """Begins a block, which the next evaluation or the run's end stops; does nothing if the log counts epochs."""
        with self._lock:
            if self._counted is not None:
                self._in_block = True
                self._log(self._mllog.start, constants.BLOCK_START, **self._done(epoch_num))

    def eval_start(self, epoch_num: float) -> None:
        """Begins an evaluation."""
        with self._lock:
            if self._in_block:
                self._in_block = False
                self._log(self._mllog.end, constants.BLOCK_STOP, **self._done(epoch_num))
            self._open_eval, self._eval_begun = epoch_num, time.monotonic()
            self._log(self._mllog.start, constants.EVAL_START, **self._done(epoch_num))

    def eval_accuracy(self, epoch_num: float, auc: float) -> None:
        """Logs the AUC, 0 to 1, of the current evaluation."""
        self._log(self._mllog.event, constants.EVAL_ACCURACY, auc, **self._done(epoch_num))

    def eval_stop(self, epoch_num: float) -> None:
        """Ends an evaluation."""
        with self._lock:
            self._open_eval = None
            self.evaluation_s.append(time.monotonic() - self._eval_begun)
            self._log(self._mllog.end, constants.EVAL_STOP, **self._done(epoch_num))

    def close(self, status: RunStatus, epoch_num: float) -> None:
        """Ends an open evaluation, the run (with its status) and the epoch; calls after the first have no effect.

        status: 'aborted' after a missed target, an interrupt, a divergence or an error; 'success' otherwise, also for a
        run without a target. If the run has not started, the file is closed without a run_stop.
        """
        with self._lock:
            if self._closed:
                return
            if self._open_eval is not None:
                self._log(self._mllog.end, constants.EVAL_STOP, **self._done(self._open_eval))
            if self._running:
                if self._in_block:
                    self._log(self._mllog.end, constants.BLOCK_STOP, **self._done(epoch_num))
                # run_stop has the progress too, as in NVIDIA's logs: a run without evaluations states it nowhere else.
                self._log(self._mllog.end, constants.RUN_STOP, status=status, **self._done(epoch_num))
                if self._counted is None:
                    self._log(self._mllog.end, constants.EPOCH_STOP, epoch_num=epoch_num)
            self._closed = True
            for handler in self._logger.handlers:
                handler.close()

    def _done(self, epoch_num: float) -> dict[str, float]:
        """Returns the fields of an event on the training's progress."""
        if self._counted is None:
            return {constants.EPOCH_NUM: epoch_num}
        return {constants.SAMPLES_COUNT: round(epoch_num * self._counted), constants.EPOCH_NUM: epoch_num}

    def _log(self, write: Callable[..., None], key: str, value: Any = None, **metadata: float | str) -> None:
        with self._lock:
            if not self._closed:
                write(key, value, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ComplianceVerdict:
    """The compliance checker's verdict on one log."""

    passed: bool
    """Whether the checker found nothing, and the run ended with status success."""
    output: str
    """The checker's text, followed by ours if we add a reason to fail."""
    of_data: tuple[str, ...] = ()
    """Keys that alone made the log fail, because the rules accept only the values of MLPerf's own data; empty if it
    passed, or failed for another reason too."""


def check_compliance(log: Path, ruleset: str, pinned: frozenset[str] = frozenset()) -> ComplianceVerdict:
    """Runs MLPerf's compliance checker over `log` in a new process; it leaves no files behind.

    The checker passes an aborted run whose AUC had reached the target once (or, in the open division, was evaluated at
    all). Here such a log fails. pinned: keys for ComplianceVerdict.of_data. ValueError if the file is missing, or if
    the checker does not know the ruleset.
    """
    if not log.is_file():
        raise ValueError(f"{log} is not a file: name the MLPerf log to check")
    checker = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", ruleset]
    with tempfile.TemporaryDirectory() as scratch:  # the checker writes into its working directory
        process = subprocess.run(
            [*checker, "--log_output", os.devnull, str(log.resolve())],
            cwd=scratch,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    if process.returncode == 2:  # argparse refuses its arguments
        raise ValueError(f"the compliance checker refuses ruleset {ruleset!r}:\n{process.stdout}")
    # Only the word proves that the check ran to its end; a crash also has output.
    if process.returncode != 0 or "INFO - SUCCESS" not in process.stdout:
        refused = _refused_keys(process.stdout, pinned)
        of_data = refused if refused and read_mlperf_log(log)[-1].status == constants.SUCCESS else ()
        return ComplianceVerdict(False, process.stdout, of_data)
    status = read_mlperf_log(log)[-1].status
    if status != constants.SUCCESS:
        return ComplianceVerdict(False, f"{process.stdout}ERROR - run_stop has status {status!r}, not 'success'\n")
    return ComplianceVerdict(True, process.stdout)


def _refused_keys(output: str, pinned: frozenset[str]) -> tuple[str, ...]:
    """Returns the keys whose values the checker refuses; empty where it refuses another key, or something else."""
    messages = re.split(r"^(?:INFO|ERROR) - ", output, flags=re.MULTILINE)
    found = [part for part in messages if part.startswith("WARNING") or "WARNING - " in part]
    findings = "".join(found).partition("WARNING - ")[2].split("-" * 30 + "\n")
    keys = [re.match(r"\s*CHECK for '(\w+)' failed in line", finding) for finding in findings]
    if not all(key is not None and key[1] in pinned for key in keys):
        return ()
    return tuple(dict.fromkeys(key[1] for key in keys if key is not None))
