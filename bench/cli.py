"""dlrm-bench: compare runs, and measure where their time goes. `dlrm-bench COMMAND --help` explains each command.

Exit status: 0; 1 where --fail-on found a regression or a run failed; 2 for bad input and what --strict refuses.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional

from bench.compare import compare_sides, read_side, result_as_json, result_table, verdict_in_words

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
    """Exit with status 1 if a side is proven slower than the first, and by this much or more, such as 2%%."""
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
            console.print(f"failed: {label} is slower by --fail-on {self.fail_on} or more", soft_wrap=True, markup=False)
        return EXIT_FAILED if regressed else 0


Command = Annotated[Compare, tyro.conf.subcommand("compare")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status. Flags from --preset (or --) on are those of launch/dlrm.py."""
    own, forwarded = _split(sys.argv[1:] if arguments is None else arguments)
    command = tyro.cli(Command, prog="dlrm-bench", description=__doc__, args=own)  # type: ignore[arg-type]
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
