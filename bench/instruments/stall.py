"""Ends a run whose ranks make no progress: a process that was stopped, a file system that does not answer.

The ranks of a training wait for one another without limit, mostly in kernels or in C++. A thread of each rank watches
the training's progress, at no cost to the training: it reads everything from outside, and the stage from the stack of
the main thread.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.instruments.abort import connect_store
from dlrm_bench.dlrm.runtime.ranks import RESTARTS, Ranks

_LOOKS = 12
"""Number of checks within the timeout."""
_FIRST = 10
"""The first iterations may take this many times the timeout: kernels are compiled, graphs captured, batches drawn."""
_SAVES = "saves a checkpoint"
_WAITS = "waits for other ranks to save a checkpoint"
_COMPUTES_AUC = "computes the AUC"
_STAGES = {
    "dlrm/data/metrics.py": _COMPUTES_AUC,
    "dlrm/data/": "waits for its reader",
    "bench/checkpoints/": _SAVES,
    "pipeline/static/evaluation.py": "evaluates",
}
"""Activity of a rank, by the beginning of the path of the file that its main thread is in: the innermost file counts,
and the first beginning that fits."""
_OTHERWISE = "trains"
SAVER = "checkpoint"
"""Name of the thread that saves checkpoints."""
_OF_OTHERS = (_OTHERWISE, _WAITS, _COMPUTES_AUC)
"""Activities of ranks that wait for another one."""


@dataclass(frozen=True, slots=True)
class _Report:
    """A rank's report about itself."""

    looks: int
    """A number that grows for as long as the process runs."""
    progress: int
    iteration: int
    stage: str


class StallWatch:
    """Context manager around a training. Ends this rank if no rank has progressed for `timeout_s`; None does nothing.

    A rank may wait as long as another one progresses, for example with its part of a checkpoint.
    """

    def __init__(
        self,
        ranks: Ranks,
        timeout_s: float | None,
        progress: Callable[[], tuple[int, int]],
        end: Callable[[str], None],
    ) -> None:
        """progress: returns a number that grows as the training progresses, and its iteration; for any thread. end:
        ends the process with a reason. All ranks construct their watch before any rank enters it: a barrier lies
        between."""
        self._ranks, self._timeout_s, self._progress, self._end = ranks, timeout_s, progress, end
        self._over = threading.Event()
        self._looks, self._of_all = 0, 0
        if timeout_s is not None and ranks.world_size > 1:
            self._store = connect_store()
            self._publish(self._store)

    def __enter__(self) -> "StallWatch":
        if self._timeout_s is not None:
            for work in (self._watch, *((self._report,) if self._ranks.world_size > 1 else ())):
                threading.Thread(target=work, name="stall-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    @property
    def _period_s(self) -> float:
        assert self._timeout_s is not None
        return self._timeout_s / _LOOKS

    @property
    def _moved(self) -> tuple[int, int]:
        """Returns a pair that changes when this rank, or another one, progresses."""
        return self._progress()[0], self._of_all

    def _watch(self) -> None:
        assert self._timeout_s is not None
        period, first = self._period_s, self._progress()[0]
        seen, since, looked = self._moved, time.monotonic(), time.monotonic()
        while not self._over.wait(period):
            progress, now = self._moved, time.monotonic()
            if progress != seen or now - looked > 3 * period:  # or this process itself was stopped
                seen, since = progress, now
            looked = now
            # The time of the report is part of the interval.
            limit = (self._timeout_s if seen[0] != first else _FIRST * self._timeout_s) - 3 * period
            if now - since >= limit:
                reason = self._reason()
                if self._moved == seen and not self._over.is_set():
                    self._end(reason)

    def _report(self) -> None:
        """Reports on its own thread: a store whose host is stopped does not answer."""
        while not self._over.wait(self._period_s):
            try:
                self._publish(self._store)
                self._of_all = sum(report.progress for report in self._reports(self._store))
            except RuntimeError:  # the store is gone, and so is the run
                return

    def _publish(self, store: TCPStore) -> None:
        self._looks += 1
        progress, iteration = self._progress()
        store.set(_key(self._ranks.rank), f"{self._looks}|{progress}|{iteration}|{_stage()}")

    def _reports(self, store: TCPStore) -> list[_Report]:
        words = (
            value.decode().split("|", 3) for value in store.multi_get(list(map(_key, range(self._ranks.world_size))))
        )
        return [_Report(int(a), int(b), int(c), stage) for a, b, c, stage in words]

    def _reason(self) -> str:
        """Returns a sentence that names the rank that the others wait for, and its activity."""
        what = f"the training has stalled for {self._timeout_s:g} s (--stall-timeout)"
        if self._ranks.world_size == 1:
            return f"{what}: rank 0 {_stage()}, after iteration {self._progress()[1]}"
        found: list[list[_Report]] = []
        reader = threading.Thread(target=self._read_twice, args=(found,), daemon=True)
        reader.start()
        reader.join(4 * self._period_s)
        if len(found) < 2:
            return f"{what}: the store of the ranks, which rank 0 or torchrun has, does not answer"
        before, now = found
        stopped = [rank for rank, report in enumerate(now) if report.looks == before[rank].looks]
        if stopped:
            rank, furthest = stopped[0], max(report.iteration for report in now)  # it may have come as far since
            return (
                f"{what}: rank {rank}'s process does not run; at last it {now[rank].stage}, after iteration {furthest}"
            )
        rank = min(range(len(now)), key=lambda rank: (now[rank].stage in _OF_OTHERS, now[rank].progress))
        return f"{what}: rank {rank} {now[rank].stage}, after iteration {now[rank].iteration}"

    def _read_twice(self, found: list[list[_Report]]) -> None:
        store = connect_store()
        for wait_s in (2.5 * self._period_s, 0):
            found.append(self._reports(store))
            time.sleep(wait_s)


def _key(rank: int) -> str:
    return f"dlrm/progress/{RESTARTS}/{rank}"


def _stage() -> str:
    """Returns the activity of the main thread or, while that waits for its saving thread, of the saving thread."""
    frames = sys._current_frames()
    # This thread's frame and its local are a cycle, which would keep the stacks of all threads, with their tensors, as
    # Python collects no cycles while a run trains.
    frames.pop(threading.get_ident(), None)
    files = list(_files(frames.get(threading.main_thread().ident or 0)))
    for file in files:
        inner = file.removeprefix(f"{ROOT}/").removeprefix("dlrm_bench/")
        stage = next((stage for start, stage in _STAGES.items() if inner.startswith(start)), None)
        if stage == _SAVES:
            return _WAITS if _in_a_collective(files) or any(map(_in_a_collective, _savers(frames))) else _SAVES
        if stage is not None:
            return stage
    return _OTHERWISE


def _savers(frames: Mapping[int, FrameType]) -> Iterator[list[str]]:
    threads = (thread for thread in threading.enumerate() if thread.name.startswith(SAVER))
    return (list(_files(frames.get(thread.ident or 0))) for thread in threads)


def _in_a_collective(files: Iterable[str]) -> bool:
    return any("/torch/distributed/" in file for file in files)


def _files(frame: FrameType | None) -> Iterator[str]:
    """Yields the files of a thread's stack, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back
