"""dlrm-bench bisect GOOD BAD -- FLAGS: plans a bisection or resumes one, runs it, and prints what it proves.

Candidates are the commits on BAD's first-parent line that change the program's files: a merge counts as one commit.
Each run uses its commit's own code, in a worktree, in fresh processes. Records and plan are kept in one folder, from
which an interrupted bisection continues: complete pairs are read instead of run again.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypedDict

from rich import box
from rich.console import Console
from rich.table import Table

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.compare.command import EXIT_UNDECIDED
from dlrm_bench.bench.history.arguments import BisectCommand
from dlrm_bench.bench.history.bisection import FEWEST_PAIRS, CannotRunError, Finding, Pair, Step, bisect
from dlrm_bench.bench.instruments.progress import stderr_console
from dlrm_bench.bench.ladder.launching import torchrun
from dlrm_bench.bench.ladder.run_ladder import put_aside, this_node
from dlrm_bench.bench.machine.source import git, source_of_commit
from dlrm_bench.bench.records.json_file import json_text, read_form, write_whole
from dlrm_bench.bench.records.record import RUN_JSON, create_run_folder, read_record
from dlrm_bench.bench.report.rounding import with_interval
from dlrm_bench.bench.started_runs import new_id, processes_of_run
from dlrm_bench.bench.worktrees import check_checkout, environment_of, worktree
from dlrm_bench.dlrm.data.lock import locked
from dlrm_bench.dlrm.runtime.command_line import EXIT_FAILED

PLAN_JSON = "bisection.json"
_SCHEMA = 1


class Plan(TypedDict):
    """The content of bisection.json, which is written first."""

    schema: int
    good: str
    candidates: list[str]
    """Commits after the good one that change the program, in order; the last has the program of the bad one."""
    ends: bool
    """Whether the last candidate alone is compared."""
    flags: list[str]
    processes: int
    confidence: float
    max_pairs: int
    node: str
    """Host name and boot id of the machine."""


def bisect_command(console: Console, forwarded: Sequence[str], asked: BisectCommand) -> int:
    """Bisects and prints steps and answer; returns the exit status. ValueError names what cannot be used."""
    if asked.resume is not None:
        others = [*asked.beside_resume(), *forwarded[:1]]
        if others:
            raise ValueError(f"--resume continues with the plan in {asked.resume}: leave out {', '.join(others)}")
        folder, plan = asked.resume, _plan_to_resume(asked.resume)
    else:
        plan = _new_plan(asked, forwarded)
        folder = create_run_folder(asked.results_dir, new_id(plan["processes"], plan["flags"], "bisection"))
        write_whole(folder / PLAN_JSON, json_text(plan))
    finding: Finding | None = None
    try:
        for found in run_plan(plan, folder):
            if isinstance(found, Finding):
                finding = found
            else:
                stderr_console().print(step_in_words(found), soft_wrap=True, markup=False, highlight=False)
    except BaseException as error:
        error.add_note(f"finished runs are kept; continue with dlrm-bench bisect --resume {folder}")
        raise
    assert finding is not None
    console.print(steps_table(finding))
    for text in [] if plan["ends"] else finding_in_words(finding):
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    console.print(f"records {folder}", soft_wrap=True)
    if plan["ends"]:
        return EXIT_FAILED if finding.steps[0].reason else 0
    return EXIT_UNDECIDED if finding.first is None or len(finding.between) > 1 else 0


def run_plan(plan: Plan, folder: Path) -> Iterator[Step | Finding]:
    """Runs the rest of a plan; yields steps and the finding. ValueError if another command is running it."""
    only = locked(folder / PLAN_JSON, "another command runs this bisection: wait for its end")
    with only, worktree(ROOT, plan["good"]) as good:

        def pairs(commit: str) -> Iterator[Pair]:
            with ExitStack() as kept:
                trees: list[Path] = []  # made only if a run is needed: all pairs of a step may exist already
                for number in range(plan["max_pairs"]):
                    ids = [folder / commit[:12] / f"{number:02d}-{name}" for name in ("good", "candidate")]
                    if not all((each / RUN_JSON).exists() for each in ids):
                        if not trees:
                            trees = [good, kept.enter_context(worktree(ROOT, commit))]
                        _run_pair(plan, trees, ids, number)
                    before, after = (read_record(each).latencies_ms for each in ids)
                    yield Pair(before, after)

        yield from bisect(plan["candidates"], pairs, plan["confidence"], plan["max_pairs"])


def _run_pair(plan: Plan, trees: Sequence[Path], ids: Sequence[Path], number: int) -> None:
    """Runs both sides of a pair, the good commit first in every other pair. CannotRunError if the candidate's run
    fails, and ValueError if the good commit's does."""
    ids[0].parent.mkdir(exist_ok=True)
    for each in ids:  # half a pair from before is no neighbour in time of the present runs
        put_aside(each)
    in_turn = list(zip(trees, ids, strict=True))
    for tree, run in in_turn if number % 2 == 0 else in_turn[::-1]:
        try:
            _run(plan, tree, run)
        except ValueError as error:
            if run == ids[0]:
                raise
            raise CannotRunError(str(error)) from error


