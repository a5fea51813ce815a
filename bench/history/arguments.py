"""The flags of dlrm-bench history and bisect, separate from the modules that they import when they run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True, slots=True, frozen=True)
class HistoryCommand:
    """Shows each configuration's records over commits and months, beside a reference's, and their changes.

    The reference is one old program, which runs in turn with the others in each sitting (`rerun` makes such runs):
    machines change too. A record without a reference in its sitting is shown and not judged.
    """

    folder: Positional[Path]
    """Folder of records, at any depth."""
    reference: str | None = None
    """Beginning of the reference's commit, or of its source's hash; by default the program that ran beside others in
    most sittings."""
    gap_minutes: float = 60.0
    """Minutes between two runs of one machine from which on they are of two sittings."""
    out: Path | None = None
    """Folder for a page (index.html) with pictures."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Prints the histories and writes the page; returns the exit status."""
        from dlrm_bench.bench.history.command import history_command

        return history_command(console, self)


@dataclass(kw_only=True, slots=True, frozen=True)
class BisectCommand:
    """Finds the commit that changed the time of an iteration: dlrm-bench bisect GOOD BAD -- --preset smoke ...

    Runs candidates of the history between both commits in turn with GOOD, in git worktrees, until it is proven on which
    side of half of the difference each of them is. Flags behind -- are those of launch/dlrm.py, as each commit reads
    them.
    """

    good: Positional[str | None] = None
    """Commit before the change."""
    bad: Positional[str | None] = None
    """Commit after it, in whose history the good one is."""
    nproc: int | None = None
    """Number of processes of a run; by default one for each GPU, or two without a GPU."""
    confidence: float = 0.95
    """Probability, of all steps together, that the named commit is the right one."""
    ends: bool = False
    """Run GOOD and BAD alone, and look for no commit between them: with --max-pairs 4, a sitting for `history` in which
    GOOD is the reference."""
    max_pairs: int = 40
    """Number of pairs of runs of one candidate after which it stays undecided."""
    results_dir: Path = Path("results")
    """Folder in which the bisection's folder is made."""
    resume: Path | None = None
    """Folder of an interrupted bisection, which continues by its plan; takes no other flag."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Bisects and prints the proven result; returns the exit status, 5 without one."""
        from dlrm_bench.bench.history.bisect_command import bisect_command

        return bisect_command(console, forwarded, self)
