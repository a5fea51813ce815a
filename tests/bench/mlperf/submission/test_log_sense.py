"""Logs that contradict themselves: MLPerf's checkers pass most of them, and none is accepted or scored here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.mlperf.submission.checkers import check_package
from dlrm_bench.bench.mlperf.submission.log_sense import senseless
from dlrm_bench.bench.mlperf.submission.score import score_package
from tests.bench.mlperf.submission.made_packages import BEGIN_MS, made_package, write_log
from tests.bench.mlperf.test_published_logs import LOGS

Events = list[dict[str, Any]]
PREFIX = ":::MLLOG "


def changed(log: Path, change: Callable[[Events], Any]) -> Path:
    """The log with its events changed."""
    events = [json.loads(line.removeprefix(PREFIX)) for line in log.read_text().splitlines()]
    change(events)
    log.write_text("".join(f"{PREFIX}{json.dumps(event)}\n" for event in events))
    return log


def one(events: Events, key: str) -> dict[str, Any]:
    return next(event for event in events if event["key"] == key)


def to_end(key: str) -> Callable[[Events], None]:
    """Puts the event of a key below all others, with their last time."""

    def change(events: Events) -> None:
        event = one(events, key)
        events.remove(event)
        events.append(event | {"time_ms": events[-1]["time_ms"]})

    return change


def with_(key: str, **fields: Any) -> Callable[[Events], None]:
    return lambda events: one(events, key).update(fields)


def evaluated_again(events: Events) -> None:
    """An evaluation of an earlier epoch_num before run_stop."""
    at = events.index(one(events, "run_stop"))
    events[at:at] = [json.loads(json.dumps(e)) for e in events if e["key"].startswith("eval_") and e["metadata"]][-3:]


CASES: list[tuple[Callable[[Events], Any], str]] = [
    (with_("run_stop", time_ms=BEGIN_MS - 5), "run_stop is 5 ms before run_start"),
    (with_("run_stop", time_ms=BEGIN_MS + 10), "its times go back: run_stop is 199990 ms before eval_stop"),
    (with_("eval_accuracy", time_ms=BEGIN_MS), "its times go back: eval_accuracy is 200000 ms before eval_start"),
    (to_end("eval_accuracy"), "eval_accuracy is after run_stop"),
    (to_end("eval_stop"), "run_stop is within an evaluation"),
    (to_end("run_start"), "run_stop is before run_start"),
    (lambda events: events.remove(one(events, "eval_start")), "eval_stop is outside of an evaluation"),
    (lambda events: events.remove(one(events, "eval_accuracy")), "says success, but there is no AUC"),
    (evaluated_again, "an evaluation at epoch_num 0.8 follows one at 0.8"),
    (lambda events: events.append(dict(one(events, "run_stop"))), "it has two run_stop events"),
    (with_("eval_accuracy", value=0.1), "says success, but the last AUC is 0.10000, not above 0.5"),
    (with_("eval_accuracy", value=1.7), "eval_accuracy is 1.7: an AUC lies between 0 and 1"),
]


@pytest.mark.parametrize(("change", "says"), CASES)
def test_what_cannot_be_true(tmp_path: Path, change: Callable[[Events], Any], says: str) -> None:
    write_log(tmp_path / "result_0.txt", submission_division="open")
    assert list(senseless(tmp_path / "result_0.txt")) == []
    found = list(senseless(changed(tmp_path / "result_0.txt", change)))
    assert any(says in finding.text and finding.fatal for finding in found), found
    assert all(finding.text.startswith("result_0.txt: ") for finding in found)


@pytest.mark.parametrize(
    ("division", "auc", "fatal"), [("closed", 0.8, True), ("open", 0.8, False), ("open", 0.5, True)]
)
def test_success_below_the_target(tmp_path: Path, division: str, auc: float, fatal: bool) -> None:
    write_log(tmp_path / "x.txt", submission_division=division, auc=auc)
    (finding,) = senseless(tmp_path / "x.txt")
    assert finding.fatal == fatal
    write_log(tmp_path / "x.txt", submission_division=division, auc=auc, status="aborted")
    assert list(senseless(tmp_path / "x.txt")) == []


def test_published_logs_make_sense() -> None:
    for log in sorted(LOGS.glob("result_*.txt")):
        assert list(senseless(log)) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [0, 1, 3, 10])
def test_such_a_package_is_neither_accepted_nor_scored(tmp_path: Path, case: int) -> None:
    """One log of ten; of the open division, in which the checkers know no target."""
    package = made_package(tmp_path, submission_division="open")
    log = package.results / "result_0.txt"  # made_packages' first run begins at BEGIN_MS
    change, says = CASES[case]
    changed(log, change)
    (sense,) = (verdict for verdict in check_package(package) if verdict.checker == "sense of the logs")
    assert not sense.passed
    assert any(says in finding.text for finding in sense.findings)
    score = score_package(package)
    assert score.minutes is None
    assert any(says in reason for reason in score.invalid)
