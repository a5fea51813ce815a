"""Ends a run on every rank when one of them fails or is told to stop, wherever the main thread is blocked.

A main thread that waits in a collective or for the GPU runs no Python, so neither signal handlers nor exceptions reach
it there. Two daemon threads watch: one for signals, through the wakeup file descriptor that CPython's C handler writes
to, one for the other ranks, through a key in the process group's store. Both sleep in the kernel.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from dlrm_bench.dlrm.runtime.command_line import told_to_torchrun
from dlrm_bench.dlrm.runtime.ranks import RESTARTS, Ranks

_KEY = f"dlrm/abort/{RESTARTS}"
# A thread that reads a mapped file which was cut short gets SIGBUS again and again for as long as the process lives;
# the expansion of 1-hot ids reads such a file without Python's interpreter lock, so other threads continue.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGBUS)
_FOREVER = timedelta(days=3650)
# Seconds within which an error of every rank, such as bad input, is raised on each of them: then every rank prints the
# error and ends with the right status. A rank whose collective broke waits as long for a peer's reason: a peer
# announces its reason before its end closes its connections.
_GRACE_S = 2.0
_LOST = "another rank is gone without giving a reason: it was killed, for example for its memory, or its machine failed"


class AbortWatch:
    """Context manager around everything after init_process_group.

    `on_abort` closes what must be closed (the MLPerf log); it runs once, on the watching or the failing thread.
    """

    def __init__(self, ranks: Ranks, on_abort: Callable[[], None]) -> None:
        self._ranks = ranks
        self._on_abort = on_abort
        self._ending = threading.Lock()
        self._reason = ""
        self._told, self._left = threading.Event(), threading.Event()

    def __enter__(self) -> "AbortWatch":
        if self._ranks.world_size > 1:
            # Connected at once: a rank that fails after the store's host must not wait for a connection.
            self._store = connect_store()
            threading.Thread(target=self._watch_ranks, name="abort-ranks", daemon=True).start()
        self._wakeup, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer
        self._previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        self._previous_fd = signal.set_wakeup_fd(writer.fileno())
        threading.Thread(target=self._watch_signals, name="abort-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            if self._ranks.world_size > 1 and _of_a_collective(error):
                if self._told.wait(_GRACE_S):
                    self._end(self._reason, 1, announce=False)
                if _of_a_lost_peer(error):
                    self._end(f"{_LOST} ({str(error).partition('. ')[0]})", 1, announce=True)
            self._ending.acquire()
            try:
                self._on_abort()
            finally:
                self._announce(f"{type(error).__name__}: {error}")
        self._left.set()
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            # None: a handler in C, such as PYTHONFAULTHANDLER's for SIGBUS, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._writer.close()  # ends the signal thread

    def stop(self, reason: str) -> None:
        """Ends this rank and announces the reason to the others. Any thread may call it; it does not return."""
        self._end(reason, 1, announce=True)

    def _announce(self, reason: str) -> None:
        if self._ranks.world_size > 1:
            # Without the store, the ranks that could read the reason are gone too.
            with contextlib.suppress(RuntimeError):
                self._store.set(_KEY, f"rank {self._ranks.rank} failed: {reason}")

    def _watch_signals(self) -> None:
        launcher = _launcher()
        awaited: list[socket.socket | int] = [self._wakeup] if launcher is None else [self._wakeup, launcher]
        while True:
            ready, _, _ = select.select(awaited, [], [])
            if self._wakeup not in ready:
                self._end("its torchrun was killed", 1, announce=True)
                return
            received = self._wakeup.recv(1)
            if not received:
                return
            if received[0] in _SIGNALS:  # others have handlers of their own, such as a profiler's timer
                number = signal.Signals(received[0])
                cause = f": {_unreadable_map()}" if number is signal.SIGBUS else ""
                self._end(f"stopped by {number.name}{cause}", 128 + number, announce=True)

    def _watch_ranks(self) -> None:
        try:
            store = connect_store()
            store.wait([_KEY], _FOREVER)
            self._reason = store.get(_KEY).decode()
        except RuntimeError:  # the store went away: torchrun is taking the ranks down
            return
        self._told.set()
        time.sleep(_GRACE_S)
        if self._left.is_set():  # a later run of this process has a watch of its own
            return
        self._end(self._reason, 1, announce=False)

    def _end(self, reason: str, code: int, announce: bool) -> None:
        if not self._ending.acquire(blocking=False):
            return  # this rank is ending already
        try:
            print(f"rank {self._ranks.rank}: {reason}", file=sys.stderr, flush=True)
            told_to_torchrun(f"rank {self._ranks.rank}: {reason}")
            self._on_abort()
        except Exception:  # such as a full disk: the rank ends all the same, and tells the others
            traceback.print_exc()
        finally:
            if announce:
                self._announce(reason)
            os._exit(code)


def _unreadable_map() -> str:
    """Returns a sentence on the mapped memory that may have raised SIGBUS: that of a file shorter than its map, if
    any."""
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        addresses, access, offset, _, _, *path = line.split(maxsplit=5)
        # Maps without access are never read: they are gaps between the parts of a shared library, often past its end.
        if path and access.startswith("r") and os.path.isfile(path[0]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            size, last_page = os.stat(path[0]).st_size, int(offset, 16) + end - start - os.sysconf("SC_PAGE_SIZE")
            if size <= last_page:
                return f"{path[0]} is truncated, it has {size} bytes and was longer when mapped: create it again"
    return "file-backed memory cannot be read: check the disk, and that /dev/shm is not full"


def _launcher() -> int | None:
    """Returns a file descriptor that becomes readable once the torchrun that started this process has ended; None
    without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        return os.pidfd_open(os.getppid())
    except OSError:  # a kernel or a container that does not support it
        return None


def _of_a_collective(error: BaseException) -> bool:
    """Whether a collective raised this because a peer is gone: DistError by NCCL and torch, RuntimeError by gloo."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _of_a_lost_peer(error: BaseException) -> bool:
    """Whether a collective's error says that a peer closed its connections: gloo's words, and those of NCCL."""
    words = "closed by peer", "reset by peer", "Broken pipe", "remote process exit"
    return any(word in str(error) for word in words)


def connect_store() -> TCPStore:
    """Returns another client of the process group's store: a blocked wait would block the group's own client."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, wait_for_workers=False)
