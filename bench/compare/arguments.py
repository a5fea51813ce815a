"""The flags of dlrm-bench compare, separate from the modules that it imports when it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True, slots=True, frozen=True)
class Compare:
    """Compares every other side with the first side: latency, throughput, intervals, and the proven differences.

    A side is a record, a folder of records of the same program, a rung of a ladder with all its rounds (LADDER/RUNG),
    an MLPerf result log, or a folder of result_*.txt. Two ladders are compared rung by rung, by name. A verdict needs
    runs that were made in turn on one machine.
    """

    sides: Positional[tuple[Path, ...]]
    """Sides to compare: A B [C ...]."""
    strict: bool = False
    """Refuse to compare sides whose settings differ but should be equal, that cause a warning, or whose records lack
    the source's hash, GPU UUIDs, environment or versions."""
    fail_on: str | None = None
    """Check that a regression of this percentage, such as 2%, is excluded: exit status 0 if it is, 1 if a side is
    proven slower, 5 if there are too few runs, or their order allows no verdict."""
    equivalent: str | None = None
    """Check that all sides equal the first side's time within this percentage: exit status 0 if that is proven, 1 if
    the opposite is proven, 5 if there are too few runs, or their order allows no verdict."""
    reference: tuple[Path, Path] | None = None
    """OLD NEW: runs of one commit and configuration, made beside the runs of A and of B respectively. The verdict then
    compares B / NEW with A / OLD, so that A may come from another day or machine."""
    accept_blocked_order: bool = False
    """Give a verdict even if all runs of one side came first, or ran on another machine: a change of the machine in
    between then looks like a difference."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Prints the comparisons; returns the exit status."""
        from dlrm_bench.bench.compare.command import compare_command

        return compare_command(console, self)
