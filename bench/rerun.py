"""dlrm-bench rerun RECORD: runs a record's configuration again, with the code of its commit, and compares the two.

One run proves nothing of another. LADDER/RUNG names all rounds of a ladder's rung, which several reruns can be told
from, or be proven equal to.

The commit is checked out into a worktree of git's, which is removed afterwards. The flags come from that commit's own
code, so that they mean there what they meant then. Packages and machine are today's: the comparison says what differs.
Where there is no checkout, in a copy of one or an installed package, only records of these very files can be rerun,
which their hash decides.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.compare.command import compare_command
from dlrm_bench.bench.compare.sides import first_run_of
from dlrm_bench.bench.instruments.progress import StillBar, stderr_console
from dlrm_bench.bench.ladder.launching import torchrun
from dlrm_bench.bench.machine.source import git, source_hash, source_of_commit
from dlrm_bench.bench.records.record import Record, create_run_folder, read_record
from dlrm_bench.bench.started_runs import new_id

_FLAGS = """
import json, sys
from pathlib import Path
from dlrm_bench.bench.compare.repeat import repeating_flags
from dlrm_bench.bench.records.record import read_record
print(json.dumps(repeating_flags(read_record(Path(sys.argv[1])))))
"""


class Rerun(NamedTuple):
    """What rerunning a record left."""

    folder: Path
    """Holds a record for each run."""
    notes: list[str]
    """What keeps the reruns from being of the record's program, as far as its source goes."""


def rerun_command(console: Console, path: Path, rounds: int, nproc: int | None, results_dir: Path) -> int:
    """Reruns a record and prints the comparison; returns the exit status.

    path: the record, or a rung of a ladder (LADDER/RUNG), of which the first run is repeated and all are compared with.
    """
    if rounds < 1:
        raise ValueError(f"--rounds is {rounds}: at least one is needed")
    done = rerun(first_run_of(path), rounds, nproc, results_dir)
    sides = (path, done.folder)
    status = compare_command(console, sides=sides, strict=False, fail_on=None, equivalent=None, json=False)
    for note in done.notes:
        console.print(f"warning: {note}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"records {done.folder}", soft_wrap=True)
    return status


def rerun(path: Path, rounds: int, nproc: int | None, results_dir: Path) -> Rerun:
    """Runs a record's configuration again, `rounds` times. ValueError if its commit or its flags cannot be had.

    nproc: processes; None for the record's. FailedError with what a rank said if one fails.
    """
    record = read_record(path)
    commit, notes = _commit_of(record)
    checkout = (ROOT / ".git").exists()
    with _worktree(commit) if checkout else nullcontext(ROOT) as tree, _environment(tree, None if checkout else commit):
        flags, processes = _flags(tree, path, commit)
        folder = create_run_folder(results_dir, new_id(nproc or processes, flags, "rerun"))
        with StillBar(rounds, "runs", stderr_console()) as bar:
            for i in range(rounds):
                place = ["--results-dir", str(folder.resolve()), "--run-id", f"{i:02d}"]
                bar.show(i, f"run {i + 1} of {rounds}")
                torchrun([*flags, *place], nproc or processes, folder / f"{i:02d}.log", tree / "launch" / "dlrm.py")
            bar.show(rounds, "done")
    return Rerun(folder, notes)


def _commit_of(record: Record) -> tuple[str, list[str]]:
    """The record's commit, and what speaks against it. ValueError if there is none, or this checkout has not got it."""
    state = record.run["git"]
    notes: list[str] = []
    commit = state["commit"]
    if commit is None:
        raise ValueError(f"{record.folder} names no commit: its program cannot be had again")
    source = state.get("source")
    if not (ROOT / ".git").exists():
        if source is None or source != source_hash(ROOT):
            raise ValueError(
                f"{record.folder} was made by other source code than that of {ROOT}, which is no git checkout that "
                "could have its commit: run it from one"
            )
        return commit, notes
    if git(ROOT, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise ValueError(f"commit {commit} of {record.folder} is not in {ROOT}: fetch it")
    if source is not None and source != source_of_commit(ROOT, commit):
        notes.append(f"the record's source ({source}) is not that of its commit: it had changes that no commit holds")
    elif source is None and state["dirty"] is not False:
        unknown = "was changed" if state["dirty"] else "may have been changed"
        notes.append(f"the record's source {unknown}: it is of before records held its hash")
    return commit, notes


@contextmanager
def _worktree(commit: str) -> Iterator[Path]:
    with TemporaryDirectory(prefix="dlrm-bench-rerun-") as folder:
        tree = Path(folder) / "tree"
        if git(ROOT, "worktree", "add", "--detach", "--quiet", str(tree), commit) is None:
            raise ValueError(f"git cannot check {commit} out into {tree}: `git worktree prune` may help")
        try:
            yield tree
        finally:
            git(ROOT, "worktree", "remove", "--force", str(tree))


@contextmanager
def _environment(tree: Path, commit: str | None) -> Iterator[None]:
    """Has processes that are started import the tree's code. `commit` is what they state as theirs; None: git's."""
    before = {name: os.environ.pop(name, None) for name in ("PYTHONPATH", "SOURCE_COMMIT")}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tree), before["PYTHONPATH"]]))
    if commit is not None:
        os.environ["SOURCE_COMMIT"] = commit
    try:
        yield
    finally:
        for name in before:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _flags(tree: Path, record: Path, commit: str) -> tuple[list[str], int]:
    """Flags and number of processes, as the commit's own code gives them."""
    command = [sys.executable, "-c", _FLAGS, str(record.resolve())]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ValueError(
            f"commit {commit} cannot repeat {record} (its code says: {said}): check it out and run it there"
        )
    flags, processes = json.loads(done.stdout.splitlines()[-1])
    return flags, processes
