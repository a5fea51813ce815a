"""dlrm-bench rerun RECORD: runs a record's configuration again, with the code of its commit, and compares the two.

A single run proves nothing against another. LADDER/RUNG names all rounds of a ladder's rung: several reruns can be
proven to differ from them, or to equal them.

The commit is checked out into a git worktree, which is removed afterwards, even if the rerun is killed. That commit's
own code makes the flags, so that they keep their original meaning; the current code checks the record's configuration
first. Packages and machine are the current ones: the comparison lists the differences. Without a checkout, or for a
record without a commit, as of an installed package, the files here must be the ones that made the record, by their
hash: the same version, installed or checked out, reruns it.
"""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.compare.arguments import Compare
from dlrm_bench.bench.compare.command import compare_command
from dlrm_bench.bench.compare.sides import first_run_of
from dlrm_bench.bench.instruments.progress import StillBar, stderr_console
from dlrm_bench.bench.ladder.launching import torchrun
from dlrm_bench.bench.machine.source import git, source_hash, source_of_commit
from dlrm_bench.bench.records.config_form import check_config
from dlrm_bench.bench.records.record import RUN_JSON, Record, create_run_folder, read_record
from dlrm_bench.bench.started_runs import new_id, processes_of_run
from dlrm_bench.bench.worktrees import check_checkout, environment_of, worktree

_FLAGS = """
import json, sys
from pathlib import Path
from dlrm_bench.bench.compare.repeat import repeating_flags
from dlrm_bench.bench.records.record import read_record
print(json.dumps(repeating_flags(read_record(Path(sys.argv[1])))))
"""


class Rerun(NamedTuple):
    """The records of a rerun."""

    folder: Path
    """Folder that holds a record for each run."""
    notes: list[str]
    """Differences between the source of the reruns and the record's."""


def rerun_command(console: Console, path: Path, rounds: int, nproc: int | None, results_dir: Path) -> int:
    """Reruns a record and prints the comparison; returns the exit status.

    path: the record, or a rung of a ladder (LADDER/RUNG), of which the first run is repeated and all runs are compared.
    """
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}: at least one is needed")
    done = rerun(first_run_of(path), rounds, nproc, results_dir)
    sides = (path, done.folder)
    status = compare_command(console, Compare(sides=sides))
    for note in done.notes:
        console.print(f"warning: {note}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"records {done.folder}", soft_wrap=True)
    return status


def rerun(path: Path, rounds: int, nproc: int | None, results_dir: Path) -> Rerun:
    """Runs a record's configuration again, `rounds` times. ValueError if its commit or its flags are not available;
    FailedError, with the rank's output, if a rank fails.

    nproc: number of processes; None for the record's.
    """
    asked = None if nproc is None else processes_of_run(nproc)
    record = read_record(path)
    check_config(path / RUN_JSON, record.run["config"])
    program = _program_of(record)
    checkout = nullcontext(ROOT) if program.checked_out is None else worktree(ROOT, program.checked_out)
    with checkout as tree, environment_of(tree, program.stated):
        flags, recorded = _flags(tree, path, record.run["git"]["commit"])
        processes = asked or recorded
        folder = create_run_folder(results_dir, new_id(processes, flags, "rerun"))
        with StillBar(rounds, "runs", stderr_console()) as bar:
            for i in range(rounds):
                place = ["--results-dir", str(folder.resolve()), "--run-id", f"{i:02d}"]
                bar.show(i, f"run {i + 1} of {rounds}")
                torchrun([*flags, *place], processes, folder / f"{i:02d}.log", tree / "launch" / "dlrm.py")
            bar.show(rounds, "done")
    return Rerun(folder, program.notes)


class _Program(NamedTuple):
    """The source of a record's program."""

    checked_out: str | None
    """Commit to check out; None if the files here are the program."""
    stated: str | None
    """Commit that the reruns record as theirs; None for git's answer for the files."""
    notes: list[str]
    """Reasons to doubt that the source is the record's."""


def _program_of(record: Record) -> _Program:
    """Finds the program of a record; ValueError if it is neither here nor a commit of this checkout."""
    state = record.run["git"]
    commit, source = state["commit"], state.get("source")
    if commit is not None and not re.fullmatch(r"\w[\w.+/-]*", commit):
        raise ValueError(f"{record.folder}: git.commit is {commit!a}, which names no commit: restore the record")
    checkout = (ROOT / ".git").exists()
    if commit is None or not checkout:
        if source is not None and source == source_hash(ROOT):
            return _Program(None, None if checkout else commit, [])
        kind = f"commit {commit}" if commit else "a package that was installed, or copied, without its commit"
        remedy = "run it from a checkout that has the commit" if commit else "install or check out the version that did"
        raise ValueError(
            f"{record.folder} is of {kind}, but {ROOT} has other source code than made it: {remedy}, "
            "and run its `dlrm-bench rerun`"
        )
    check_checkout(ROOT)
    if git(ROOT, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise ValueError(f"commit {commit} of {record.folder} is not in {ROOT}: fetch it")
    notes: list[str] = []
    if source is not None and source != source_of_commit(ROOT, commit):
        notes.append(f"the record's source ({source}) is not that of its commit: it had uncommitted changes")
    elif source is None and state["dirty"] is not False:
        unknown = "was changed" if state["dirty"] else "may have been changed"
        notes.append(f"the record's source {unknown}: the record is older than hashes of the source")
    return _Program(commit, None, notes)


def _flags(tree: Path, record: Path, commit: str | None) -> tuple[list[str], int]:
    """Returns flags and number of processes, from the commit's own code."""
    command = [sys.executable, "-c", _FLAGS, str(record.resolve())]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ValueError(
            f"{f'commit {commit}' if commit else tree} cannot repeat {record} (its code says: {last}): run it there"
        )
    flags, processes = json.loads(done.stdout.splitlines()[-1])
    return flags, processes
