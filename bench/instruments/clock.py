"""Latency of every iteration on every rank, without making the host or the GPU wait.

clock = IterationClock(device)
with frozen_gc():
    clock.start()
    for batch in batches:
        train(batch)
        clock.lap()
    clock.pause()  # before an evaluation; start() again after it
times = clock.gather_ms()  # on every rank
"""

import contextlib
import gc
import itertools
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import numpy as np
import torch
import torch.distributed as dist

MAX_LIVE_MARKS = 4096
"""Maximum number of unread marks in a stretch. The GPU lags the host by far fewer iterations, so it has passed the
oldest mark long before that mark is read."""

_TRIES = 10
"""Number of attempts to read times while the training's thread continues."""


class _Mark(Protocol):
    """A point in time; the part of torch.cuda.Event that the clock uses."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: "_Mark") -> float: ...


class _HostMark:
    """A point in the host's time, for devices that work synchronously."""

    __slots__ = ("_ns",)

    def record(self) -> None:
        self._ns = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "_HostMark") -> float:
        return (end._ns - self._ns) / 1e6


class IterationClock:
    """Times iterations: on a CUDA device by events on the current stream, elsewhere by the host's clock.

    Iterations come in stretches: start(), lap() at the end of each iteration, pause(). The latency of an iteration is
    the time between two consecutive marks, so a stretch has no gaps. Between pauses nothing synchronises.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._iterations = self._started = 0
        self._marks: deque[_Mark] = deque()  # the open stretch, oldest first; empty between stretches
        self._spare: list[_Mark] = []
        self._ms = array("f")

    def start(self) -> None:
        """Marks the beginning of a stretch of iterations."""
        assert not self._marks, "start() within a stretch: pause() ends one"
        self._started += 1
        self._mark()

    def lap(self) -> None:
        """Marks the end of an iteration, which is also the beginning of the next one."""
        assert self._marks, "lap() outside of a stretch: start() begins one"
        self._mark()
        self._iterations += 1
        # In a long stretch each lap reads one old mark: a small constant cost. Reading thousands at once would show up
        # as one slow iteration.
        if len(self._marks) > MAX_LIVE_MARKS and self._marks[1].query():
            self._read_oldest()

    def pause(self) -> None:
        """Ends a stretch after its last lap(): waits for the device and reads all its times. A second call does
        nothing."""
        if not self._marks:
            return
        self._marks[-1].synchronize()
        while len(self._marks) > 1:
            self._read_oldest()
        self._spare.append(self._marks.pop())

    @property
    def iterations(self) -> int:
        """Number of iterations launched; for any thread."""
        return self._iterations

    @property
    def stretch(self) -> int:
        """Number of the open stretch, from 1 on; 0 between stretches. For any thread."""
        return self._started if self._marks else 0

    def local_ms(self) -> np.ndarray:
        """Returns the latencies on this rank: float32 [iterations], milliseconds."""
        assert not self._marks, "local_ms() within a stretch: pause() first"
        return np.array(self._ms, dtype=np.float32)

    def so_far_ms(self) -> np.ndarray:
        """Returns the latencies on this rank that are available without waiting for the device: float32 [iterations],
        milliseconds.

        For a thread that ends a run whose own thread may be blocked anywhere, or may continue meanwhile.
        """
        for _ in range(_TRIES):
            read = self._started, len(self._ms)  # changes before a mark is used again
            marks, iterations = list(self._marks), self._iterations  # no other thread runs during a copy
            known = array("f", self._ms)
            # A mark that is being read is in neither list or in both; the last lap may not be counted yet.
            if len(known) + max(0, len(marks) - 1) - iterations in (0, 1):
                known.extend(self._passed_ms(marks))
                if read == (self._started, len(self._ms)):
                    return np.array(known, dtype=np.float32)
            time.sleep(1e-3)
        return np.array(array("f", self._ms), dtype=np.float32)  # an array cannot grow while NumPy reads it

    @staticmethod
    def _passed_ms(marks: Sequence[_Mark]) -> Iterator[float]:
        """Yields the times between marks up to the first that the device has not passed."""
        with contextlib.suppress(RuntimeError):  # from a device in an error state
            for before, mark in itertools.pairwise(marks):
                if not mark.query():
                    return
                yield before.elapsed_time(mark)

    def gather_ms(self) -> np.ndarray:
        """Returns the latencies on all ranks: float32 [ranks, iterations], milliseconds.

        Collective: every rank calls it and gets the whole array. One row without a process group. The latency of an
        iteration is that of its slowest rank: see slowest_rank of bench/stats/series.py.
        """
        local = self.local_ms()
        if not dist.is_initialized():
            return local[None]
        rows: list[np.ndarray | None] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, local)
        times = [row for row in rows if row is not None]
        assert len({len(row) for row in times}) == 1, f"ranks timed {[len(row) for row in times]} iterations"
        return np.stack(times)

    def _mark(self) -> None:
        mark = self._spare.pop() if self._spare else self._new_mark()
        mark.record()
        self._marks.append(mark)

    def _new_mark(self) -> _Mark:
        if self._cuda:
            return cast(_Mark, torch.cuda.Event(enable_timing=True))
        return cast(_Mark, _HostMark())

    def _read_oldest(self) -> None:
        oldest = self._marks.popleft()
        self._ms.append(oldest.elapsed_time(self._marks[0]))
        self._spare.append(oldest)


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """Keeps Python's garbage collector, whose pauses would count as slow iterations, out of the timed loop."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
