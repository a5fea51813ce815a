"""Reads MLPerf logs: a row for each run of a result_*.txt by any author.

Only events of a run's course are read. Other lines are skipped; malformed events are counted. A file of any size is
read through a memory map, event by event.
"""

import json
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from rich import box
from rich.table import Table

from dlrm_bench.dlrm.benchmark import Benchmark
from dlrm_bench.dlrm.benchmarks import of_mlperf_log

_MARKER = b":::MLLOG"
_LONGEST_EVENT = 1 << 20
"""Maximum bytes of an event. The longest event of a published log is below 10 kB; a longer line is damage."""


class Event(NamedTuple):
    """A line of a log."""

    key: str
    time_ms: float
    """Unix time."""
    value: Any
    metadata: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Block:
    """Training between two evaluations, in a log that counts samples."""

    start_ms: float
    stop_ms: float
    samples: int
    """Number of samples trained in the block."""


@dataclass(slots=True, kw_only=True)
class MLPerfRun:
    """One run. None for a value that the log lacks."""

    path: Path
    benchmark: str | None = None
    org: str | None = None
    division: str | None = None
    availability: str | None = None
    """submission_status: onprem, cloud, research or preview."""
    platform: str | None = None
    seed: int | None = None
    """The last seed, if the log has several."""
    global_batch_size: int | None = None
    train_samples: int | None = None
    start_ms: float | None = None
    """Unix time of run_start."""
    stop_ms: float | None = None
    """Unix time of run_stop."""
    status: str = "unfinished"
    """Status of run_stop, 'success' or 'aborted'; 'unfinished' without a run_stop."""
    epoch_num: float | None = None
    """Largest fraction of the epoch that any event names."""
    auc: float | None = None
    """AUC of the last evaluation."""
    target_ms: float | None = None
    """Unix time of the first AUC that reached the target of the closed division."""
    blocks: list[Block] = field(default_factory=list)
    """Blocks that began and ended; empty if the log counts epochs."""
    evals_ms: list[float] = field(default_factory=list)
    """Duration of every evaluation that began and ended."""
    eval_epochs: list[float] = field(default_factory=list)
    """epoch_num of every evaluation that began, if the log has it."""
    malformed_lines: int = 0
    """Number of malformed events in the whole file."""

    @property
    def known(self) -> Benchmark | None:
        """The benchmark, if this program has it. A name that only the reference's logs use is accepted only with
        MLPerf's data: another model may have the same name."""
        found = of_mlperf_log(self.benchmark)
        if found is None or found.ruleset is None or self.benchmark == found.name:
            return found
        return found if self.train_samples == found.ruleset.train_samples else None

    @property
    def iterations(self) -> int | None:
        """Training iterations: epoch_num * train_samples / global_batch_size."""
        if self.epoch_num is None or not self.train_samples or not self.global_batch_size:
            return None
        return round(self.epoch_num * self.train_samples / self.global_batch_size) or None

    @property
    def train_ms_per_iteration(self) -> float | None:
        """(run_stop - run_start - all evaluations) / iterations, in milliseconds; if the log has blocks, the time
        within the blocks that began before the target was reached, per iteration."""
        if self.blocks and self.global_batch_size:
            blocks = [b for b in self.blocks if self.target_ms is None or b.start_ms < self.target_ms]
            samples = sum(block.samples for block in blocks)
            trained_ms = sum(block.stop_ms - block.start_ms for block in blocks)
            return trained_ms * self.global_batch_size / samples if samples else None
        if self.start_ms is None or self.stop_ms is None or self.iterations is None:
            return None
        return (self.stop_ms - self.start_ms - sum(self.evals_ms)) / self.iterations

    @property
    def time_to_train_minutes(self) -> float | None:
        """run_stop - run_start, MLPerf's score, if the run succeeded and was evaluated."""
        if self.start_ms is None or self.stop_ms is None or self.status != "success" or self.auc is None:
            return None
        return (self.stop_ms - self.start_ms) / 60_000

    @property
    def minutes_to_target(self) -> float | None:
        """Minutes from run_start to the first AUC that reached MLPerf's target; reference logs continue after it."""
        if self.start_ms is None or self.target_ms is None:
            return None
        return (self.target_ms - self.start_ms) / 60_000

    @property
    def seconds_before_training(self) -> float | None:
        """Seconds from run_start to the first block; None if the log has none."""
        if self.start_ms is None or not self.blocks:
            return None
        return (self.blocks[0].start_ms - self.start_ms) / 1000

    @property
    def eval_seconds(self) -> float | None:
        """Mean duration of an evaluation."""
        return sum(self.evals_ms) / len(self.evals_ms) / 1000 if self.evals_ms else None


