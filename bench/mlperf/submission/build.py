"""Arranges ten runs as a submission: their logs, the system's description, the source code, the scripts.

The description is written only once, so that its submitter's edits are kept. Logs are copied byte for byte, in the
order in which the runs began, and never replaced by others.
"""

import json
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dlrm_bench
from dlrm_bench.bench import ROOT
from dlrm_bench.bench.forwarded import take_flag
from dlrm_bench.bench.machine.source import PROGRAM, copy_source, source_hash
from dlrm_bench.bench.mlperf.published_logs import MLPerfRun
from dlrm_bench.bench.mlperf.submission.host import describe_host
from dlrm_bench.bench.mlperf.submission.package import RESULT_NAMES, RUNS, Package, disagreements, read_run, rules_of
from dlrm_bench.bench.mlperf.submission.scripts import write_scripts
from dlrm_bench.bench.mlperf.submission.system_description import (
    describe_system,
    missing_fields,
    read_description,
    system_id,
    write_description,
)
from dlrm_bench.bench.records.json_file import whole_file
from dlrm_bench.bench.records.record import RUN_JSON, read_record
from dlrm_bench.bench.records.schema import RunRecord

FIRST_LOG = RESULT_NAMES[0]
IMPLEMENTATION = "dlrm-bench"

_FILES = ("pyproject.toml", "README.md", "LICENSE", "requirements/cpu.txt", "requirements/gpu.txt")

_OF_A_RUN = ("seed", "run_id", "results_dir")
"""Fields of the configuration in which the runs of a submission may differ."""


@dataclass(frozen=True, slots=True)
class GivenRun:
    """A run to submit: its log, and its record if there is one."""

    log: MLPerfRun
    record: RunRecord | None


@dataclass(frozen=True, slots=True)
class Built:
    """The result of a build."""

    package: Package
    described: bool
    """Whether this build wrote the system description, because there was none."""
    missing: list[str]
    """Fields of the description that are still to be filled in."""
    notes: list[str]


def read_given(paths: Sequence[Path]) -> list[GivenRun]:
    """Reads the runs to submit: record folders, folders of them, or result logs; in the order of their starts.

    ValueError, naming the path, if a path is not a run, or if there are not exactly ten runs.
    """
    logs = [log for path in paths for log in _logs_in(path)]
    if len(logs) != RUNS:
        raise ValueError(f"--runs names {len(logs)} runs ({_names(logs)}): a submission has exactly {RUNS}")
    given = []
    for log in logs:
        has_record = (log.parent / RUN_JSON).exists()
        given.append(GivenRun(read_run(log), read_record(log.parent).run if has_record else None))
    return sorted(given, key=lambda run: run.log.start_ms or 0.0)


def _logs_in(path: Path) -> list[Path]:
    """Returns the log itself, a record's log, the logs of all records in a folder, or all logs of another
    submission."""
    if path.is_file():
        return [path]
    if (path / RUN_JSON).exists() and (path / FIRST_LOG).exists():
        return [path / FIRST_LOG]
    found = sorted(path.glob(f"*/{FIRST_LOG}")) or sorted(path.glob("result_*.txt"))
    if not found:
        raise ValueError(f"--runs: {path} is not a result log, a record or a folder of them")
    return found


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(f"{path.parent.name}/{path.name}" for path in paths) or "none"


def build(out: Path, runs: Sequence[GivenRun], system: str | None) -> Built:
    """Creates OUT/ORG from ten runs; ORG is the organisation in their logs, and `system` the name of the machine's
    files.

    ValueError, before anything is written, if the runs do not belong together, if the package already has other logs,
    or if it would get other source code than that of the runs.
    """
    logs = [run.log for run in runs]
    fatal = [finding.text for finding in disagreements(logs) if finding.fatal]
    fatal += _differences([run.record for run in runs if run.record is not None])
    if fatal:
        raise ValueError("\n  ".join(("these runs do not make a submission:", *fatal)))
    first, record = logs[0], runs[0].record
    name = system_id(system or f"{first.platform or 'system'}_{IMPLEMENTATION}")
    rules_of(first.benchmark)
    package = Package(out / system_id(first.org or "unnamed"), name, first.benchmark or "")
    source = package.implementations / IMPLEMENTATION
    if not source.exists():
        _check_source(runs)
    _copy_logs(package, logs)
    described = write_description(package.description, _description(first, record))
    notes = _copy_source(source, record)
    write_scripts(package, IMPLEMENTATION, _command(record, first), record)
    return Built(package, described, missing_fields(read_description(package.description)), notes)


