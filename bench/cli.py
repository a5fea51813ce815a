"""dlrm-bench: compare runs, and measure where their time goes. `dlrm-bench COMMAND --help` explains each command,
`dlrm-bench --version` prints the version.

Exit status: 0; 1 if a check such as --fail-on fails, or if a run that the command started fails for any reason; 2 for
bad input and for records that --strict refuses; 5 if a check has too few runs, or runs in an order that allows no
verdict; 128 plus the signal's number after a signal.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from dlrm_bench.bench.compare.arguments import Compare
from dlrm_bench.bench.doctor.options import DoctorOptions
from dlrm_bench.bench.forwarded import split_forwarded
from dlrm_bench.bench.history.arguments import BisectCommand, HistoryCommand
from dlrm_bench.bench.ladder.arguments import LadderCommand
from dlrm_bench.bench.report.arguments import Report, Tables
from dlrm_bench.bench.scale.arguments import Scale
from dlrm_bench.dlrm.runtime.command_line import FailedError, exit_status
from dlrm_bench.dlrm.runtime.parsed import parsed

if TYPE_CHECKING:
    from rich.console import Console

# A command imports its modules when it runs, so that --help and commands that only read records start at once.


@dataclass(kw_only=True, slots=True, frozen=True)
class Host:
    """Profiles a run: where the host's time goes, and a trace of each rank for Perfetto.

    Name a record to profile its configuration, or give the flags of launch/dlrm.py from --preset on.
    """

    record: Positional[Path | None] = None
    """Record of the run to repeat with a profiler."""
    nproc: int | None = None
    """Number of processes; by default the record's, or one for each GPU, or two without a GPU."""
    nvtx: bool = False
    """Emit stages and operators as NVTX ranges in place of counts and traces, for `nsys profile --trace cuda,nvtx
    dlrm-bench host --nvtx ...`; --capture-range cudaProfilerApi records the last iterations only. GPU only."""
    results_dir: Path = Path("results")
    """Folder in which the profiled run's record is made."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Runs with a profiler and prints counts, stages and the host's time; returns the exit status."""
        from dlrm_bench.bench.compare.repeat import repeating_flags
        from dlrm_bench.bench.profile.tables import host_table, kernel_table, timeline_table
        from dlrm_bench.bench.records.record import read_record
        from dlrm_bench.bench.started_runs import measure, processes_of_run

        if (self.record is None) == (not forwarded):
            raise ValueError("name either a record or --preset and its flags: dlrm-bench host RECORD")
        flags, processes = list(forwarded), self.nproc
        if self.record is not None:
            flags, recorded = repeating_flags(read_record(self.record))
            processes = recorded if processes is None else processes
        folder = measure("nvtx" if self.nvtx else "host", flags, processes_of_run(processes), self.results_dir)
        profiled = read_record(folder).run
        for table in (host_table(profiled), timeline_table(profiled), kernel_table(profiled)):
            if table is not None:
                console.print(table)
        console.print(f"record {folder}", soft_wrap=True)
        return 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Rerun:
    """Runs a record's configuration again with the code of its commit, in a git worktree, and compares the two.

    A record of an installed package, without a commit, is rerun by the same version, installed or checked out.
    """

    record: Positional[Path]
    """Record of the run to repeat, or a rung of a ladder (LADDER/RUNG): the reruns are then compared with all rounds of
    that rung."""
    rounds: int = 2
    """Number of runs. A single run proves nothing, nor does a comparison with a single record."""
    nproc: int | None = None
    """Number of processes; by default the record's."""
    results_dir: Path = Path("results")
    """Folder in which the folder of the reruns is made."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Reruns the record and prints the comparison; returns the exit status."""
        from dlrm_bench.bench.rerun import rerun_command

        return rerun_command(console, self.record, self.rounds, self.nproc, self.results_dir)


