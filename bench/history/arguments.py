"""The flags of dlrm-bench history and bisect, separate from the modules that they import when they run."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True, slots=True, frozen=True)
class HistoryCommand:
    """Shows each configuration's records over commits and months, relative to a reference, and their changes.

    The reference is one old program that runs in turn with the others in each sitting (`rerun` makes such runs),
    because machines change too. A record without a reference in its sitting is shown but not judged.
    """

    folder: Positional[Path]
    """Folder of records, at any depth."""
    reference: str | None = None
    """Prefix of the reference's commit or source hash; by default the program that ran beside others in the most
    sittings."""
    gap_minutes: float = 60.0
    """Pause in minutes between two runs on one machine that separates two sittings."""
    out: Path | None = None
    """Folder for a page (index.html) with pictures."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Prints the histories and writes the page; returns the exit status."""
        from dlrm_bench.bench.history.command import history_command

        return history_command(console, self)


@dataclass(kw_only=True, slots=True, frozen=True)
class BisectCommand:
    """Finds the commit that changed the time of an iteration: dlrm-bench bisect GOOD BAD -- --preset smoke ...

    Runs candidate commits between GOOD and BAD in turn with GOOD, in git worktrees, until each is proven to lie below
    or above half of the difference. Flags after -- are flags of launch/dlrm.py, as each commit reads them.
    """

    good: Positional[str | None] = None
    """Commit before the change."""
    bad: Positional[str | None] = None
    """Commit after the change, a descendant of GOOD."""
    nproc: int | None = None
    """Number of processes of a run; by default one for each GPU, or two without a GPU."""
    confidence: float = 0.95
    """Probability that the named commit is the right one, over all steps together."""
    ends: bool = False
    """Run only GOOD and BAD, and no commit between them: with --max-pairs 4 this makes a sitting for `history` in which
    GOOD is the reference."""
    max_pairs: int = 40
    """Maximum number of pairs of runs per candidate; without a proof by then, the candidate stays undecided."""
    results_dir: Path = Path("results")
    """Folder in which the bisection's folder is made."""
    resume: Path | None = None
    """Folder of an interrupted bisection, which continues with its own plan; excludes all other flags."""

    def run(self, console: "Console", forwarded: Sequence[str]) -> int:
        """Bisects and prints the proven result; returns the exit status, 5 without one."""
        from dlrm_bench.bench.history.bisect_command import bisect_command

        return bisect_command(console, forwarded, self)

    def beside_resume(self) -> list[str]:
        """Returns the commits, and the flags beside --resume that are not at their defaults, as a user writes them."""
        given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        flags = [f"--{name.replace('_', '-')}" for name in given if name not in ("good", "bad", "resume")]
        return [commit for commit in (self.good, self.bad) if commit is not None] + flags