def _differences(records: Sequence[RunRecord]) -> list[str]:
    """Returns the fields of the configuration, and the versions, in which records of one submission differ."""
    found = []
    for what, views in (
        ("config", [_configuration(record["config"]) for record in records]),
        ("git", [dict(record["git"]) for record in records]),
    ):
        for field in sorted({field for view in views for field in view}):
            if len({json.dumps(view.get(field), sort_keys=True) for view in views}) > 1:
                found.append(f"the runs differ in {what} {field}: submit runs of one program and one configuration")
    return found


def _configuration(config: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in config.items() if field not in _OF_A_RUN}


def _check_source(runs: Sequence[GivenRun]) -> None:
    """Raises ValueError if a record names other program files than those here, which would be packaged."""
    here = source_hash(ROOT)
    for run in runs:
        git = run.record["git"] if run.record else None
        if git and (made := git.get("source")) and made != here:
            commit = f"commit {git['commit']}" if git["commit"] else "their commit"
            changes = ", with its uncommitted changes," if git["dirty"] else ""
            raise ValueError(
                f"{run.log.path.parent} was made by source {made[:12]}, but {here[:12]} is in {ROOT} and would be "
                f"packaged: check {commit} out{changes} and build there, or where the runs were made"
            )


def _copy_logs(package: Package, logs: Sequence[MLPerfRun]) -> None:
    """Copies the logs that the package lacks, each in one step: a build that is killed leaves whole ones, which the
    next build adds to."""
    contents = dict(zip(RESULT_NAMES, (log.path.read_bytes() for log in logs), strict=True))
    for path in package.logs():
        if path.read_bytes() != contents.pop(path.name, None):
            raise ValueError(
                f"{package.results} has logs of other runs, which are never replaced ({path.name}): choose another "
                "OUT or --system"
            )
    package.results.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        with whole_file(package.results / name) as file:
            file.write(content)


def _description(run: MLPerfRun, record: RunRecord | None) -> dict[str, Any]:
    """Describes the system from the record of a run, and from this node if the run used it."""
    machine = record["machine"] if record else None
    here = machine is not None and socket.gethostname() in machine.get("hosts", [])
    return describe_system(
        machine,
        describe_host() if here else {},
        org=run.org or "",
        division=run.division or "",
        availability=run.availability or "",
        system_name=run.platform or "",
        commit=record["git"]["commit"] if record else None,
    )


def _copy_source(folder: Path, record: RunRecord | None) -> list[str]:
    """Copies this program's source, unless it exists; returns questions that a reviewer may ask about it."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        copy_source(ROOT, partial)
        for name in _FILES:
            if (ROOT / name).exists():
                (partial / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(ROOT / name, partial / name)
        (partial / "dlrm_bench").mkdir()
        shutil.copyfile(Path(dlrm_bench.__file__), partial / "dlrm_bench" / "__init__.py")
        for floor in PROGRAM:
            (partial / "dlrm_bench" / floor).symlink_to(Path("..", floor))
        partial.replace(folder)
    if record is None:
        return [f"these runs have no records, so their source is unknown: check that {folder} is what they ran"]
    if not record["git"].get("source"):
        commit = record["git"]["commit"]
        return [
            f"the runs' records have no hash of their source (commit {commit}): check that {folder} is what they ran"
        ]
    if record["git"]["dirty"]:
        return [f"the runs' source differs from commit {record['git']['commit']}: check that {folder} is what they ran"]
    return []


def _command(record: RunRecord | None, run: MLPerfRun) -> str:
    """Returns the command of a run, with its seed left to the caller."""
    if record is None:
        return f": # no record says how {run.path.name} was run; write the command here"
    words = shlex.split(record["command"])
    for flag in ("--seed", "--run-id", "--results-dir"):
        _, words = take_flag(words, flag)
    return f'{shlex.join(words)} --seed "${{SEED:?}}" --results-dir "${{RESULTS:-results}}"'
