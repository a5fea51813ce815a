"""dlrm-bench ladder: plans a ladder or resumes one, runs it, and prints its tables."""

import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from dlrm_bench.bench.compare.checks import percentage
from dlrm_bench.bench.flags import parse_run
from dlrm_bench.bench.forwarded import preset_name, take_flag
from dlrm_bench.bench.instruments.progress import StillBar, stderr_console
from dlrm_bench.bench.ladder.analysis import (
    ladder_clock_table,
    ladder_host_table,
    ladder_spread_table,
    ladder_table,
    lucky,
)
from dlrm_bench.bench.ladder.arguments import LadderCommand
from dlrm_bench.bench.ladder.run_ladder import Rounds, make_plan, plan_to_resume, profiled_run_id, run_ladder
from dlrm_bench.bench.machine.description import gpus_of_node
from dlrm_bench.bench.obstacles import check_precision, check_tables_fit_node
from dlrm_bench.bench.records.ladder import Plan, read_ladder_json
from dlrm_bench.bench.records.record import create_run_folder
from dlrm_bench.bench.started_runs import new_id, processes_of_run
from dlrm_bench.dlrm.benchmark import Rung
from dlrm_bench.dlrm.benchmarks import PRESETS, preset_of
from dlrm_bench.pipeline.interface import check_device
from dlrm_bench.pipeline.torchrec.options import TorchRecOptions


def ladder_command(console: Console, forwarded: Sequence[str], asked: LadderCommand) -> int:
    """Runs a ladder and prints it; returns the exit status.

    forwarded: flags of launch/dlrm.py. ValueError names a flag that cannot be used.
    """
    if asked.resume is not None:
        others = [*(f"--{name.replace('_', '-')}" for name in asked.given() if name != "resume"), *forwarded[:1]]
        if others:
            raise ValueError(f"--resume continues the plan of {asked.resume}: leave out {', '.join(others)}")
        plan, folder = plan_to_resume(asked.resume), asked.resume
    else:
        plan, folder = _plan(asked, forwarded)
    _run(plan, folder)
    _print(console, plan, folder)
    return 0


def _plan(asked: LadderCommand, forwarded: Sequence[str]) -> tuple[Plan, Path]:
    """Creates the folder of a new ladder; returns its plan and the folder."""
    rounds, launch = _rounds(asked), _launch(asked)
    rungs = _rungs(asked.rungs, preset_name(forwarded))
    _check_flags(asked.rungs, rungs, forwarded)
    processes = processes_of_run(asked.nproc)
    if not launch:
        _check_node(asked.rungs, rungs, forwarded, processes)
    plan = make_plan(
        rungs,
        rounds,
        processes=processes,
        seed=asked.seed,
        flags=forwarded,
        command=shlex.join(["dlrm-bench", *sys.argv[1:]]),
        host=asked.host,
        launch=launch,
    )
    return plan, create_run_folder(asked.results_dir, new_id(processes, forwarded, "ladder"))


def _rungs(ladder: str, preset: str) -> tuple[Rung, ...]:
    """Returns the rungs of a ladder of the preset's benchmark. ValueError lists the ladders of that benchmark, and the
    presets of others that have one of this name."""
    ladders = preset_of(preset)[0].ladders
    if ladder not in ladders:
        others = [name for name, (benchmark, _) in PRESETS.items() if ladder in benchmark.ladders]
        raise ValueError(
            f"--rungs {ladder!r} is unknown for --preset {preset}: choose one of {', '.join(ladders)}"
            + (f"; {ladder} is a ladder of --preset {', '.join(others)}" if others else "")
        )
    return ladders[ladder]


def _check_flags(ladder: str, rungs: Sequence[Rung], flags: Sequence[str]) -> None:
    """Raises ValueError for a flag that every rung would replace, or that would replace the pipeline of a rung.

    A rung without --pipeline is stock, except in a ladder of one thing twice, whose thing the flags may choose.
    """
    if ladder != "same" and take_flag(flags, "--pipeline")[0] is not None:
        raise ValueError(f"--pipeline is set by the rungs of {ladder}: leave it out")
    for flag in sorted({word for rung in rungs for word in rung.flags if word.startswith("--")}):
        given, *own = (_value(words, flag) for words in (flags, *(rung.flags for rung in rungs)))
        values = [value for value in dict.fromkeys(own) if value is not None]
        if given is not None and None not in own and given not in values:
            raise ValueError(f"{flag} is set by every rung of {ladder}, to {' or '.join(values)}: leave it out")


