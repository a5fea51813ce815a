"""Ends a rank that hangs before its training: from its first line until bench/instruments/stall.py takes over.

A rank may be stopped during its imports, a file system may not answer, a torchrun may be killed. The other ranks would
wait in init_process_group, which ignores --stall-timeout, and nothing would end them. A thread checks once per second.
It needs only Python's own modules, so that it runs before the imports that take seconds.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PERIOD_S = 1.0
_DEFAULT_S = 600.0
"""Timeout in seconds before the flags are read."""
FACTOR = 10
"""A step before the training may take this many times --stall-timeout: kernels are compiled, graphs captured, batches
drawn."""
_LEAST_BYTES = 1 << 20
"""Bytes read or written between two checks that count as progress, in a step whose time depends on the size of its
files."""


def _exit(reason: str) -> None:
    print(f"rank {os.environ.get('RANK')}: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _is_init(parent: int) -> bool:
    """Whether `parent` is an init process, which adopts a process whose torchrun ended before the first line ran. A
    Python program of the same user is torchrun itself, even as a container's first process."""
    try:
        return parent == 1 and "python" not in Path("/proc/1/exe").readlink().name
    except PermissionError:  # another user's
        return True
    except OSError:
        return False


class Beginning:
    """The current step of this rank before its training, and its deadline."""

    def __init__(self) -> None:
        self._started = False
        self._over = threading.Event()
        self._doing: str | None = "imports modules"
        """None once the training has begun."""
        self._by_bytes = False
        self._since = self._begun = time.monotonic()
        self.seconds: dict[str, float] = {}
        """Seconds of each step that has ended, by what it does, before the process's latest training."""
        self._timeout_s: float | None = _DEFAULT_S / FACTOR
        self._end: Callable[[str], None] = _exit

    def watch(self) -> None:
        """Starts the watch on a rank that a launcher has started; does nothing elsewhere."""
        if "RANK" in os.environ and not self._started:
            self._started, self._since = True, time.monotonic()
            self._begun = self._since
            parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
            threading.Thread(target=self._watch, args=(parent,), name="beginning-watch", daemon=True).start()

    def allow(self, stall_timeout_s: float | None) -> None:
        """Sets the timeout of --stall-timeout; None lets a step take any time."""
        self._timeout_s = stall_timeout_s

    def now(self, doing: str, by_bytes: bool = False) -> None:
        """Begins the next step; `doing` completes 'rank 0 ...'. by_bytes: reading or writing files counts as
        progress."""
        if self._doing is None:
            self.seconds = {}
        self._end_step(doing)
        self._by_bytes, self._since = by_bytes, self._begun

    def ends_by(self, end: Callable[[str], None]) -> None:
        """Makes `end`, which takes the reason, end the process, instead of an immediate exit."""
        self._end = end

    @property
    def is_over(self) -> bool:
        """Whether the training has begun."""
        return self._doing is None

    def over(self) -> None:
        """Ends the last step, and the watch."""
        self._end_step(None)
        self._over.set()

    def _end_step(self, next_one: str | None) -> None:
        ended = time.monotonic()
        if self._doing is not None:
            self.seconds[self._doing] = round(ended - self._begun, 3)
        self._doing, self._begun = next_one, ended

    def _watch(self, parent: int | None) -> None:
        looked, moved = time.monotonic(), _bytes_moved()
        if parent is not None and _is_init(parent):
            self._end("its torchrun was killed")
        while not self._over.wait(_PERIOD_S):
            now, bytes_now = time.monotonic(), _bytes_moved()
            if parent is not None and os.getppid() != parent:
                self._end("its torchrun was killed")
            # This process was stopped, or an import held the interpreter's lock; or a file is still being read.
            if now - looked > 3 * _PERIOD_S or (self._by_bytes and bytes_now - moved >= _LEAST_BYTES):
                self._since = now
            looked, moved = now, bytes_now
            timeout_s = self._timeout_s
            if timeout_s is not None and now - self._since >= FACTOR * timeout_s and not self._over.is_set():
                self._end(
                    f"the beginning has stalled for {FACTOR * timeout_s:g} s ({FACTOR} times --stall-timeout): this "
                    f"rank {self._doing}{_stopped()}"
                )


BEGINNING = Beginning()
"""The watch of this process."""


def _stopped() -> str:
    """Returns a sentence that names the stopped ranks of the same launcher on this node."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # State and parent: proc_pid_stat(5).
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getppid() and state in "Tt":
                variables = (folder / "environ").read_bytes().split(b"\0")
                rank = next((each[5:].decode() for each in variables if each.startswith(b"RANK=")), None)
                found += [f"rank {rank}'s process {folder.name} is stopped"] if rank is not None else []
        except (OSError, ValueError):  # it has ended
            continue
    return "".join(f", {text}" for text in sorted(found))


def _bytes_moved() -> int:
    """Returns the number of bytes that this process has read and written."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # a container may not show it
        return 0
    return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar", "read_bytes")))
