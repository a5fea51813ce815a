"""Ten runs of one configuration, each with its own seed, in fresh processes one after another.

ten_runs.json, beside the records, names what the runs are made of: an interrupted call is continued by an equal one.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.ladder.launching import run_forked
from dlrm_bench.bench.machine.source import source_hash
from dlrm_bench.bench.mlperf.submission.build import FIRST_LOG
from dlrm_bench.bench.mlperf.submission.package import RUNS, read_run
from dlrm_bench.bench.records.json_file import json_text, read_form, write_whole
from dlrm_bench.bench.records.record import RUN_JSON
from dlrm_bench.dlrm.runtime.command_line import FailedError

TEN_RUNS_JSON = "ten_runs.json"  # a folder with plan.json would be taken for a ladder
TEN_RUNS_SCHEMA = 1


class TenRuns(TypedDict):
    """The content of ten_runs.json, which is written before the first run."""

    schema: int
    flags: list[str]
    """Flags of launch/dlrm.py for all runs."""
    first_seed: int
    """Seed of run-0; it grows by one with each run."""
    processes: int
    source: str
    """Hash of the program's files: see bench/machine/source.py."""


def run_ten(folder: Path, processes: int, first_seed: int, flags: Sequence[str]) -> Iterator[Path]:
    """Runs launch/dlrm.py ten times with these flags; yields the record folder of each, inside `folder`.

    One run may miss the target, as the rules allow; FailedError at the second one, or if a run fails otherwise. A
    finished run of an interrupted call is not repeated. ValueError if `folder` holds finished runs of other flags,
    seeds, processes or program files, or if the program's files change between runs.
    """
    _plan(folder, processes, first_seed, flags)
    missed: list[Path] = []
    for run in range(RUNS):
        record = _record(folder, run)
        if not _finished(record):
            _refuse_leftover(record)
            place = ["--seed", str(first_seed + run), "--results-dir", str(folder), "--run-id", record.name]
            try:
                run_forked([*flags, *place], processes, folder / f"{record.name}.log")
            except FailedError:
                if not _missed_target(record):
                    raise
        if _missed_target(record):
            missed.append(record)
        if len(missed) > 1:
            names = " and ".join(path.name for path in missed)
            raise FailedError(f"{names} in {folder} missed the target AUC: only one of a submission's ten may")
        yield record


def _plan(folder: Path, processes: int, first_seed: int, flags: Sequence[str]) -> None:
    """Writes ten_runs.json, unless `folder` holds finished runs: ValueError if these are of others, or of unknown
    ones."""
    source = source_hash(ROOT)
    plan = TenRuns(schema=TEN_RUNS_SCHEMA, flags=[*flags], first_seed=first_seed, processes=processes, source=source)
    path = folder / TEN_RUNS_JSON
    if not any(_finished(_record(folder, run)) for run in range(RUNS)):
        write_whole(path, json_text(plan))
        return
    if not path.exists():  # made by a version that wrote none, or put there by hand
        raise ValueError(
            f"{folder} holds finished runs without {TEN_RUNS_JSON}, so their flags are unknown: choose another "
            f"--records, or submit them, if they are ten, with --runs {folder}"
        )
    made = read_form(path, TenRuns, (TEN_RUNS_SCHEMA,), "choose another --records")
    named = {
        "flags": made["flags"] != plan["flags"],
        "--first-seed": made["first_seed"] != first_seed,
        "--nproc": made["processes"] != processes,
        "program files": made["source"] != source,
    }
    if other := [name for name, differs in named.items() if differs]:
        raise ValueError(
            f"{folder} holds runs of other {' and '.join(other)}: choose another --records, or repeat what "
            f"{path.name} names"
        )


def _record(folder: Path, run: int) -> Path:
    return folder / f"run-{run}"


def _finished(record: Path) -> bool:
    return (record / RUN_JSON).exists()


def _missed_target(record: Path) -> bool:
    """Whether a run finished and missed its target; it then has a record, unlike a run that failed."""
    return _finished(record) and read_run(record / FIRST_LOG).status != "success"


def _refuse_leftover(record: Path) -> None:
    if record.exists():
        raise ValueError(f"{record} is left from an interrupted run: remove it, so that the command repeats that run")
