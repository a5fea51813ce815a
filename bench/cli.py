"""dlrm-bench: compare runs, and measure where their time goes. `dlrm-bench COMMAND --help` explains each command.

Exit status: 0; 1 where --fail-on found a regression or a run failed; 2 for bad input and what --strict refuses.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress
from tyro.conf import Positional

from bench.compare import compare_sides, read_side, result_as_json, result_table, verdict_in_words
from bench.ladder import ladder_called, ladder_table, read_ladder, run_ladder
from bench.machine import gpus_of_node, short_name_of_node
from bench.record import create_run_folder, new_run_id

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


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
    """Built-in ladder: stock (fp32, tf32, bf16), full (every optimisation), cpu (what runs without a GPU)."""
    rounds: int = 5
    """Runs of each rung; one round alone proves nothing."""
    nproc: int | None = None
    """Processes of a run; by default one for each GPU, or two without any."""
    seed: int = 0
    """Seed of the order within a round."""
    results_dir: Path = Path("results")
    """Where the ladder's folder goes."""

    def run(self, console: Console, forwarded: Sequence[str]) -> int:
        """Runs the ladder; returns the exit status."""
        if self.rounds < 1:
            raise ValueError(f"--rounds is {self.rounds}: at least one is needed")
        rungs = ladder_called(self.rungs)
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
        )
        # The bar is drawn between runs only: it must take no time from a run that is timed.
        with Progress(console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
            bar = progress.add_task("runs", total=self.rounds * len(rungs))
            progress.refresh()
            for run_id in runs:
                progress.update(bar, advance=1, description=run_id, refresh=True)
        ladder, _ = read_ladder(folder)
        console.print(ladder_table(ladder))
        console.print(f"record {folder}", soft_wrap=True)
        return 0


Command = Annotated[Compare, tyro.conf.subcommand("compare")] | Annotated[LadderCommand, tyro.conf.subcommand("ladder")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status. Flags from --preset (or --) on are those of launch/dlrm.py."""
    own, forwarded = _split(sys.argv[1:] if arguments is None else arguments)
    command = tyro.cli(Command, prog="dlrm-bench", description=__doc__, args=own)
    try:
        return command.run(Console(), forwarded)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own flags, and those of launch/dlrm.py."""
    for i, argument in enumerate(arguments):
        if argument == "--":
            return list(arguments[:i]), list(arguments[i + 1 :])
        if argument.partition("=")[0] == "--preset":
            return list(arguments[:i]), list(arguments[i:])
    return list(arguments), []


def _processes(nproc: int | None) -> int:
    """As asked for, or one for each GPU, or two."""
    if nproc is not None and nproc < 1:
        raise ValueError(f"--nproc is {nproc}: at least one process is needed")
    return nproc or gpus_of_node() or 2


def _new_id(processes: int, forwarded: Sequence[str], kind: str) -> str:
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