@dataclass(kw_only=True, slots=True, frozen=True)
class LimitsCommand:
    """Measures this machine's ceilings, and compares records with the least time that their FLOP, bytes and
    dependencies allow: at the measured rates, or, with --above alone, at the known rates of their GPUs. The table names
    the source of its rates.

    Flags from --preset on are flags of launch/dlrm.py and determine the sizes.
    """

    above: tuple[Path, ...] = ()
    """Records to compare with the least time; for stages, records of `dlrm-bench host`."""
    roofline: Path | None = None
    """File (.png or .svg) for a roofline plot of the first profiled record of --above."""
    measured: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Limits record to print instead of measuring."""
    rates: Path | None = None
    """Limits record whose measured rates --above alone uses; by default the known rates of the GPU."""
    batch: int | None = None
    """Local batch size of the iteration that --above alone bounds; by default the records' own."""
    nproc: int | None = None
    """Number of processes; by default one for each GPU, or two without a GPU."""
    results_dir: Path = Path("results")
    """Folder in which the limits record is made."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Measures or reads limits and prints them; returns the exit status."""
        from dlrm_bench.bench.limits.bound import NO_BOUND, bound_table, with_batch
        from dlrm_bench.bench.limits.floor import check_same_work, limits_table, work_table
        from dlrm_bench.bench.records.limits import read_limits
        from dlrm_bench.bench.records.record import read_record
        from dlrm_bench.bench.report.roofline import print_bounds, write_roofline

        runs = [read_record(path).run for path in self.above]
        if self.above and self.measured is None and not forwarded:
            limits = None if self.rates is None else read_limits(self.rates)
            if self.batch is not None:
                runs = [with_batch(run, self.batch) for run in runs]
            return print_bounds(console, runs, self.roofline, limits)
        if self.rates is not None or self.batch is not None:
            raise ValueError("--rates and --batch are for --above alone: leave them out")
        if (self.measured is None) == (not forwarded):
            raise ValueError(
                "name --from LIMITS, or --preset and its flags, or --above RECORD: dlrm-bench limits --preset smoke"
            )
        if self.roofline is not None:
            write_roofline(runs, self.roofline)  # which needs no measurement: a refusal comes before it
        folder = self.measured
        if folder is None:
            from dlrm_bench.bench.started_runs import measure, processes_of_run

            folder = measure("limits", forwarded, processes_of_run(self.nproc), self.results_dir)
        limits = read_limits(folder)
        for run in runs:
            check_same_work(limits, run)
        console.print(limits_table(limits))
        for run in runs:
            console.print(bound_table(run, limits) or f"warning: {run['id']}: {NO_BOUND}", soft_wrap=True)
        for kernels in (work_table(limits, run) for run in runs):
            if kernels is not None:
                console.print(kernels)
        console.print(f"record {folder}", soft_wrap=True)
        return 0


@dataclass(kw_only=True, slots=True, frozen=True)
class RecordCommand:
    """Makes a record of another program's timings, for compare and report: dlrm-bench record times.csv --out mine/0 ...

    The file has a line for each iteration and a column for each rank, or is a .npy of [ranks, iterations]; it contains
    every iteration of the run. Make one record per run and several runs per side, in the order A B B A.
    """

    times: Positional[Path]
    """File of one run's times."""
    out: Path
    """Folder of the record, which must not exist."""
    name: str
    """Name of the program, equal for all runs of a side."""
    samples: int
    """Number of samples of an iteration, of all ranks together."""
    unit: Literal["us", "ms", "s"] = "ms"
    """Unit of the times."""
    warmup_iterations: int = 0
    """Number of first iterations, which all statistics exclude."""
    finished: str | None = None
    """Time at which the run ended, as 2026-11-22T10:30:00+00:00; by default the file's. `compare` pairs runs by it."""
    host: str | None = None
    """Name of the machine."""
    gpus: int = 0
    """Number of GPUs."""
    gpu: str | None = None
    """Name of the GPUs."""
    commit: str | None = None
    """Commit of the program."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Writes the record; returns the exit status."""
        from dlrm_bench.bench.records.own_timings import read_times, time_of_end, write_timings

        known = {"gpus": self.gpus, "gpu": self.gpu} | ({"hosts": [self.host]} if self.host else {})
        write_timings(
            self.out,
            read_times(self.times, self.unit),
            name=self.name,
            samples=self.samples,
            warmup=self.warmup_iterations,
            finished=time_of_end(self.times, self.finished),
            machine=known,
            commit=self.commit,
            command=f"timings of {self.times.name}",
        )
        console.print(f"record {self.out}", soft_wrap=True)
        return 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Doctor(DoctorOptions):
    """Examines your training script: dlrm-bench doctor [flags] -- torchrun --nproc_per_node 8 train.py ...

    Names the lines that make the host wait, copy or launch too much in a steady iteration, costliest first. The script
    is not changed; it is ended after the iterations that the doctor needs.
    """

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Runs the command and prints the findings; returns the exit status."""
        from dlrm_bench.bench.doctor.examine import ExaminationError, doctor

        try:
            return doctor(console, forwarded, self)
        except ExaminationError as error:
            raise FailedError(str(error)) from error


@dataclass(kw_only=True, slots=True, frozen=True)
class Data:
    """Makes and checks data sets: `dlrm-bench data generate --help` explains an action's flags.

    generate: planted samples with a known best possible AUC. fill: random samples, fast, for measurements. preprocess:
    conversion of the benchmark's raw data files to MLPerf's formats. check: completeness and values of the files in a
    directory. speed: the rate at which ranks read the files. rows: the number of rows of sequence tables that training
    names (--preset selects a benchmark with such tables). counts: how often samples from files or at random name each
    row of pooled tables. --preset NAME selects the benchmark of that preset and the flags that --help shows.
    """

    what: Positional[Literal["generate", "fill", "preprocess", "check", "speed", "rows", "counts"]]
    """The action; its own flags follow."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Passes the flags on; returns the exit status."""
        from dlrm_bench.bench.data_command import run_data

        return run_data(self.what, forwarded)


