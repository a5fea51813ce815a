"""Ends a run whose ranks have stopped going on: a process that was stopped, a file system that does not answer.

The ranks of a training wait for one another, mostly in kernels or in C++, without end. A thread of each rank looks at
how far its training has come. It costs the training nothing: what it tells others, it reads from outside, and the
stage from the stack of the main thread.
"""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from dlrm_bench.bench import ROOT
from dlrm_bench.bench.instruments.abort import RESTARTS, connect_store
from dlrm_bench.dlrm.runtime.ranks import Ranks

_LOOKS = 12
"""Looks within the time that a stall may take."""
_FIRST = 10
"""The first iterations may take so many times as long: kernels are compiled, graphs captured, batches drawn."""
_STAGES = {
    "dlrm/data/metrics.py": "computes the AUC",
    "dlrm/data/": "waits for its reader",
    "dlrm/dcnv2/data/": "waits for its reader",
    "bench/checkpoints.py": "saves a checkpoint",
    "pipeline/static/evaluation.py": "evaluates",
}
"""What a rank does whose main thread is in one of these files; the innermost counts."""
_OTHERWISE = "trains"


@dataclass(frozen=True, slots=True)
class _Report:
    """What one rank says about itself."""

    looks: int
    """Grows for as long as the process runs."""
    progress: int
    iteration: int
    stage: str


class StallWatch:
    """Context manager around a training. Ends this rank where nothing has moved for `timeout_s`."""

    def __init__(
        self,
        ranks: Ranks,
        timeout_s: float | None,
        progress: Callable[[], tuple[int, int]],
        end: Callable[[str], None],
    ) -> None:
        """progress: a number that grows as the training goes on, and its iteration; any thread may ask. end: ends the
        process, and says why. None does nothing. Another rank's is made before this one's __enter__: a barrier lies
        between."""
        self._ranks, self._timeout_s, self._progress, self._end = ranks, timeout_s, progress, end
        self._over = threading.Event()
        self._looks = 0
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

    def _watch(self) -> None:
        assert self._timeout_s is not None
        period, first, _ = self._period_s, *self._progress()
        seen, since, looked = first, time.monotonic(), time.monotonic()
        while not self._over.wait(period):
            progress, now = self._progress()[0], time.monotonic()
            if progress != seen or now - looked > 3 * period:  # or this process itself was stopped
                seen, since = progress, now
            looked = now
            # What the finding takes is part of the time.
            limit = (self._timeout_s if seen != first else _FIRST * self._timeout_s) - 3 * period
            if now - since >= limit:
                reason = self._reason()
                if self._progress()[0] == seen and not self._over.is_set():
                    self._end(reason)

    def _report(self) -> None:
        """On a thread of its own: a store whose host is stopped does not answer."""
        while not self._over.wait(self._period_s):
            try:
                self._publish(self._store)
            except RuntimeError:  # the store is gone, and so is the run
                return

    def _publish(self, store: TCPStore) -> None:
        self._looks += 1
        progress, iteration = self._progress()
        store.set(_key(self._ranks.rank), f"{self._looks}|{progress}|{iteration}|{_stage()}")

    def _reason(self) -> str:
        """Says which rank the others wait for, and where it is."""
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
            rank = stopped[0]
            return f"{what}: rank {rank}'s process does not run; at last it {_said(now[rank])}"
        rank = min(range(len(now)), key=lambda rank: (now[rank].stage == _OTHERWISE, now[rank].progress))
        return f"{what}: rank {rank} {_said(now[rank])}"

    def _read_twice(self, found: list[list[_Report]]) -> None:
        store = connect_store()
        keys = [_key(rank) for rank in range(self._ranks.world_size)]
        for wait_s in (2.5 * self._period_s, 0):
            words = (value.decode().split("|", 3) for value in store.multi_get(keys))
            found.append([_Report(int(a), int(b), int(c), stage) for a, b, c, stage in words])
            time.sleep(wait_s)


def _key(rank: int) -> str:
    return f"dlrm/progress/{RESTARTS}/{rank}"


def _said(report: _Report) -> str:
    return f"{report.stage}, after iteration {report.iteration}"


def _stage() -> str:
    """What the main thread does."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(ROOT)):
            inner = Path(path).relative_to(ROOT).as_posix().removeprefix("dlrm_bench/")
            for start, stage in _STAGES.items():
                if inner.startswith(start):
                    return stage
        frame = frame.f_back
    return _OTHERWISE
