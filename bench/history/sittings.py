"""Records of one configuration over time, each relative to the reference in its sitting, and the points of change.

A machine is faster one month and slower the next. So the history of a program consists not of its times but of their
ratios to the times of one old program, the reference, which ran in turn with it in one sitting. A record without a
reference is shown but not judged.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from dlrm_bench.bench.compare.comparability import machine_of
from dlrm_bench.bench.compare.order import compare_in_order, confounded
from dlrm_bench.bench.compare.sides import Side, side_of_records
from dlrm_bench.bench.config import as_json
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.records.distinct import distinct
from dlrm_bench.bench.records.record import RUN_JSON, Record, read_record
from dlrm_bench.bench.stats.change_points import Change, change_points
from dlrm_bench.bench.stats.statistics import Estimate

_NOT_CONFIGURED = ("run_id", "results_dir", "checkpoint", "snapshot", "resume", "stall_timeout", "mlperf", "preset")
"""Fields of a configuration that do not change the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The runs of one program in one sitting."""

    program: str
    """Commit, or else the source's hash; '+' follows a commit whose files had changes."""
    side: Side
    reference: Side | None
    estimate: Estimate | None
    """Logarithm of its median over the reference's; None where no reference ran in its sitting."""
    because: Sequence[str]
    """Reasons why it is not judged; empty where it is."""

    @property
    def when(self) -> str:
        """The time at which its first run ended, ISO 8601."""
        return self.side.finished[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Records of one configuration on one kind of machine."""

    name: str
    """Preset, pipeline, sizes and machine in words."""
    records: Sequence[Record]
    reference: str | None
    """The program that all are compared with; None where none ran beside others."""
    points: Sequence[Point]
    """Points in the order of time, without those of the reference."""
    references: Sequence[Side]
    """The runs of the reference in each sitting that has some."""
    changes: Sequence[Change]
    """Changes of the judged points."""

    @property
    def judged(self) -> list[Point]:
        """The points that changes are looked for in."""
        return [point for point in self.points if not point.because]


def read_histories(folder: Path, reference: str | None = None, gap_minutes: float = 60) -> list[History]:
    """Returns the history of each configuration in a folder, those with most records first.

    reference: prefix of the commit or source hash of the program that others are compared with; by default, for each
    configuration, the program that ran beside others in the most sittings. gap_minutes: pause between two runs that
    separates two sittings. ValueError names a damaged file, a folder without timed runs, or a reference without a
    record.
    """
    found = [read_record(path.parent) for path in sorted(folder.rglob(RUN_JSON))]
    timed = [each for each in distinct(found)[0] if each.run["host"] is None and each.run["latency_ms"] is not None]
    if not timed:
        raise ValueError(f"{folder} holds no timed run: name a folder of records")
    if reference is not None and not any(_is(each, reference) for each in timed):
        raise ValueError(f"--reference {reference}: no record in {folder} is of that commit or source")
    groups: dict[str, list[Record]] = {}
    for record in sorted(timed, key=lambda each: each.run["created"]):
        groups.setdefault(_configuration(record), []).append(record)
    histories = [_history(records, reference, gap_minutes) for records in groups.values()]
    return sorted(histories, key=lambda each: -len(each.records))


def program_name(record: Record) -> str:
    """Returns the commit of a record's program, or its source's hash."""
    git = record.run["git"]
    if git["commit"] is None:
        return f"source {(git.get('source') or 'unknown')[:12]}"
    return git["commit"][:12] + ("+" if git["dirty"] else "")


def _history(records: Sequence[Record], reference: str | None, gap_minutes: float) -> History:
    sittings = list(_sittings(records, gap_minutes))
    chosen = _reference(sittings, reference)
    points: list[Point] = []
    references: list[Side] = []
    for sitting in sittings:
        programs: dict[str, list[Record]] = {}
        for record in sitting:
            programs.setdefault(_source(record), []).append(record)
        beside = programs.pop(chosen, None) if chosen is not None else None
        of_reference = None if beside is None else side_of_records("reference", beside)
        if of_reference is not None:
            references.append(of_reference)
        points += [_point(of, of_reference, len(programs)) for of in programs.values()]
    points.sort(key=lambda point: point.when)
    logs = [point.estimate.log for point in points if point.estimate is not None and not point.because]
    name = next((program_name(each) for each in records if _source(each) == chosen), None)
    return History(
        name=_name(records[-1]),
        records=records,
        reference=name,
        points=points,
        references=references,
        changes=change_points(logs),
    )


def _point(records: Sequence[Record], reference: Side | None, programs: int) -> Point:
    """Returns the point of a program's runs in a sitting. programs: number of programs in it beside the reference."""
    side = side_of_records(program_name(records[0]), records)
    if reference is None:
        because = ["no run of the reference in its sitting"]
        return Point(program=side.label, side=side, reference=None, estimate=None, because=because)
    because = list(confounded(reference, side))
    if programs > 1:
        # They share the noise of the reference's runs, and would look like a change of all of them together.
        because.append(
            f"{programs} programs of its sitting share the reference's runs: `dlrm-bench compare` judges them"
        )
    found = compare_in_order(reference, side)
    return Point(program=side.label, side=side, reference=reference, estimate=found.estimates["p50"], because=because)


def _sittings(records: Sequence[Record], gap_minutes: float) -> Iterator[list[Record]]:
    """Yields runs on one machine, in the order of time, without a longer pause between two of them."""
    of_machines: dict[str, list[Record]] = {}
    for record in records:
        of_machines.setdefault(machine_of(record), []).append(record)
    for runs in of_machines.values():
        sitting = [runs[0]]
        for before, run in pairwise(runs):
            pause = _begun(run) - datetime.fromisoformat(before.run["created"])
            if pause / timedelta(minutes=1) > gap_minutes:
                yield sitting
                sitting = []
            sitting.append(run)
        yield sitting


def _begun(record: Record) -> datetime:
    """Returns the latest time at which a run's iterations can have begun."""
    ms = float(record.iterations_ms.sum(axis=1).max())
    return datetime.fromisoformat(record.run["created"]) - timedelta(milliseconds=ms)


def _reference(sittings: Sequence[Sequence[Record]], named: str | None) -> str | None:
    """Returns the source of the reference: the one named, or that which ran beside others in most sittings, of several
    the oldest."""
    if named is not None:
        return next((_source(each) for sitting in sittings for each in sitting if _is(each, named)), None)
    count: Counter[str] = Counter()
    for sitting in sittings:
        programs = dict.fromkeys(_source(each) for each in sitting)
        if len(programs) > 1:
            count.update(list(programs))
    return count.most_common(1)[0][0] if count else None  # of equals, the one that was counted first


def _source(record: Record) -> str:
    """Returns the identity of a record's program among those of one configuration."""
    git = record.run["git"]
    return git.get("source") or f"{git['commit']} {git['dirty']}"


def _is(record: Record, name: str) -> bool:
    git = record.run["git"]
    return any((each or "").startswith(name) for each in (git["commit"], git.get("source")))


def _configuration(record: Record) -> str:
    """Returns what is equal for records of one configuration. Fields that are younger than a record have its preset's
    values, so that a new field splits no history."""
    complete = _overlaid(_of_preset(record.run["config"].get("preset", "")), record.run["config"])
    config = {name: value for name, value in complete.items() if name not in _NOT_CONFIGURED}
    machine = record.run["machine"]
    kind = [machine["nodes"], machine["gpus"], machine["gpu"], None if machine["gpu"] else machine["cpu"]]
    return json.dumps([config, kind], sort_keys=True)


@functools.cache
def _of_preset(name: str) -> dict[str, Any]:
    """Returns the configuration of a preset, without a pipeline; empty for a preset that this version does not know."""
    try:
        known = as_json(preset(name))
    except ValueError:
        return {}
    return {field: value for field, value in known.items() if field != "pipeline"}


def _overlaid(usual: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `usual` with the values of `given`, block by block."""
    merged = {**usual, **given}
    blocks = [name for name in given if isinstance(given[name], dict) and isinstance(usual.get(name), dict)]
    return merged | {name: _overlaid(usual[name], given[name]) for name in blocks}


def _name(record: Record) -> str:
    config, machine = record.run["config"], record.run["machine"]
    gpus = f"{machine['gpus']} x {machine['gpu']}" if machine["gpus"] else f"{config['world_size']} CPU rank(s)"
    options = {k: v for k, v in config["pipeline"].items() if k != "name" and v not in (False, None)}
    chosen = ", ".join(k if v is True else f"{k} {v}" for k, v in options.items())
    precision = f", {config['precision']}" if "precision" in config else ""
    window = f", {config['iterations']} iterations" if config.get("iterations") else ""
    window = window or (f", {config['min_time']:g} s" if config.get("min_time") else "")
    pipeline = f"{config['pipeline']['name']}{f' ({chosen})' if chosen else ''}"
    return f"{config.get('preset', '')}, {config['local_batch_size']} a rank{precision}, {pipeline}{window} on {gpus}"
