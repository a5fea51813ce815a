"""dlrm-bench submission build, check and score: the commands, their flags, and their output."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from dlrm_bench.bench.forwarded import split_forwarded, take_flag
from dlrm_bench.bench.mlperf.submission.checkers import Verdict, check_package
from dlrm_bench.bench.mlperf.submission.package import RUNS, open_packages
from dlrm_bench.bench.mlperf.submission.score import score_package, score_table
from dlrm_bench.dlrm.runtime.command_line import EXIT_FAILED
from dlrm_bench.dlrm.runtime.parsed import options_of


@dataclass(kw_only=True, slots=True, frozen=True)
class Build:
    """Arranges ten runs by MLPerf's rules: OUT/ORG/{systems,results,benchmarks}.

    The runs are those that --runs names, or ten new runs with the flags of launch/dlrm.py from --preset on, such as
    `--mlperf.org`, which sets ORG. The system description is derived from the machine and written only once: edit it.
    """

    out: Annotated[Path, tyro.conf.Positional]
    """Folder of the submission."""
    runs: tuple[Path, ...] = ()
    """Runs to submit: ten record folders, a folder of ten, or ten result logs."""
    system: str | None = None
    """Name for the files of the system; by default derived from the name in the logs."""
    nproc: int | None = None
    """Number of processes of a new run; by default one for each GPU, or two without a GPU."""
    first_seed: int = 0
    """Seed of the first new run; it grows by one with each run."""
    records: Path | None = None
    """Folder for the records of new runs; by default OUT-runs. Finished runs in the folder are reused if flags, seeds
    and program are the same, and refused otherwise."""

    def run(self, console: Console, forwarded: Sequence[str]) -> int:
        """Builds the package; returns the exit status."""
        from dlrm_bench.bench.mlperf.submission.build import build, read_given

        if bool(self.runs) == bool(forwarded):
            raise ValueError(
                "name ten runs with --runs, or give the flags of new ones from --preset on: one of the two"
            )
        runs = read_given(self.runs or self._do(console, forwarded))
        built = build(self.out, runs, self.system)
        for note in built.notes:
            console.print(f"note: {note}", soft_wrap=True, markup=False, highlight=False)
        what = "written" if built.described else "kept as it was"
        console.print(f"description  {built.package.description}: {what}", soft_wrap=True, highlight=False)
        if built.missing:
            text = f"to fill in   {', '.join(built.missing)}"
            console.print(text, soft_wrap=True, highlight=False)
        console.print(f"package      {built.package.folder}", soft_wrap=True, highlight=False)
        return 0

    def _do(self, console: Console, flags: Sequence[str]) -> list[Path]:
        """Makes ten new runs; returns their folders."""
        from dlrm_bench.bench.mlperf.submission.ten_runs import run_ten
        from dlrm_bench.bench.started_runs import processes_of_run

        for flag in ("--seed", "--run-id", "--results-dir"):
            if take_flag(flags, flag)[0] is not None:
                raise ValueError(f"{flag} is chosen by this command: use --first-seed and --records")
        folder = self.records or self.out.with_name(f"{self.out.name}-runs")
        folder.mkdir(parents=True, exist_ok=True)
        done = []
        for record in run_ten(folder, processes_of_run(self.nproc), self.first_seed, flags):
            done.append(record)
            console.print(f"run {len(done):2} of {RUNS}: {record}", soft_wrap=True, highlight=False)
        return done


@dataclass(kw_only=True, slots=True, frozen=True)
class Check:
    """Runs MLPerf's compliance, package, RCP, system and repository checkers over a submission and reads their output.

    It also finds defects that the checkers miss: aborted runs, repeated seeds, runs of other configurations, empty
    fields, and impossible logs, such as logs whose times decrease. The exit status is 1 if the submission would not be
    accepted.
    """

    package: Annotated[Path, tyro.conf.Positional]
    """Folder of the submission: ORG, or its parent. Nothing in it is changed."""
    system: str | None = None
    """One of several systems; by default all."""
    ruleset: str | None = None
    """Ruleset of the checkers, such as 6.1.0; by default the newest that knows the benchmark."""
    log: Path | None = None
    """File for all output of the checkers."""
    made_data: bool = False
    """Treat the runs as trained on generated data: note, instead of refusing, values that the rules fix for MLPerf's
    own data, such as numbers of samples. Such a package cannot be submitted."""

    def run(self, console: Console, forwarded: Sequence[str]) -> int:
        """Prints verdicts and findings; returns the exit status."""
        del forwarded
        texts, accepted = [], True
        for package in open_packages(self.package, self.system):
            verdicts = check_package(package, self.ruleset, self.made_data)
            accepted &= all(verdict.passed for verdict in verdicts)
            ruleset = package.ruleset(self.ruleset)
            console.print(_verdicts_table(f"{package.folder.name}, {package.system}, ruleset {ruleset}", verdicts))
            for verdict in verdicts:
                for finding in verdict.findings:
                    text = f"{'error' if finding.fatal else 'note'}: {verdict.checker}: {finding.text}"
                    console.print(text, soft_wrap=True, markup=False, highlight=False)
            texts += [f"==== {package.system}: {verdict.checker}\n{verdict.text}" for verdict in verdicts]
        if self.log is not None:
            self.log.write_text("\n".join(texts), encoding="utf-8")
        but = " except for values that MLPerf's own data decides" if self.made_data else ""
        console.print(f"accepted{but}" if accepted else "not accepted: fix the errors and check again")
        return 0 if accepted else EXIT_FAILED


@dataclass(kw_only=True, slots=True, frozen=True)
class Score:
    """Computes the score of a submission: minutes, the mean of ten runs without the fastest and the slowest.

    A closed submission that converged faster than the reference is scaled by MLPerf's rules. The exit status is 1 if
    there is no valid result.
    """

    package: Annotated[Path, tyro.conf.Positional]
    """Folder of the submission: ORG, or its parent."""
    system: str | None = None
    """One of several systems; by default all."""
    ruleset: str | None = None
    """Ruleset of the reference convergence points; by default the newest that knows the benchmark."""

    def run(self, console: Console, forwarded: Sequence[str]) -> int:
        """Prints runs and score; returns the exit status."""
        del forwarded
        valid = True
        for package in open_packages(self.package, self.system):
            score = score_package(package, self.ruleset)
            console.print(score_table(score))
            for note in score.notes:
                console.print(f"note: {note}", soft_wrap=True, markup=False, highlight=False)
            if score.minutes is None:
                valid = False
                for reason in score.invalid:
                    console.print(f"no result: {reason}", soft_wrap=True, markup=False, highlight=False)
                continue
            scaled = f" = {score.olympic_minutes:.4f} * {score.scaling:.6f}" if score.scaling != 1 else ""
            console.print(f"score        {score.minutes:.4f} minutes{scaled}", soft_wrap=True, highlight=False)
        return 0 if valid else EXIT_FAILED


def _verdicts_table(title: str, verdicts: Sequence[Verdict]) -> Table:
    table = Table("checker", "verdict", "errors", "notes", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for verdict in verdicts:
        fatal = sum(finding.fatal for finding in verdict.findings)
        word = "passed" if verdict.passed else "failed"
        table.add_row(
            verdict.checker,
            word if verdict.asked else "not asked in the open division",
            str(fatal),
            str(len(verdict.findings) - fatal),
        )
    return table


COMMANDS: dict[str, type[Build] | type[Check] | type[Score]] = {"build": Build, "check": Check, "score": Score}


def run_submission(what: str, console: Console, words: Sequence[str]) -> int:
    """Runs one of COMMANDS with its flags; from --preset (or --) on, those of build are flags of launch/dlrm.py."""
    own, forwarded = split_forwarded(words) if what == "build" else (words, [])
    command = options_of(COMMANDS[what], own, f"submission {what}")
    return command.run(console, forwarded)
