"""The beginning of a log tells the division and the values of the run, also of one that resumes another."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.instruments.schedule import Schedule
from dlrm_bench.bench.mlperf.header import log_header, log_of_before
from dlrm_bench.bench.mlperf.log import MLPerfLog
from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from tests.dlrm.dcnv2.test_ruleset import CLOSED, Samples

MACHINE: Any = {"nodes": 1, "gpus": 8, "gpu": "NVIDIA H200", "cpu": None}
SCHEDULE = Schedule(global_batch_size=55296, iterations=100, evaluate_every=10, iterations_per_epoch=75868.0)
DATA: Any = Samples()


def first_part(tmp_path: Path, config: RunConfig = CLOSED) -> str:
    """The log of a run that is interrupted in its training."""
    log = MLPerfLog(tmp_path / "first.txt")
    log_header(log, config, MACHINE, DATA, SCHEDULE)
    log.init_stop()
    log.run_start()
    log.epoch_start()
    log.note("a line for human readers")
    return log.text


def resumed(tmp_path: Path, config: RunConfig, schedule: Schedule = SCHEDULE, before: RunConfig = CLOSED) -> list[str]:
    log = MLPerfLog(tmp_path / "second.txt")
    log_of_before(log, first_part(tmp_path, before), config, DATA, schedule)
    log.close("aborted", 0.5)
    return (tmp_path / "second.txt").read_text().splitlines()


def values(lines: list[str]) -> dict[str, Any]:
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines if line.startswith(":::MLLOG ")]
    return {event["key"]: event["value"] for event in events}


def test_a_run_that_goes_on_as_before_keeps_its_lines(tmp_path: Path) -> None:
    lines = resumed(tmp_path, CLOSED)
    before = (tmp_path / "first.txt").read_text().splitlines()
    assert lines[: len(before)] == before
    assert values(lines)["submission_division"] == "closed"
    assert not [line for line in lines if line.startswith("# resumed")]


@pytest.mark.parametrize(
    ("config", "batch", "told"),
    [
        (CLOSED, 1024, ["# resumed: global_batch_size 55296 became 1024"]),
        (
            replace(CLOSED, optimizer=OptimizerConfig(learning_rate=0.001)),
            55296,
            ["# resumed: opt_base_learning_rate 0.004 became 0.001"],
        ),
        (replace(CLOSED, evaluations_per_epoch=40), 55296, []),
        (replace(CLOSED, mlperf=replace(CLOSED.mlperf, division="open")), 55296, []),
    ],
    ids=["global batch", "learning rate", "cadence", "asks for open"],
)
def test_a_run_that_goes_on_otherwise_is_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: RunConfig, batch: int, told: list[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        lines = resumed(tmp_path, config, replace(SCHEDULE, global_batch_size=batch))
    before = (tmp_path / "first.txt").read_text().splitlines()
    assert values(lines) == values(before) | {"submission_division": "open"} | {
        key: value for key, value in values(lines).items() if key not in values(before)
    }
    assert [line for line in lines if line.startswith("# resumed")] == told
    assert "of the open division from now on" in caplog.text


def test_an_open_run_stays_open(tmp_path: Path) -> None:
    open_run = replace(CLOSED, mlperf=replace(CLOSED.mlperf, division="open"))
    lines = resumed(tmp_path, CLOSED, before=open_run)
    assert values(lines)["submission_division"] == "open"


def test_other_ranks_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_of_before(MLPerfLog(None), first_part(tmp_path), CLOSED, DATA, replace(SCHEDULE, global_batch_size=512))
    assert caplog.text == ""