def read_mlperf_log(path: Path) -> list[MLPerfRun]:
    """Returns all runs of a log, in order: a run begins at its run_start, or at init_start if it never started.

    ValueError, naming the file, if it cannot be read or holds no run. A damaged line loses only its own event.
    """
    reader = _Reader(path)
    try:
        with path.open("rb") as file:
            for line in _event_lines(file.fileno()):
                reader.read(line)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name an MLPerf log") from error
    if not reader.runs:
        raise ValueError(f"{path} holds no MLPerf run: no well-formed ':::MLLOG' event begins one")
    for run in reader.runs:
        run.malformed_lines = reader.malformed
    return reader.runs


def read_events(path: Path) -> Iterator[Event]:
    """Yields all well-formed events of a log, in file order; ValueError, naming the file, if it cannot be read."""
    try:
        with path.open("rb") as file:
            yield from (event for line in _event_lines(file.fileno()) if (event := _parse(line)) is not None)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name an MLPerf log") from error


LOG_COLUMNS = (
    "log",
    "org",
    "global batch",
    "ms / iteration",
    "evals",
    "s / eval",
    "time to train, min",
    "s before training",
    "AUC",
    "status",
)


def logs_table(runs: Sequence[MLPerfRun]) -> Table:
    """Returns a table with a row for each run."""
    table = Table(*LOG_COLUMNS, title="MLPerf logs", title_justify="left", box=box.SIMPLE_HEAD)
    for run in runs:
        table.add_row(*log_row(run))
    return table


def log_row(run: MLPerfRun) -> tuple[str, ...]:
    """Returns a run as text, one cell for each of LOG_COLUMNS; '-' for a value that the log lacks."""
    numbers = (
        (run.global_batch_size, "d"),
        (run.train_ms_per_iteration, ".3f"),
        (len(run.evals_ms), "d"),
        (run.eval_seconds, ".2f"),
        (run.time_to_train_minutes if run.stop_ms is not None else run.minutes_to_target, ".3f"),
        (run.seconds_before_training, ".1f"),
        (run.auc, ".5f"),
    )
    cells = ("-" if value is None else format(value, form) for value, form in numbers)
    return (run.path.name, run.org or "-", *cells, run.status)


def _event_lines(descriptor: int) -> Iterator[bytes]:
    """Yields the bytes after each marker up to the end of its line, cut at _LONGEST_EVENT."""
    try:
        content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped
        return
    with content:
        position = content.find(_MARKER)
        while position >= 0:
            begin = position + len(_MARKER)
            end = content.find(b"\n", begin, begin + _LONGEST_EVENT)
            end = end if end >= 0 else min(begin + _LONGEST_EVENT, len(content))
            yield content[begin:end]
            position = content.find(_MARKER, end)


