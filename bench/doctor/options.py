"""Flags of the doctor. Imports nothing but the standard library: --help answers at once."""

import os
from dataclasses import dataclass
from pathlib import Path

NEW_SYNCS = "new-syncs"
FEWEST = 3
"""Iterations of a window that give an interval."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DoctorOptions:
    """The length of the examination, and the files for its findings."""

    warmup: int = 20
    """Iterations before anything is measured."""
    iterations: int = 50
    """Number of iterations timed without instruments, at least 3. The same number is then run with the stack sampled,
    and 15 more give lines; work done every n-th iteration is found if it occurs at least three times."""
    keep_running: bool = False
    """Let the script continue to its end; if it fails then, exit with status 1."""
    json: Path | None = None
    """File for all findings and figures."""
    page: Path | None = None
    """File for a self-contained HTML page with timelines and a flame graph."""
    traces: Path | None = None
    """Folder for the ranks' Chrome traces."""
    baseline: Path | None = None
    """An earlier --json file to compare with: prints findings that are new, gone or moved since, and the earlier
    predictions of these changes."""
    fail_on: str | None = None
    """new-syncs: exit with status 1 if a line makes the host wait that did not do so in --baseline."""

    def check(self) -> None:
        """ValueError, naming the flag, for values that cannot work."""
        if self.warmup < 1:
            raise ValueError(f"--warmup {self.warmup}: at least 1 is needed")
        if self.iterations < FEWEST:
            raise ValueError(
                f"--iterations {self.iterations}: at least {FEWEST} are needed, as fewer tell no error of a time"
            )
        if self.fail_on not in (None, NEW_SYNCS):
            raise ValueError(f"--fail-on {self.fail_on!r} is unknown: it takes {NEW_SYNCS}")
        if self.fail_on is not None and self.baseline is None:
            raise ValueError(f"--fail-on {NEW_SYNCS} needs --baseline, an earlier run's --json")
        for flag, path, is_folder in (
            ("--json", self.json, False),
            ("--page", self.page, False),
            ("--traces", self.traces, True),
        ):
            if path is not None:
                _check_writable(flag, path.absolute(), is_folder)


def _check_writable(flag: str, path: Path, is_folder: bool) -> None:
    """ValueError if the path, or what is there of it, cannot be written: known before the command runs for long."""
    there = next(each for each in (path, *path.parents) if each.exists())
    if there.is_dir() != (is_folder or there != path):
        raise ValueError(f"{flag} {path} cannot be written: {there} is a {'folder' if there.is_dir() else 'file'}")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written: {there} allows no writing")
