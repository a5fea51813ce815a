"""dlrm-bench ladder: plans a ladder or resumes one, runs it, and prints what it shows."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from dlrm_bench.bench.compare.gate import percentage
from dlrm_bench.bench.instruments.progress import StillBar, stderr_console
from dlrm_bench.bench.ladder.analysis import ladder_host_table, ladder_spread_table, ladder_table, lucky
from dlrm_bench.bench.ladder.run_ladder import make_plan, plan_to_resume, profiled_run_id, run_ladder
from dlrm_bench.bench.ladder.rungs import built_in_ladder
from dlrm_bench.bench.records.ladder import Plan, read_ladder_json
from dlrm_bench.bench.records.record import create_run_folder
from dlrm_bench.bench.started_runs import new_id, processes_of_run


def ladder_command(
    console: Console,
    forwarded: Sequence[str],
    given: Sequence[str],
    *,
    rungs: str,
    rounds: int | Literal["auto"],
    detect: str,
    max_rounds: int,
    max_minutes: float | None,
    host: bool,
    nproc: int | None,
    launch: str | None,
    seed: int,
    results_dir: Path,
    resume: Path | None,
) -> int:
    """Runs a ladder and prints it; returns the exit status.

    forwarded: flags of launch/dlrm.py. given: names of the arguments below that are not their defaults. ValueError
    names a flag that cannot be used.
    """
    if resume is not None:
        others = [*(f"--{name.replace('_', '-')}" for name in given if name != "resume"), *forwarded[:1]]
        if others:
            raise ValueError(f"--resume goes on by the plan of {resume}: leave out {', '.join(others)}")
        plan, folder = plan_to_resume(resume), resume
    else:
        most, size = _rounds(rounds, detect, max_rounds, given)
        if max_minutes is not None and max_minutes <= 0:
            raise ValueError(f"--max-minutes is {max_minutes:g}: it must be positive")
        command = _launch(launch, given)
        ladder_rungs, processes = built_in_ladder(rungs), processes_of_run(nproc)
        folder = create_run_folder(results_dir, new_id(processes, forwarded, "ladder"))
        plan = make_plan(
            ladder_rungs,
            processes=processes,
            rounds=most,
            seed=seed,
            flags=forwarded,
            command=shlex.join(["dlrm-bench", *sys.argv[1:]]),
            host=host,
            detect=size,
            minutes=max_minutes,
            launch=command,
        )
    _run(plan, folder)
    _print(console, plan, folder)
    return 0


def _rounds(
    rounds: int | Literal["auto"], detect: str, max_rounds: int, given: Sequence[str]
) -> tuple[int, float | None]:
    """Rounds at most, and the difference that they are to find; None where the number is fixed."""
    if rounds != "auto":
        for name in ("detect", "max_rounds"):
            if name in given:
                raise ValueError(f"--{name.replace('_', '-')} is for --rounds auto: leave it out, or add that")
        if rounds < 1:
            raise ValueError(f"--rounds is {rounds}: at least one is needed")
        return rounds, None
    size = percentage("--detect", detect)
    if not size:
        raise ValueError(f"--detect {detect}: no number of rounds finds a difference of nothing; name one, such as 2%")
    if max_rounds < 2:
        raise ValueError(f"--max-rounds is {max_rounds}: how much runs differ takes at least two to know")
    return max_rounds, size


def _launch(launch: str | None, given: Sequence[str]) -> list[str]:
    """Words of --launch; ValueError where there is no such command, or a flag that says how ranks start here."""
    if launch is None:
        return []
    for name in ("nproc", "host"):
        if name in given:
            raise ValueError(f"--{name} is for ranks on this machine, and --launch starts them: leave it out")
    words = shlex.split(launch)
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"--launch {launch!r}: there is no such command")
    return words


def _run(plan: Plan, folder: Path) -> None:
    """Runs what is left of the plan; progress goes to stderr, between runs only: it must take no time from one."""
    stderr = stderr_console()

    def say(text: str) -> None:
        stderr.print(text, soft_wrap=True, markup=False, highlight=False)

    runs = (plan["rounds"] + plan["host"]) * len(plan["rungs"])
    with StillBar(runs, "runs" if plan["detect"] is None else "runs (at most)", stderr) as bar:
        for done, run_id in enumerate(run_ladder(plan, folder, say), start=1):
            bar.show(done, run_id)


def _print(console: Console, plan: Plan, folder: Path) -> None:
    ladder = read_ladder_json(folder)
    for table in (ladder_table(ladder), ladder_spread_table(ladder), ladder_host_table(ladder)):
        if table is not None:
            console.print(table)
    for rung in ladder["rungs"]:
        if rung["note"]:
            console.print(f"{rung['name']}: {rung['note']}", soft_wrap=True, markup=False, highlight=False)
        if plan["host"] and rung["host"] is None:
            log = folder / f"{profiled_run_id(rung['name'])}.log"
            text = f"warning: the profiled run of {rung['name']} failed: {log}"
            console.print(text, soft_wrap=True, markup=False)
    for text in lucky(ladder):
        console.print(f"note: {text}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"record {folder}", soft_wrap=True)