class _Reader:
    """Builds runs from events in file order."""

    def __init__(self, path: Path) -> None:
        self.runs: list[MLPerfRun] = []
        self.malformed = 0
        self._path = path
        self._initialised = False  # whether the latest run has its init_start, which may come after the header
        self._eval_start: float | None = None
        self._block: tuple[float, float] | None = None

    def read(self, line: bytes) -> None:
        event = _parse(line)
        if event is None:
            self.malformed += 1
            return
        key, time, value, metadata = event
        run = self.runs[-1] if self.runs else None
        if run is None or self._begins_another(run, key):
            if key not in _BEGINNINGS and key not in _HEADER:
                return  # the middle of a run whose beginning is lost
            # The header of a run that died before its run_start may be overwritten already by that of the next one.
            headed = run is not None and (key == "run_start" or run.start_ms is None)
            header = {name: getattr(run, name) for name, _ in _HEADER.values()} if headed else {}
            run = MLPerfRun(path=self._path, **header)
            self.runs.append(run)
            self._initialised, self._eval_start, self._block = False, None, None
        self._initialised |= key == "init_start"
        if key in _HEADER:
            name, kind = _HEADER[key]
            if isinstance(value, kind) and not isinstance(value, bool):
                setattr(run, name, value)
        elif run.stop_ms is None:
            self._follow(run, key, time, value, metadata)

    def _begins_another(self, run: MLPerfRun, key: str) -> bool:
        """Whether `key` belongs to a run after `run`: a run may die anywhere, and the file may continue with the next
        run."""
        if key in _BEGINNINGS and run.start_ms is not None:
            return True
        if key in _HEADER and run.stop_ms is not None:
            return True
        if key == "submission_benchmark" and run.start_ms is not None and run.benchmark is not None:
            return True  # values of a header may be logged late, but its name only once
        return key == "init_start" and run.benchmark is not None and self._initialised

    def _follow(self, run: MLPerfRun, key: str, time: float, value: Any, metadata: dict[str, Any]) -> None:
        """Processes an event between run_start and run_stop."""
        epoch, samples = metadata.get("epoch_num"), metadata.get("samples_count")
        if not is_number(epoch) and is_number(samples) and run.train_samples:
            epoch = samples / run.train_samples
        if key == "run_start":
            run.start_ms = time
        elif key == "eval_start":
            self._eval_start = time
            run.eval_epochs += [float(epoch)] if is_number(epoch) else []
        elif key == "eval_accuracy":
            run.auc = float(value) if is_number(value) else None
            self._judge(run, time)
        elif key == "block_start":
            self._block = (time, float(samples)) if is_number(samples) else None
        elif key == "block_stop" and self._block is not None and is_number(samples):
            (start, before), self._block = self._block, None
            run.blocks.append(Block(start_ms=start, stop_ms=time, samples=round(samples - before)))
        elif key == "eval_stop" and self._eval_start is not None:
            run.evals_ms.append(time - self._eval_start)
            self._eval_start = None
        elif key == "run_stop":
            run.stop_ms = time
            run.status = str(metadata.get("status", "unknown"))
        if is_number(epoch) and run.start_ms is not None:
            run.epoch_num = max(run.epoch_num or 0.0, float(epoch))

    def _judge(self, run: MLPerfRun, time: float) -> None:
        """Processes the AUC of an evaluation."""
        rules = run.known.ruleset if run.known is not None else None
        if run.target_ms is None and rules is not None and (run.auc or 0.0) >= rules.target_auc:
            run.target_ms = time


_HEADER: dict[str, tuple[str, type]] = {
    "submission_benchmark": ("benchmark", str),
    "submission_org": ("org", str),
    "submission_division": ("division", str),
    "submission_status": ("availability", str),
    "submission_platform": ("platform", str),
    "seed": ("seed", int),
    "global_batch_size": ("global_batch_size", int),
    "train_samples": ("train_samples", int),
}


_BEGINNINGS = ("init_start", "run_start")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # nor nan


def _parse(line: bytes) -> Event | None:
    """Returns the event of a line, or None if the line is not one."""
    try:
        event = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("key"), str) or not is_number(event.get("time_ms")):
        return None
    metadata = event.get("metadata")
    known = metadata if isinstance(metadata, dict) else {}
    return Event(event["key"], float(event["time_ms"]), event.get("value"), known)
