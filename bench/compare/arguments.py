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
    """Compares each side after the first with the first: latency, throughput, intervals, and the proven differences.

    A side is a record, a folder of records of the same program, a rung of a ladder with all its rounds (LADDER/RUNG),
    an MLPerf result log, or a folder of result_*.txt. Two ladders are compared rung by rung, by name. A verdict needs
    runs that were made in turn on one machine.
    """

    sides: Positional[tuple[Path, ...]]
    """A B [...]."""
    strict: bool = False
    """Refuse to compare sides that differ in settings that should be equal, that come with a warning, or whose records
    lack the hash of the source, GPU UUIDs, environment or versions."""
    fail_on: str | None = None
    """Check that a regression of this percentage, such as 2%, is excluded: exit status 0 only where it is, 1 where a
    side is proven slower, 5 where the runs are too few to know, or their order allows no verdict."""
    equivalent: str | None = None
    """Check that all sides take the first one's time within this percentage: exit status 0 only where that is proven, 1
    where the opposite is, 5 where the runs are too few to know, or their order allows no verdict."""
    reference: tuple[Path, Path] | None = None
    """OLD NEW: runs of one commit and configuration, made beside those of A and beside those of B. The verdict is then
    on B over NEW less A over OLD, so that A may be of another day or machine."""
    accept_blocked_order: bool = False
    """Give a verdict also where all runs of one side came first, or ran on another machine: a change of the machine in
    between then looks like a difference."""
    json: bool = False
    """Print JSON instead of tables."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Prints the comparisons; returns the exit status."""
        from dlrm_bench.bench.compare.command import compare_command

        return compare_command(console, self)
