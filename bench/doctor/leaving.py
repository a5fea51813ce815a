"""The ends of ranks: a rank that disappears without its file is named at once, and no process waits for it.

Each rank records its process at its first iteration. os._exit() skips Python's exit handlers, and a signal skips
Python: for os._exit() the line is recorded, after a signal only the absence of the process is known.
"""

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from .rank_file import rank_path
from .site_folder import belongs_to

GRACE_S = 3.0
"""Seconds in which a launcher can end the other ranks by itself once a rank is gone."""


def began_path(folder: Path, rank: int) -> Path:
    """Returns the file in which a rank names its process."""
    return folder / f"rank{rank}.began"


def ended_path(folder: Path, rank: int) -> Path:
    """Returns the file in which a rank records where it called os._exit() before its examination was over."""
    return folder / f"rank{rank}.ended"


def begin(folder: Path, rank: int, steps: Callable[[], int | None]) -> Callable[[int], NoReturn]:
    """Says that this process is the rank, and watches os._exit(); returns the original one.

    steps(): iterations so far; None once nothing is left to be examined.
    """
    unfinished = folder / f"rank{rank}.process"
    unfinished.write_text(json.dumps({"pid": os.getpid()}), encoding="utf-8")
    unfinished.rename(began_path(folder, rank))
    original: Callable[[int], NoReturn] = os._exit
    process = os.getpid()

    @functools.wraps(original)
    def leave(status: int = 0) -> NoReturn:
        so_far = steps() if os.getpid() == process else None
        if so_far is not None:
            caller = sys._getframe(1)
            told = {"steps": so_far, "status": status, "file": caller.f_code.co_filename, "line": caller.f_lineno}
            ended_path(folder, rank).write_text(json.dumps(told), encoding="utf-8")
        original(status)

    os._exit = leave
    return original


def gone(process: int) -> bool:
    """Whether a process of this machine is no more, or waits only for its parent to take its status."""
    try:
        state = Path("/proc", str(process), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return state.rpartition(")")[2].split()[0] in "ZX"


def dead_ranks(folder: Path) -> list[int]:
    """Ranks of this machine that began and are gone without leaving a file, by number; for their own peers."""
    return [rank for rank, process in _unfinished(folder).items() if gone(process)]


def ended_early(folder: Path) -> bool:
    """Whether a rank's script ended, or raised, before its examination was over, and left its file."""
    return any(not json.loads(path.read_text(encoding="utf-8"))["complete"] for path in folder.glob("rank*.json"))


def why(folder: Path, rank: int) -> str:
    """Returns how a rank that left no file ended, in words that follow its number."""
    try:
        told = json.loads(ended_path(folder, rank).read_text(encoding="utf-8"))
        return (
            f"called os._exit({told['status']}) at {told['file']}:{told['line']} after {told['steps']} iterations, "
            "before the doctor was done"
        )
    except (OSError, ValueError, KeyError):
        return "was killed or crashed before the doctor was done: it left neither a file nor a Python exit"


@dataclass(slots=True)
class RankWatch:
    """Looks from the doctor's own process which ranks are gone. In a container their numbers may mean others here."""

    folder: Path
    lost: list[int] = field(default_factory=list)
    """Ranks that were gone without a file, the first one first."""
    _ours: set[int] = field(default_factory=set)
    _since: float = 0.0

    def look(self) -> bool:
        """Whether a rank has been gone for longer than its launcher needs to end the others."""
        for rank, process in _unfinished(self.folder).items():
            if process not in self._ours and belongs_to(process, self.folder):
                self._ours.add(process)
            # Where one rank is seen, those that are not seen are gone.
            if self._ours and rank not in self.lost and gone(process) and not _left(self.folder, rank):
                self.lost.append(rank)
                self._since = self._since or time.monotonic()
        return bool(self.lost) and time.monotonic() - self._since > GRACE_S

    def end_others(self) -> None:
        """Ends the remaining ranks, as a launcher that watches its ranks would do; not every launcher does."""
        for process in self._ours:
            if not gone(process):
                os.kill(process, signal.SIGTERM)


def _unfinished(folder: Path) -> dict[int, int]:
    """Process of each rank that began and has left no file, by rank."""
    processes = {}
    for path in sorted(folder.glob("rank*.began")):
        rank = int(path.stem.removeprefix("rank"))
        if not _left(folder, rank):
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            processes[rank] = int(told["pid"])
    return processes


def _left(folder: Path, rank: int) -> bool:
    return rank_path(folder, rank).exists() or (folder / f"rank{rank}.error").exists()
