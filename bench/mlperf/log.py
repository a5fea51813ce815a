"""The MLPerf log of one run: every event in the order that the rules ask for, and the official check of the file.

Keys, values and order follow the reference (mlcommons/training, recommendation_v2/torchrec_dlrm) and ruleset 6.0.0 of
mlperf_logging.compliance_checker, the newest that knows this benchmark.
"""

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlperf_logging.mllog import constants
from mlperf_logging.mllog.mllog import MLLogger

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.config import MLPerfConfig
from dlrm_bench.dlrm.config import OptimizerConfig

RunStatus = Literal["success", "aborted"]

_PREFIX = ":::MLLOG "


class _LogFile(logging.FileHandler):
    """Flushes after each event; keeps in memory what the file may lose, and the first failure in place of a
    traceback."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, mode="x", encoding="utf-8")
        self.lines: list[str] = []
        self.failure: OSError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{self.format(record)}\n")
        super().emit(record)

    def write(self, lines: str) -> None:
        """Adds lines that are no event."""
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
        except OSError as error:  # what the buffer still holds does not fit either
            self.failure = self.failure or error


class MLPerfLog:
    """Writes the MLPerf events of one run to `path`, which must not exist yet (FileExistsError).

    Global rank 0 passes a path, every other rank None, which makes each method do nothing. An event has reached the
    file when its method returns. Any thread may call close(), after which nothing more is logged. `epoch_num` is
    always the fraction of the epoch, which has `train_samples`, that has been trained, 0 to 1.
    """

    def __init__(self, path: Path | None) -> None:
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

    def go_on(self, lines: str) -> None:
        """Begins with the lines of an interrupted run, whose training goes on: nothing before an evaluation is logged
        again."""
        self._write(lines)
        self._running = True

    def note(self, text: str) -> None:
        """Adds a line for people, which the checkers leave out."""
        self._write(f"# {text}\n")

    def _write(self, lines: str) -> None:
        with self._lock:
            if self._file is not None and not self._closed:
                self._file.write(lines)

    @property
    def text(self) -> str:
        """The log so far, whatever has become of the file."""
        return "" if self._file is None else "".join(self._file.lines)

    @property
    def failure(self) -> OSError | None:
        """Why the file does not have all of it, such as a full disk; None if it has."""
        return None if self._file is None else self._file.failure

    def cache_clear(self, value: bool) -> None:
        """Whether the page cache was dropped before the run."""
        self._log(self._mllog.event, constants.CACHE_CLEAR, value)

    def init_start(self) -> None:
        """Begins the initialisation, which may touch no training data."""
        self._log(self._mllog.start, constants.INIT_START)

    def submission(self, config: MLPerfConfig, platform: str) -> None:
        """Who submits what; `platform` names the system where config.platform does not."""
        for key, value in (
            (constants.SUBMISSION_BENCHMARK, constants.DLRM_DCNv2),
            (constants.SUBMISSION_ORG, config.org),
            (constants.SUBMISSION_DIVISION, config.division),
            (constants.SUBMISSION_STATUS, config.status),
            (constants.SUBMISSION_PLATFORM, config.platform or platform),
        ):
            self._log(self._mllog.event, key, value)

    def hyperparameters(
        self, *, seed: int, global_batch_size: int, optimizer: OptimizerConfig, train_samples: int, eval_samples: int
    ) -> None:
        """Everything that the closed division fixes or asks to know; sizes in samples."""
        for key, value in (
            (constants.SEED, seed),
            (constants.GLOBAL_BATCH_SIZE, global_batch_size),
            (constants.OPT_NAME, _optimizer_name(optimizer)),
            (constants.OPT_BASE_LR, optimizer.learning_rate),
            (constants.OPT_ADAGRAD_LR_DECAY, 0),
            (constants.OPT_WEIGHT_DECAY, 0),
            (constants.OPT_ADAGRAD_INITIAL_ACCUMULATOR_VALUE, 0),
            (constants.OPT_ADAGRAD_EPSILON, optimizer.eps),
            (constants.OPT_LR_WARMUP_STEPS, 0),
            (constants.OPT_LR_DECAY_START_STEP, 0),
            (constants.OPT_LR_DECAY_STEPS, 0),
            (constants.GRADIENT_ACCUMULATION_STEPS, 1),
            (constants.TRAIN_SAMPLES, train_samples),
            (constants.EVAL_SAMPLES, eval_samples),
        ):
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
        """Begins the only epoch."""
        self._log(self._mllog.start, constants.EPOCH_START, epoch_num=0)

    def eval_start(self, epoch_num: float) -> None:
        """Begins an evaluation."""
        with self._lock:
            self._open_eval = epoch_num
            self._log(self._mllog.start, constants.EVAL_START, epoch_num=epoch_num)

    def eval_accuracy(self, epoch_num: float, auc: float) -> None:
        """The AUC, 0 to 1, of the evaluation under way."""
        self._log(self._mllog.event, constants.EVAL_ACCURACY, auc, epoch_num=epoch_num)

    def eval_stop(self, epoch_num: float) -> None:
        """Ends an evaluation."""
        with self._lock:
            self._open_eval = None
            self._log(self._mllog.end, constants.EVAL_STOP, epoch_num=epoch_num)

    def close(self, status: RunStatus, epoch_num: float) -> None:
        """Ends an evaluation left open, the run (with its status) and the epoch; of several calls the first one counts.

        status: 'aborted' after a missed target, an interrupt, a divergence or an error; 'success' otherwise, also where
        the run had no target. Where the run has not started, the file is closed without a run_stop.
        """
        with self._lock:
            if self._closed:
                return
            if self._open_eval is not None:
                self._log(self._mllog.end, constants.EVAL_STOP, epoch_num=self._open_eval)
            if self._running:
                # run_stop tells how far too, as in NVIDIA's logs: a run without evaluations says it nowhere before.
                self._log(self._mllog.end, constants.RUN_STOP, status=status, epoch_num=epoch_num)
                self._log(self._mllog.end, constants.EPOCH_STOP, epoch_num=epoch_num)
            self._closed = True
            for handler in self._logger.handlers:
                handler.close()

    def _log(self, write: Callable[..., None], key: str, value: Any = None, **metadata: float | str) -> None:
        with self._lock:
            if not self._closed:
                write(key, value, metadata=metadata)


def _optimizer_name(optimizer: OptimizerConfig) -> str:
    """`adagrad`, the only one that the closed division knows, or both where tables have another optimizer."""
    return "adagrad" if optimizer.embedding == "adagrad" else f"{optimizer.embedding} for tables, adagrad"


@dataclass(frozen=True, slots=True)
class ComplianceVerdict:
    """What the compliance checker says about one log."""

    passed: bool
    """The checker found nothing, and the run ended with status success."""
    output: str
    """The checker's text, and ours below it where we add a reason to fail."""


def check_compliance(log: Path, ruleset: str = "6.0.0") -> ComplianceVerdict:
    """Runs MLPerf's compliance checker over `log` in a process of its own; it leaves no files behind.

    The checker passes an aborted run whose AUC had reached the target once (or, in the open division, was evaluated
    at all). Here such a log fails. ValueError where the file is missing or the checker does not know the ruleset.
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
        return ComplianceVerdict(False, process.stdout)
    status = _run_status(log)
    if status != constants.SUCCESS:
        return ComplianceVerdict(False, f"{process.stdout}ERROR - run_stop has status {status!r}, not 'success'\n")
    return ComplianceVerdict(True, process.stdout)


def _run_status(log: Path) -> str | None:
    """Status of the last run_stop in a log whose lines are all well-formed."""
    status = None
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith(_PREFIX):
            event = json.loads(line.removeprefix(_PREFIX))
            if event["key"] == constants.RUN_STOP:
                status = event["metadata"]["status"]
    return status
