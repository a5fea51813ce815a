"""Flags and report of the programs that check data sets: dlrm-bench data check."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import tyro

from dlrm_bench.dlrm.runtime.command_line import EXIT_BAD_INPUT, exit_status
from dlrm_bench.dlrm.runtime.parsed import options_of


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckConfig:
    """Checks a directory of data."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory of the data."""
    fast: bool = False
    """Check only sizes, headers and a few samples of each file: seconds instead of hours."""
    mlperf: bool = False
    """Treat the files as MLPerf's own: compare all counts, and the checksum of every file."""

    def __post_init__(self) -> None:
        if self.mlperf and self.fast:
            raise ValueError("--mlperf reads every byte, --fast does not: choose one of them")


class Checked(Protocol):
    """The result of a check."""

    @property
    def findings(self) -> list[str]:
        """One line per defect, with the file and the fix; empty if there are none."""
        ...

    @property
    def counts(self) -> str:
        """The number of files, samples or events checked, in words."""
        ...


C = TypeVar("C", bound=CheckConfig)


def run_check(kind: type[C], check: Callable[[C], Checked], args: Sequence[str] | None, description: str | None) -> int:
    """Checks the directory given on the command line and prints each finding on a line of stdout.

    Returns the exit status, 2 if there are findings. kind: the class that defines the flags.
    """

    def run() -> int:
        config = options_of(kind, args, "data check", description)
        checked = check(config)
        for finding in checked.findings:
            print(finding)
        if checked.findings:
            return EXIT_BAD_INPUT
        print(f"{config.directory}: {checked.counts}, all well")
        return 0

    return exit_status(run)
