"""dlrm-bench: compare runs, and measure where their time goes. `dlrm-bench COMMAND --help` explains each command.

Exit status: 0; 1 where --fail-on found a regression or a run that the command started failed, whatever the reason; 2
for bad input and what --strict refuses; 128 and its number after a signal.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from dlrm_bench.bench.progress import StillBar, stderr_console
from dlrm_bench.bench.records.record import create_run_folder, new_run_id, read_record
from dlrm_bench.dlrm.command_line import EXIT_FAILED, exit_status

# Each command imports what it needs when it runs: what only reads records starts without torch.


@dataclass(kw_only=True, slots=True, frozen=True)
class Compare:
    """Compares every side after the first with the first: latency, throughput, intervals, and what is proven.

    A side is a record, a folder of records of the same thing, an MLPerf result log, or a folder of result_*.txt.
    """

    sides: Positional[tuple[Path, ...]]
    """A B [...]."""
    strict: bool = False
    """Refuse to compare sides that differ in what should be equal, or that there is reason to doubt."""
    fail_on: str | None = None
    """Exit with status 1 if a side is proven slower than the first, and by this much or more, such as 2%."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self, console: Console, forwarded: Sequence[str]) -> int:
        """Prints the comparisons; returns the exit status."""
        from dlrm_bench.bench.analysis.compare import (
            compare_sides,
            read_side,
            result_as_json,
            result_table,
            verdict_in_words,
        )
        from dlrm_bench.bench.analysis.mlperf_logs import LOG_COLUMNS, log_row

        _refuse(forwarded)
        if len(self.sides) < 2:
            raise ValueError("compare needs two sides: dlrm-bench compare A B")
        limit = _percentage(self.fail_on) if self.fail_on is not None else None
        first, *others = [read_side(path) for path in self.sides]
        results = [compare_sides(first, other) for other in others]
        if self.strict:
            for result in results:
                if result.differences:
                    raise ValueError("\n  ".join(("--strict: the sides cannot be compared:", *result.differences)))
        regressed = [result.b.label for result in results if limit is not None and result.regressed(limit)]
        if self.json:
            print(json.dumps([result_as_json(result) for result in results], indent=2))
            return EXIT_FAILED if regressed else 0
        runs = [run for side in (first, *others) for run in side.logs]
        if runs:
            table = Table(*LOG_COLUMNS, title="MLPerf logs", title_justify="left", box=box.SIMPLE_HEAD)
            for run in runs:
                table.add_row(*log_row(run))
            console.print(table)
        for result in results:
            console.print(result_table(result))
            console.print(f"[bold]{verdict_in_words(result)}[/]", soft_wrap=True, highlight=False)
            for kind, texts in (("warning", result.differences), ("note", result.notes)):
                for text in texts:
                    console.print(f"{kind}: {text}", soft_wrap=True, markup=False, highlight=False)
        for label in regressed:
            console.print(
                f"failed: {label} is slower by --fail-on {self.fail_on} or more", soft_wrap=True, markup=False
            )
        return EXIT_FAILED if regressed else 0