@dataclass(kw_only=True, slots=True, frozen=True)
class Submission:
    """Builds, checks and scores an MLPerf submission: `dlrm-bench submission build --help` explains an action's flags.

    build: arranges ten runs by MLPerf's rules. check: runs MLPerf's checkers. score: computes the minutes.
    """

    what: Positional[Literal["build", "check", "score"]]
    """The action; its own flags follow."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Passes the flags on; returns the exit status."""
        from dlrm_bench.bench.mlperf.submission.command import run_submission

        return run_submission(self.what, console, forwarded)


@dataclass(kw_only=True, slots=True, frozen=True)
class Checkpoint:
    """Checks checkpoints: dlrm-bench checkpoint verify DIR

    verify: reads every byte of a checkpoint, or of the newest complete checkpoint in a folder, and prints a line for
    each difference from the written data; the exit status is 2 if there is a difference. A snapshot in memory has no
    checksums. Neither this command nor --resume runs code from a checkpoint; but checksums show damage, not who wrote a
    checkpoint: resume only your own.
    """

    what: Positional[Literal["verify"]]
    """The action."""
    directory: Positional[Path]
    """A checkpoint, or a folder of them."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Checks the checkpoint and prints the findings; returns the exit status."""
        from dlrm_bench.bench.checkpoints.verify import verify_checkpoint

        return verify_checkpoint(console, self.directory)


Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[LadderCommand, tyro.conf.subcommand("ladder")]
    | Annotated[Host, tyro.conf.subcommand("host")]
    | Annotated[Rerun, tyro.conf.subcommand("rerun")]
    | Annotated[LimitsCommand, tyro.conf.subcommand("limits")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Tables, tyro.conf.subcommand("tables")]
    | Annotated[RecordCommand, tyro.conf.subcommand("record")]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[Submission, tyro.conf.subcommand("submission")]
    | Annotated[Checkpoint, tyro.conf.subcommand("checkpoint")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Scale, tyro.conf.subcommand("scale")]
    | Annotated[HistoryCommand, tyro.conf.subcommand("history")]
    | Annotated[BisectCommand, tyro.conf.subcommand("bisect")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status. Flags from --preset (or --) on are passed on as those of
    launch/dlrm.py."""
    return exit_status(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    passes_all = list(arguments[:1]) in (["data"], ["submission"])
    own, forwarded = (arguments[:2], arguments[2:]) if passes_all else split_forwarded(arguments)
    if list(arguments) == ["--version"]:
        from dlrm_bench.bench import ROOT
        from dlrm_bench.bench.machine.source import version

        print(version(ROOT))
        return 0
    try:
        command: Command = parsed(partial(tyro.cli, Command, prog="dlrm-bench", description=__doc__, args=own))
    except ValueError as error:
        raise ValueError(f"{str(error).removesuffix('.')}; `dlrm-bench COMMAND --help` explains each command") from None
    if not isinstance(command, Data | Submission | Doctor):  # what follows them has flags of its own
        _check_forwarded(command, forwarded)
    from dlrm_bench.bench.console import console  # rich is imported once the flags are read

    return command.run(console(), forwarded)


def _check_forwarded(command: Command, forwarded: Sequence[str]) -> None:
    """Raises ValueError for a flag in the wrong place, before anything starts: both commands have a --seed."""
    if forwarded and not isinstance(command, LadderCommand | Host | LimitsCommand | BisectCommand):
        raise ValueError(f"{forwarded[0]} is a flag of launch/dlrm.py, and this command starts no run: leave it out")
    own = {f"--{field.name.replace('_', '-')}" for field in fields(command)} - {"--seed"}
    for word in forwarded:
        if (flag := word.partition("=")[0].replace("_", "-")) in own:
            raise ValueError(f"{flag} is a flag of dlrm-bench and not of launch/dlrm.py: put it before --preset")
        if flag == "--run-id":
            raise ValueError("--run-id is set by this command: leave it out")


if __name__ == "__main__":
    sys.exit(main())
