"""The beginning of a run's MLPerf log: the submission, its division, and the values that the rules fix or ask for."""

import json
import logging
from dataclasses import replace
from typing import Any

from mlperf_logging.mllog import constants

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.instruments.schedule import Schedule
from dlrm_bench.bench.machine.description import platform_name
from dlrm_bench.bench.mlperf.division import division_of
from dlrm_bench.bench.mlperf.log import MLPerfLog
from dlrm_bench.bench.records.schema import Machine
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.data.dataset import Dataset

LOGGER = logging.getLogger(__name__)
_MARKER = ":::MLLOG "


def log_header(log: MLPerfLog, config: RunConfig, machine: Machine, dataset: Dataset, schedule: Schedule) -> None:
    """Logs the beginning of a run up to its hyperparameters. Warns if --mlperf.division asks for closed in vain."""
    log.cache_clear(config.mlperf.clear_cache)
    log.init_start()
    division, obstacles = division_of(config, dataset, schedule.global_batch_size)
    if obstacles and not config.data.is_random and log.writes:
        LOGGER.warning("--mlperf.division closed: logged as open, because %s", "; ".join(obstacles))
    platform = config.mlperf.platform or platform_name(machine)
    log.submission(config.benchmark, replace(config.mlperf, division=division), platform)
    log.hyperparameters(_hyperparameters(config, dataset, schedule))


def log_of_before(log: MLPerfLog, lines: str, config: RunConfig, dataset: Dataset, schedule: Schedule) -> None:
    """Starts with the lines of an interrupted run, whose training continues. If the run that resumes it has other
    values than they tell, or is not valid in the closed division, they tell the open one, and which values changed."""
    division, obstacles = division_of(config, dataset, schedule.global_batch_size)
    events = [json.loads(line.removeprefix(_MARKER)) for line in lines.splitlines() if line.startswith(_MARKER)]
    logged: dict[str, Any] = {}
    for event in events:
        logged.setdefault(event["key"], event["value"])
    values = json.loads(json.dumps(dict(_hyperparameters(config, dataset, schedule))))
    changes = [f"{key} {logged[key]} became {now}" for key, now in values.items() if logged.get(key, now) != now]
    if logged.get(constants.SUBMISSION_DIVISION) == "closed" and (changes or division != "closed"):
        lines = "".join(map(_opened, lines.splitlines(keepends=True)))
        why = "; ".join([*changes, *obstacles]) or "--mlperf.division is open"
        if log.writes:
            LOGGER.warning("the MLPerf log is of the open division from now on: %s", why)
    log.go_on(lines)
    for change in changes:
        log.note(f"resumed: {change}")


def _hyperparameters(config: RunConfig, dataset: Dataset, schedule: Schedule) -> list[tuple[str, Any]]:
    ruleset = named(config.benchmark).ruleset
    if ruleset is None:
        return []
    train_samples = dataset.train_samples or round(schedule.iterations_per_epoch * schedule.global_batch_size)
    return list(ruleset.hyperparameters(config, schedule.global_batch_size, train_samples, dataset.eval_samples))


def _opened(line: str) -> str:
    """Returns a line of a log, with the open division if it tells the division."""
    if not line.startswith(_MARKER):
        return line
    event = json.loads(line.removeprefix(_MARKER))
    if event["key"] != constants.SUBMISSION_DIVISION:
        return line
    return f"{_MARKER}{json.dumps({**event, 'value': 'open'})}\n"