@dataclass(kw_only=True, slots=True, frozen=True)
class LadderCommand:
    """Runs the rungs of a ladder in turn, A B C A B C ..., each run in fresh processes; prints and writes the result.

    Flags from --preset on are those of launch/dlrm.py and hold for all rungs.
    """

    rungs: str = "stock"
    """Built-in ladder: stock (fp32, tf32, bf16); five-stage (one switch more on each rung); five-stage-trim-first (the
    same switches in another order); full (every optimisation); ends (its first and its last rung); same (A/A); cpu
    (runs without a GPU)."""
    rounds: int = 5
    """Runs of each rung; one round alone proves nothing."""
    host: bool = False
    """After all rounds, run an instrumented twin of each rung: CPU time, launches, syncs, copies, GPU idle fraction."""
    nproc: int | None = None
    """Processes of a run; by default one for each GPU, or two without any."""
    seed: int = 0
    """Seed of the order within a round."""
    results_dir: Path = Path("results")
    """Where the ladder's folder goes."""

    def run(self, console: Console, forwarded: Sequence[str]) -> int:
        """Runs the ladder; returns the exit status."""
        from dlrm_bench.bench.analysis.ladder import ladder_host_table, ladder_table
        from dlrm_bench.bench.ladder.run_ladder import profiled_run_id, run_ladder
        from dlrm_bench.bench.ladder.rungs import built_in_ladder
        from dlrm_bench.bench.records.ladder import read_ladder_json

        if self.rounds < 1:
            raise ValueError(f"--rounds is {self.rounds}: at least one is needed")
        rungs = built_in_ladder(self.rungs)
        processes = _processes(self.nproc)
        folder = create_run_folder(self.results_dir, _new_id(processes, forwarded, "ladder"))
        command = shlex.join(["dlrm-bench", *sys.argv[1:]])
        runs = run_ladder(
            rungs,
            folder=folder,
            processes=processes,
            rounds=self.rounds,
            seed=self.seed,
            flags=forwarded,
            command=command,
            host=self.host,
        )
        # Drawn between runs only: it must take no time from a run that is timed.
        with StillBar((self.rounds + self.host) * len(rungs), "runs", stderr_console()) as bar:
            for done, run_id in enumerate(runs, start=1):
                bar.show(done, run_id)
        ladder = read_ladder_json(folder)
        console.print(ladder_table(ladder))
        host_table = ladder_host_table(ladder)
        if host_table is not None:
            console.print(host_table)
        for rung in ladder["rungs"]:
            if rung["note"]:
                console.print(f"{rung['name']}: {rung['note']}", soft_wrap=True, markup=False, highlight=False)
            if self.host and rung["host"] is None:
                log = folder / f"{profiled_run_id(rung['name'])}.log"
                console.print(f"warning: the twin of {rung['name']} failed: {log}", soft_wrap=True, markup=False)
        console.print(f"record {folder}", soft_wrap=True)
        return 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Host:
    """Runs the instrumented twin of a run: where the host's time goes, and a trace of each rank for Perfetto.

    Name a record to repeat its run, or give the flags of launch/dlrm.py from --preset on.
    """

    record: Positional[Path | None] = None
    """Record of the run to repeat."""
    nproc: int | None = None
    """Processes; by default the record's, or one for each GPU, or two without any."""
    nvtx: bool = False
    """Count and trace nothing, but emit stages and operators as NVTX ranges, for `nsys profile --trace cuda,nvtx
    dlrm-bench host --nvtx ...`; --capture-range cudaProfilerApi leaves all but the last iterations out. GPU only."""
    results_dir: Path = Path("results")
    """Where the twin's record goes."""

    def run(self, console: Console, forwarded: Sequence[str]) -> int:
        """Runs the twin and prints what it found; returns the exit status."""
        from dlrm_bench.bench.analysis.profile_tables import host_table, kernel_table, timeline_table
        from dlrm_bench.bench.analysis.repeat import repeating_flags

        if (self.record is None) == (not forwarded):
            raise ValueError("name one: a record, or --preset and its flags")
        flags, processes = list(forwarded), self.nproc
        if self.record is not None:
            flags, recorded = repeating_flags(read_record(self.record))
            processes = recorded if processes is None else processes
        folder = _measure("nvtx" if self.nvtx else "host", flags, _processes(processes), self.results_dir)
        twin = read_record(folder).run
        for table in (host_table(twin), timeline_table(twin), kernel_table(twin)):
            if table is not None:
                console.print(table)
        console.print(f"record {folder}", soft_wrap=True)
        return 0