def _run(plan: Plan, tree: Path, run: Path) -> None:
    place = ["--results-dir", str(run.parent.resolve()), "--run-id", run.name]
    with environment_of(tree, None):
        output = run.with_suffix(".log")
        torchrun([*plan["flags"], *place], plan["processes"], output, tree / "launch" / "dlrm.py")
    if read_record(run).run["latency_ms"] is None:
        raise ValueError(f"{run} ended within its warm-up: lower --warmup-iterations")


def _new_plan(asked: BisectCommand, flags: Sequence[str]) -> Plan:
    if asked.good is None or asked.bad is None or not flags:
        raise ValueError("name two commits and the flags of a run: dlrm-bench bisect GOOD BAD -- --preset smoke")
    if not 0 < asked.confidence < 1:
        raise ValueError(f"--confidence is {asked.confidence:g}: it lies between 0 and 1")
    if asked.max_pairs < FEWEST_PAIRS:
        raise ValueError(f"--max-pairs is {asked.max_pairs}: {FEWEST_PAIRS} are needed for a first look")
    check_checkout(ROOT)
    good, bad = commit_of(asked.good), commit_of(asked.bad)
    return Plan(
        schema=_SCHEMA,
        good=good,
        candidates=[bad] if asked.ends else candidates_of(good, bad),
        ends=asked.ends,
        flags=list(flags),
        processes=processes_of_run(asked.nproc),
        confidence=asked.confidence,
        max_pairs=asked.max_pairs,
        node=this_node(),
    )


def commit_of(name: str) -> str:
    """Returns the full name of a commit of this checkout; ValueError if it has none."""
    found = None if name.startswith("-") else git(ROOT, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if found is None:
        raise ValueError(f"commit {name} is not in {ROOT}: fetch it")
    return found


def candidates_of(good: str, bad: str) -> list[str]:
    """Returns the commits of bad's own line after good that change the program's files, in order.

    ValueError if bad does not follow on good, or no commit does.
    """
    if git(ROOT, "merge-base", "--is-ancestor", good, bad) is None:
        raise ValueError(f"{bad[:12]} does not have {good[:12]} in its history: name an older GOOD, or swap them")
    listed = git(ROOT, "rev-list", "--reverse", "--first-parent", f"{good}..{bad}") or ""
    found, source = [], source_of_commit(ROOT, good)
    for commit in listed.split():
        own = source_of_commit(ROOT, commit)
        if own != source:
            found.append(commit)
        source = own
    if not found:
        raise ValueError(f"no commit from {good[:12]} to {bad[:12]} changes the program: there is nothing to find")
    return found


def _plan_to_resume(folder: Path) -> Plan:
    plan = read_form(folder / PLAN_JSON, Plan, (_SCHEMA,), "name the folder of a bisection")
    if plan["node"] != this_node():
        raise ValueError(f"{folder} was begun on {plan['node']}, and this is {this_node()}: start a new bisection here")
    return plan


def steps_table(finding: Finding) -> Table:
    """Returns the steps of a bisection as a table."""
    table = Table(title="candidates, each in turn with the good commit", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("commit", "pairs", "times as fast (95 % interval)", "is"):
        table.add_column(column, justify="right" if column == "pairs" else "left", no_wrap=True)
    for step in finding.steps:
        times = "" if step.estimate is None else with_interval(*step.estimate.speedup())
        table.add_row(step.commit[:12], str(step.pairs), times, _WORDS[step.place])
    return table


_WORDS = {
    "before": "as before the change",
    "after": "as after it",
    "undecided": "undecided",
    "cannot run": "cannot be run",
}


def step_in_words(step: Step) -> str:
    """Returns a step in one line."""
    times = "" if step.estimate is None else f", {with_interval(*step.estimate.speedup())} times as fast"
    because = f": {step.reason}" if step.reason else ""
    return f"{step.commit[:12]}: {_WORDS[step.place]} ({step.pairs} pairs{times}){because}"


def finding_in_words(finding: Finding) -> Iterator[str]:
    """Yields the answer, its certainty and its assumptions."""
    whole = finding.steps[0]
    if finding.first is None:
        if whole.place == "cannot run":
            yield f"{whole.commit[:12]} cannot be run with these flags: name a later GOOD or an earlier BAD"
        elif whole.reason:
            yield f"{whole.commit[:12]} could not be run again after {whole.pairs} pairs, which prove no difference"
        else:
            said = f"no difference proven between both ends in {whole.pairs} pairs"
            yield f"{said}: raise --max-pairs, or time longer runs"
        if whole.reason:
            yield f"its run failed: {whole.reason}"
        return
    assert whole.estimate is not None
    word = "slower" if whole.estimate.log > 0 else "faster"
    sure = f"{finding.confidence:.1%} sure, or more".replace("%", " %")
    if len(finding.between) == 1:
        yield f"{finding.first[:12]} is the first {word} commit ({sure}): git show {finding.first[:12]}"
    else:
        names = ", ".join(commit[:12] for commit in finding.between)
        yield f"one of {names} is the first {word} commit ({sure}); all but the last are undecided or cannot run"
    yield "this assumes a single change of the time; of several changes, it is the one that crosses the middle"
