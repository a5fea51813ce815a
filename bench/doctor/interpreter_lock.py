"""Time of the training loop in waits for Python's interpreter lock (GIL), seen from another process.

A thread that waits for the lock sleeps in the kernel's futex call, at an address within CPython's state of the process,
_PyRuntime, which contains the lock. /proc/PID/task/TID/syscall names the call in which a thread sleeps, without
stopping a running one. A sampler within the rank would itself need the lock.
"""

import ctypes
import json
import platform
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .site_folder import belongs_to

_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
"""Number of the system call (Linux, asm/unistd.h)."""
_RUNTIME_BYTES = 1 << 20
"""An upper bound of _PyRuntime in any CPython to 3.14; nothing else that threads wait for comes right after it."""
_AUTOGRAD = "pt_autograd"
"""Name of the threads of autograd's engine, for which the loop's thread waits in backward()."""
_INTERVAL_S = 0.0005
_FEWEST = 20
"""Smallest number of samples for a result."""


def loop_path(folder: Path, rank: int) -> Path:
    """Returns the file in which a rank names the thread to watch, for as long as it is to be watched."""
    return folder / f"rank{rank}.loop"


def runtime_address() -> int | None:
    """Returns the address of _PyRuntime in this process; None in a Python that is not CPython."""
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    except (AttributeError, ValueError):
        return None


@dataclass(slots=True)
class Samples:
    """Number of looks at one rank's loop, and number of those that found it waiting for the lock."""

    taken: int = 0
    waiting: int = 0

    @property
    def share(self) -> float | None:
        """Share of time that the loop waited; None for too few samples."""
        return self.waiting / self.taken if self.taken >= _FEWEST else None


class LockWatch:
    """Context manager that watches the ranks of this node while they say so in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lock-watch", daemon=True)
        self.samples: dict[str, Samples] = {}
        """Waits by name of the rank's file without its ending: rank0."""

    def __enter__(self) -> "LockWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        loops: dict[str, _Loop | None] = {}
        looks = 0
        while not self._end.wait(_INTERVAL_S if loops else 40 * _INTERVAL_S):
            if looks % 20 == 0 or not loops:
                paths = {path.stem: path for path in self._folder.glob("rank*.loop")}
                loops = {name: loops.get(name) or _loop(path, self._folder) for name, path in paths.items()}
            looks += 1
            for name, loop in loops.items():
                waits = None if loop is None else loop.waits()
                if waits is not None:
                    samples = self.samples.setdefault(name, Samples())
                    samples.taken += 1
                    samples.waiting += waits


@dataclass(frozen=True, slots=True)
class _Loop:
    """The loop's thread of one rank, and those of autograd."""

    calls: tuple[Path, ...]
    runtime: int

    def waits(self) -> bool | None:
        """Whether one of them waits for the lock right now; None where that cannot be read."""
        waiting = False
        for path in self.calls:
            try:
                words = path.read_text().split()
            except OSError:
                return None
            if len(words) > 1 and words[0] == _FUTEX:
                waiting = waiting or 0 <= int(words[1], 16) - self.runtime < _RUNTIME_BYTES
        return waiting


def _loop(path: Path, folder: Path) -> _Loop | None:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["runtime"] is None or not belongs_to(told["pid"], folder):
            return None
        tasks = [task for task in Path("/proc", str(told["pid"]), "task").iterdir() if _belongs(task, told["thread"])]
    except (OSError, ValueError, KeyError):
        return None
    return _Loop(tuple(task / "syscall" for task in tasks), told["runtime"])


def _belongs(task: Path, loop: int) -> bool:
    try:
        return task.name == str(loop) or (task / "comm").read_text().startswith(_AUTOGRAD)
    except OSError:  # the thread has just ended
        return False