def _check_node(ladder: str, rungs: Sequence[Rung], flags: Sequence[str], processes: int) -> None:
    """Raises ValueError, before any run, for a bad flag, and for a rung that needs a GPU or more memory than this node
    has."""
    on_gpus, cpu = gpus_of_node() > 0, torch.device("cpu")
    for rung in rungs:
        _, words = take_flag([*flags, *rung.flags], "--preset")
        pipeline, words = take_flag(words, "--pipeline")
        config = parse_run(preset_name(flags), pipeline or TorchRecOptions.name, words, "", prints=True)
        try:
            if not on_gpus:
                check_precision(config, cpu)
                check_device(config.pipeline, cpu)
        except ValueError as error:
            raise ValueError(
                f"--rungs {ladder} needs a GPU, and this machine has none ({rung.name}: {error}); "
                "`dlrm-bench ladder --rungs cpu --preset smoke` needs none"
            ) from None
        try:
            check_tables_fit_node(config, processes, on_gpus)
        except ValueError as error:
            raise ValueError(
                f"--rungs {ladder} needs more memory than this machine has: {rung.name}: {error}"
            ) from None


def _value(words: Sequence[str], flag: str) -> str | None:
    """Returns the value, or the first of several, of a flag; None if it is absent or a switch."""
    value, _ = take_flag(words, flag)
    return None if value is None or value.startswith("--") else value


def _rounds(asked: LadderCommand) -> Rounds:
    """Returns the number of rounds that the flags ask for, or the precision that ends them."""
    if asked.max_minutes is not None and not 0 < asked.max_minutes < math.inf:
        raise ValueError(f"--max-minutes is {asked.max_minutes:g}: it must be positive and finite")
    if asked.rounds != "auto":
        for name in ("detect", "max_rounds"):
            if name in asked.given():
                raise ValueError(f"--{name.replace('_', '-')} is for --rounds auto: add that, or leave this out")
        if asked.rounds < 1:
            raise ValueError(f"--rounds is {asked.rounds}: at least one is needed")
        return Rounds(most=asked.rounds, minutes=asked.max_minutes)
    size = percentage("--detect", asked.detect)
    if not size:
        raise ValueError(
            f"--detect {asked.detect}: no number of rounds finds a zero difference; name a positive one, such as 2%"
        )
    if asked.max_rounds < 2:
        raise ValueError(f"--max-rounds is {asked.max_rounds}: measuring how much runs differ takes at least two")
    return Rounds(most=asked.max_rounds, detect=size, minutes=asked.max_minutes)


def _launch(asked: LadderCommand) -> list[str]:
    """Returns the words of --launch. ValueError if there is no such command, or if a flag for local ranks is given
    too."""
    if asked.launch is None:
        return []
    for name in ("nproc", "host"):
        if name in asked.given():
            raise ValueError(f"--{name} is for local ranks, but --launch starts the ranks: leave it out")
    try:
        words = shlex.split(asked.launch)
    except ValueError as error:
        raise ValueError(f"--launch {asked.launch!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"--launch {asked.launch!r}: there is no such command")
    return words


def _run(plan: Plan, folder: Path) -> None:
    """Runs the rest of the plan; prints progress to stderr, only between runs, to take no time from a run."""
    stderr = stderr_console()

    def say(text: str) -> None:
        stderr.print(text, soft_wrap=True, markup=False, highlight=False)

    runs = (plan["rounds"] + plan["host"]) * len(plan["rungs"])
    with StillBar(runs, "runs" if plan["detect"] is None else "runs (at most)", stderr) as bar:
        for done, run_id in enumerate(run_ladder(plan, folder, say), start=1):
            bar.show(done, run_id)


def _print(console: Console, plan: Plan, folder: Path) -> None:
    ladder = read_ladder_json(folder)
    tables = (ladder_table, ladder_clock_table, ladder_spread_table, ladder_host_table)
    for table in (make(ladder) for make in tables):
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
