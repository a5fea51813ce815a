"""Contradictions within a result log: MLPerf's checkers test the presence of events, and hardly their times.

A run takes the time from run_start to run_stop, so a log whose times go back, or that ends before it begins or before
its last evaluation, shows nothing about the time of its training.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_bench.bench.mlperf.published_logs import Event, is_number, read_events
from dlrm_bench.bench.mlperf.submission.package import Finding
from dlrm_bench.dlrm.benchmark import Ruleset
from dlrm_bench.dlrm.benchmarks import of_mlperf_log

_CHANCE = 0.5
"""AUC of a model that has learned nothing: below any target, in any division."""
_OF_EVALUATIONS = ("eval_start", "eval_accuracy", "eval_stop")


def senseless(log: Path) -> Iterator[Finding]:
    """Yields contradictions between the well-formed events, in their order, of a log's only run.

    ValueError if the file cannot be read.
    """
    course = _Course(log.name)
    for event in read_events(log):
        yield from course.follow(event)
    yield from course.end()


@dataclass(slots=True)
class _Course:
    """The state of a run after the events so far."""

    name: str
    division: str | None = None
    rules: Ruleset | None = None
    """The ruleset of its benchmark; None until the log names a known one."""
    last: Event | None = None
    start_ms: float | None = None
    stop_ms: float | None = None
    status: str | None = None
    evaluating: bool = False
    done: float | None = None
    """Samples or epochs, as the rules count, that were trained before the latest evaluation began."""
    in_block: bool = False
    aucs: list[float] = field(default_factory=list)
    went_back: bool = False

    def follow(self, event: Event) -> Iterator[Finding]:
        key, time, value, metadata = event
        if self.last is not None and time < self.last.time_ms and not self.went_back:
            self.went_back = True  # reported once
            yield self._wrong(f"its times go back: {key} is {self.last.time_ms - time:g} ms before {self.last.key}")
        self.last = event
        if key == "submission_division":
            self.division = value if isinstance(value, str) else None
        elif key == "submission_benchmark":
            benchmark = of_mlperf_log(value if isinstance(value, str) else None)
            self.rules = None if benchmark is None else benchmark.ruleset
        elif key == "run_start":
            self.start_ms = time
        elif key == "run_stop":
            yield from self._stop(time, metadata)
        elif key in ("block_start", "block_stop"):
            if self.in_block == (key == "block_start"):
                yield self._wrong(f"{key} is {'within' if self.in_block else 'outside of'} a block")
            self.in_block = key == "block_start"
        elif key in _OF_EVALUATIONS:
            yield from self._evaluate(event)

    def _stop(self, time: float, metadata: dict[str, Any]) -> Iterator[Finding]:
        if self.start_ms is None:
            yield self._wrong("run_stop is before run_start")
        elif self.stop_ms is not None:
            yield self._wrong("it has two run_stop events")
        elif time <= self.start_ms:
            yield self._wrong(f"run_stop is {self.start_ms - time:g} ms before run_start: a run takes time")
        if self.evaluating:
            yield self._wrong("run_stop is within an evaluation")
        self.stop_ms, self.status = time, metadata.get("status")

    def _evaluate(self, event: Event) -> Iterator[Finding]:
        key, _, value, metadata = event
        if self.start_ms is None:
            yield self._wrong(f"{key} is before run_start")
        elif self.stop_ms is not None:
            yield self._wrong(f"{key} is after run_stop: a run ends with its last evaluation or later")
        if key == "eval_start":
            if self.evaluating:
                yield self._wrong("eval_start is within an evaluation")
            if self.in_block:
                yield self._wrong("eval_start is within a block")
            unit = "samples_count" if self.rules is not None and self.rules.counts_samples else "epoch_num"
            done = metadata.get(unit)
            if is_number(done):
                if self.done is not None and done <= self.done:
                    yield self._wrong(f"an evaluation at {unit} {done:.12g} follows one at {self.done:.12g}")
                self.done = done
        elif key == "eval_stop" and not self.evaluating:
            yield self._wrong("eval_stop is outside of an evaluation")
        elif key == "eval_accuracy":
            if not is_number(value) or not 0 <= value <= 1:
                yield self._wrong(f"eval_accuracy is {value!r}: an AUC lies between 0 and 1")
            else:
                self.aucs.append(value)
        if key != "eval_accuracy":
            self.evaluating = key == "eval_start"

    def end(self) -> Iterator[Finding]:
        if self.status != "success":
            return
        closed = _CHANCE if self.rules is None else self.rules.target_auc
        if not self.aucs:
            yield self._wrong("run_stop says success, but there is no AUC")
        elif self.division == "open" and _CHANCE < self.aucs[-1] < closed:
            text = f"its last AUC is {self.aucs[-1]:.5f}, below the {closed} of the closed division"
            yield Finding(f"{self.name}: {text}", fatal=False)
        elif self.aucs[-1] < closed:
            target = _CHANCE if self.division == "open" else closed
            yield self._wrong(f"run_stop says success, but the last AUC is {self.aucs[-1]:.5f}, not above {target}")

    def _wrong(self, text: str) -> Finding:
        return Finding(f"{self.name}: {text}: submit the log as the run wrote it, or another run")