@dataclass(kw_only=True, slots=True, frozen=True)
class LimitsCommand:
    """Measures this machine's ceilings and prints the floor of an iteration, and how far records stand above it.

    Flags from --preset on are those of launch/dlrm.py and give the sizes.
    """

    above: tuple[Path, ...] = ()
    """Records to compare with the floor; stages need those of `dlrm-bench host`."""
    measured: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """A limits record to print; nothing is measured then."""
    nproc: int | None = None
    """Processes; by default one for each GPU, or two without any."""
    results_dir: Path = Path("results")
    """Where the limits record goes."""

    def run(self, console: Console, forwarded: Sequence[str]) -> int:
        """Measures or reads, and prints; returns the exit status."""
        from dlrm_bench.bench.analysis.floor import distance_table, limits_table, work_table
        from dlrm_bench.bench.records.limits import read_limits

        if (self.measured is None) == (not forwarded):
            raise ValueError("name one: --from a limits record, or --preset and its flags")
        runs = [read_record(path).run for path in self.above]
        folder = self.measured
        if folder is None:
            folder = _measure("limits", list(forwarded), _processes(self.nproc), self.results_dir)
        limits = read_limits(folder)
        console.print(limits_table(limits))
        console.print(distance_table(limits, runs))
        for kernels in (work_table(limits, run) for run in runs):
            if kernels is not None:
                console.print(kernels)
        console.print(f"record {folder}", soft_wrap=True)
        return 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Report:
    """Writes one self-contained HTML page, and its pictures, from all that it finds in the folders named."""

    paths: Positional[tuple[Path, ...]]
    """Records, ladders, limits and MLPerf logs, or folders of them."""
    out: Path = Path("report")
    """Folder of index.html and the pictures; only files that an earlier report wrote are replaced."""

    def run(self, console: Console, forwarded: Sequence[str]) -> int:
        """Writes the page; returns the exit status."""
        from dlrm_bench.bench.report.page import write_report

        _refuse(forwarded)
        report = write_report(self.paths, self.out, stderr_console())
        for note in report.notes:
            console.print(f"note: {note}", soft_wrap=True, markup=False, highlight=False)
        console.print(f"page {report.page} ({report.page.stat().st_size / 1e6:.2f} MB)", soft_wrap=True)
        return 0


Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[LadderCommand, tyro.conf.subcommand("ladder")]
    | Annotated[Host, tyro.conf.subcommand("host")]
    | Annotated[LimitsCommand, tyro.conf.subcommand("limits")]
    | Annotated[Report, tyro.conf.subcommand("report")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status. Flags from --preset (or --) on are those of launch/dlrm.py."""
    return exit_status(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    own, forwarded = _split(arguments)
    command = tyro.cli(Command, prog="dlrm-bench", description=__doc__, args=own)
    _check_forwarded(command, forwarded)
    # At least as wide as the tables, which are cut off otherwise.
    return command.run(_Console(width=max(130, Console().width)), forwarded)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Ends as print() would: rich alone exits with status 1, which here means something."""
        raise BrokenPipeError


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own flags, and those of launch/dlrm.py."""
    for i, argument in enumerate(arguments):
        if argument == "--":
            return list(arguments[:i]), list(arguments[i + 1 :])
        if argument.partition("=")[0] == "--preset":
            return list(arguments[:i]), list(arguments[i:])
    return list(arguments), []


def _check_forwarded(command: Command, forwarded: Sequence[str]) -> None:
    """ValueError for our own flags among those of launch/dlrm.py, before anything starts; both have a seed."""
    own = {f"--{field.name.replace('_', '-')}" for field in fields(command)} - {"--seed"}
    for flag in (word.partition("=")[0].replace("_", "-") for word in forwarded):
        if flag in own:
            raise ValueError(f"{flag} is a flag of dlrm-bench and not of launch/dlrm.py: put it before --preset")


def _processes(nproc: int | None) -> int:
    """As asked for, or one for each GPU, or two."""
    from dlrm_bench.bench.measure.machine import gpus_of_node

    if nproc is not None and nproc < 1:
        raise ValueError(f"--nproc is {nproc}: at least one process is needed")
    return nproc or gpus_of_node() or 2


def _measure(what: str, flags: list[str], processes: int, results_dir: Path) -> Path:
    """Starts launch/measure.py; the folder that it made. What it says goes to a file beside that folder."""
    from dlrm_bench.bench.ladder.launching import MEASURE, torchrun

    run_id = _new_id(processes, flags, what)
    results_dir.mkdir(parents=True, exist_ok=True)
    output = results_dir / f"{run_id}.log"
    place = ["--results-dir", str(results_dir), "--run-id", run_id]
    with StillBar(1, f"{what}: output in {output}", stderr_console()) as bar:
        torchrun([what, *flags, *place], processes, output, MEASURE)
        bar.show(1, what)
    output.rename(results_dir / run_id / "output.log")
    return results_dir / run_id


def _new_id(processes: int, forwarded: Sequence[str], kind: str) -> str:
    from dlrm_bench.bench.measure.machine import short_name_of_node

    preset = next((b for a, b in pairwise(" ".join(forwarded).replace("=", " ").split()) if a == "--preset"), "smoke")
    return new_run_id(short_name_of_node(processes), f"{preset}-{kind}", datetime.now(UTC))


def _refuse(forwarded: Sequence[str]) -> None:
    if forwarded:
        raise ValueError(f"this command starts no run and takes no {forwarded[0]}: leave it out")


def _percentage(text: str) -> float:
    """0.02 of '2%' or '2'."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise ValueError(f"--fail-on {text!r} is no percentage: write 2%")
    return value


if __name__ == "__main__":
    sys.exit(main())
