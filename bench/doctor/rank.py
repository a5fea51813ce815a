"""The examination of one rank, from inside: the iterations of each kind of measurement, and the kept data.

After the warm-up come iterations without instruments, which give the time; iterations in which the loop's stack is
sampled; iterations under torch.profiler alone, which give the costs of CUDA calls; and iterations whose calls are
marked by line, which run slower and give the lines. All ranks count the same iterations, so that instruments slow them
down together.
"""

import atexit
import json
import multiprocessing
import os
import site
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from . import leaving
from .capture import of_pipeline
from .interpreter_lock import loop_path, runtime_address
from .marks import Marks, walk
from .process_state import MARK, OPTIMIZER, PROGRESS, state
from .rank_file import (
    MARKED,
    MARKED_ITERATION,
    SCHEMA,
    SETTLING,
    TRACED,
    Frame,
    Marked,
    Plain,
    RankFile,
    Sampled,
    Window,
    rank_path,
    trace_path,
)
from .sampler import Sampler, period_s
from .site_folder import Settings
from .thread_times import spent_ms, thread_times_ms

ITERATION = "iteration"
"""The range around a traced iteration, for trace.py."""
_PATIENCE_S = 60
"""Seconds that a finished rank waits for the others of its node, which may still be in a collective with it."""
_RELIABILITY = (OPTIMIZER, PROGRESS, MARK)


class Examination:
    """Counts the iterations of this process and measures them as their turn comes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._thread = threading.get_ident()
        self._found_by = OPTIMIZER
        self._steps = -1
        self._over = False
        self._file: dict[str, Any] = {}
        self._starts: list[float] = []
        self._hook_s = 0.0
        self._loop: list[Frame] = []
        self._sampler: Sampler | None = None
        self._marks: Marks | None = None
        self._profile: profile | None = None
        self._range: record_function | None = None
        self._opened = 0.0
        self._turns = self._schedule()
        self._exit = leaving.begin(self._folder, _rank(), lambda: None if self._over else max(self._steps, 0))
        atexit.register(self._leave_what_there_is)

    def boundary(self, found_by: str) -> None:
        """Begins an iteration, and ends the previous one."""
        if self._over or threading.get_ident() != self._thread or not self._counts(found_by):
            return
        begin = time.perf_counter()
        self._steps += 1
        try:
            self._take_turn()
        except Exception:
            # Any error here is the doctor's, not the script's: it is written to a file, which the command reports.
            self._over = True
            error = self._folder / f"rank{_rank()}.error"
            error.write_text(traceback.format_exc(), encoding="utf-8")
            if not self._settings.keep_running:
                self._end_process(1)  # other ranks end after their examination: this one would wait for them
        if self._steps != self._settings.warmup:  # whose turn belongs to no iteration that is timed
            self._hook_s += time.perf_counter() - begin

    def _counts(self, found_by: str) -> bool:
        """Whether this is the most reliable sign of an iteration so far; a better sign restarts the warm-up."""
        if found_by == self._found_by:
            return True
        better = _RELIABILITY.index(found_by) > _RELIABILITY.index(self._found_by)
        if better and self._steps <= self._settings.warmup:
            self._found_by, self._steps = found_by, -1
            self._starts.clear()
            return True
        return False

    def _schedule(self) -> dict[int, Any]:
        plain = self._settings.warmup
        sampled = plain + self._settings.iterations + SETTLING
        traced = sampled + self._settings.iterations
        marked = traced + SETTLING + TRACED
        return {
            plain: self._begin_plain,
            plain + self._settings.iterations: self._end_plain,
            sampled: self._begin_sampled,
            traced: self._end_sampled,
            traced + SETTLING: self._open,
            marked: self._begin_marked,
            marked + SETTLING: self._open,
            marked + SETTLING + MARKED: self._end_marked,
        }

    def _take_turn(self) -> None:
        turn = self._turns.get(self._steps)
        if self._marks is not None and self._marks.iteration >= 0:
            self._starts.append(time.perf_counter() * 1e6)
            self._marks.iteration += 1
        elif self._opened:
            self._starts.append(time.perf_counter() * 1e6)
        if self._range is not None:
            self._next_range(last=turn is not None)
        if turn is not None:
            turn()

    # Iterations without instruments

    def _begin_plain(self) -> None:
        self._tell_watch()
        _synchronize()
        self._starts.clear()
        self._hook_s = 0.0
        self._threads = thread_times_ms()
        self._cpu, self._thread_s = time.process_time(), time.thread_time()
        self._opened = time.perf_counter()
        self._starts.append(self._opened * 1e6)

    def _tell_watch(self) -> None:
        """Names this thread to the doctor's process, which watches it as long as the file is there."""
        path = loop_path(self._folder, _rank())
        unfinished = path.with_suffix(".unfinished")
        told = {"pid": os.getpid(), "thread": threading.get_native_id(), "runtime": runtime_address()}
        unfinished.write_text(json.dumps(told), encoding="utf-8")
        unfinished.rename(path)

    def _end_plain(self) -> None:
        n = self._settings.iterations
        cpu, thread_s = time.process_time() - self._cpu, time.thread_time() - self._thread_s
        threads = spent_ms(self._threads, thread_times_ms())
        hook_s = self._hook_s
        _synchronize()
        elapsed_s = time.perf_counter() - self._opened
        loop_path(self._folder, _rank()).unlink()
        self._file["plain"] = Plain(
            iterations=n,
            ms=elapsed_s / n * 1e3,
            times_ms=[(b - a) / 1e3 for a, b in pairwise(self._starts)],
            cpu_ms=cpu / n * 1e3,
            thread_ms=thread_s / n * 1e3,
            threads_ms={name: ms / n for name, ms in threads.items()},
            hook_us=hook_s / n * 1e6,
        )
        self._opened = 0.0

    # Iterations with instruments

    def _begin_sampled(self) -> None:
        self._loop = [
            Frame(file=f.f_code.co_filename, line=f.f_lineno or 0, function=f.f_code.co_qualname, text="")
            for f in walk(sys._getframe(1))
        ]
        plain = self._file["plain"]
        self._sampler = Sampler(period_s(plain["ms"] * plain["iterations"] / 1e3))
        _synchronize()
        self._starts.clear()
        self._sampler.start()
        self._opened = time.perf_counter()
        self._starts.append(self._opened * 1e6)

    def _end_sampled(self) -> None:
        assert self._sampler is not None
        window = self._window(self._settings.iterations)
        stacks, self._sampler = self._sampler.stop(), None
        self._file["sampled"] = Sampled(**window, **stacks, starts_us=list(self._starts))
        self._start_profile()

    def _start_profile(self) -> None:
        """Starts one profile for both kinds: a range that is open when a profile ends must not end in another one."""
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if _cuda() else [])],
            # Threads that began before the profiler would have no ranges.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.start()

    def _open(self) -> None:
        _synchronize()
        self._starts.clear()
        if self._marks is not None:
            self._marks.iteration = 0
            self._starts.append(time.perf_counter() * 1e6)
        self._opened = time.perf_counter()
        self._open_range()

    def _open_range(self) -> None:
        self._range = record_function(ITERATION if self._marks is None else MARKED_ITERATION)
        self._range.__enter__()

    def _next_range(self, last: bool) -> None:
        assert self._range is not None
        self._range.__exit__(None, None, None)
        self._range = None
        if not last:
            self._open_range()

    def _window(self, iterations: int) -> Window:
        _synchronize()
        begin, self._opened = self._opened, 0.0
        return Window(iterations=iterations, ms=(time.perf_counter() - begin) / iterations * 1e3)

    def _begin_marked(self) -> None:
        self._file["traced"] = self._window(TRACED)
        self._marks = Marks()
        self._marks.switch_on()

    def _end_marked(self) -> None:
        assert self._profile is not None
        assert self._marks is not None
        self._marks.switch_off()
        self._over = True
        own_ms = self._marks.own_us / 1e3 / MARKED
        self._file["marked"] = Marked(**self._window(MARKED), marks_ms=own_ms, starts_us=self._starts)
        self._profile.stop()
        self._profile.export_chrome_trace(str(trace_path(self._folder, _rank())))
        self._write(complete=True)
        if not self._settings.keep_running:
            self._leave()

    # The end

    def _leave_what_there_is(self) -> None:
        """The script ended before its examination did."""
        if not self._over and os.getpid() == _PID:
            self._over = True
            if self._sampler is not None:
                self._sampler.stop()
            if self._marks is not None:
                self._marks.switch_off()
            if self._range is not None:
                self._next_range(last=True)
            if self._profile is not None:
                self._profile.stop()  # one that is still on when the process ends crashes it
            self._write(complete=False)

    def _write(self, complete: bool) -> None:
        cuda = _cuda()
        content = RankFile(
            schema=SCHEMA,
            rank=_rank(),
            local_world_size=self._local_world_size(),
            world_size=_world_size(),
            device="cuda" if cuda else "cpu",
            gpu=torch.cuda.get_device_name() if cuda else None,
            versions=_versions(),
            found_by=self._found_by,
            steps=max(self._steps, 0),
            complete=complete,
            reduced=self._marks is not None and self._marks.reduced,
            libraries=_libraries(),
            loop=self._loop,
            stacks=[] if self._marks is None else self._marks.stacks,
            operators=[] if self._marks is None else self._marks.operators,
            calls=[] if self._marks is None else self._marks.calls,
            keeps_out=_keeps_out(),
            **self._file,  # type: ignore[typeddict-item]
        )
        path = rank_path(self._folder, _rank())
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content), encoding="utf-8")
        unfinished.rename(path)

    def _leave(self) -> None:
        """Ends this process: the examination is complete, and the script might train for days."""
        deadline = time.monotonic() + _PATIENCE_S
        while len(list(self._folder.glob("rank*.json"))) < self._local_world_size() and time.monotonic() < deadline:
            if any(self._folder.glob("rank*.error")) or leaving.dead_ranks(self._folder):
                break
            time.sleep(0.05)
        sys.stdout.flush()
        sys.stderr.flush()
        self._end_process(0)

    def _local_world_size(self) -> int:
        """Returns the launcher's number of ranks on this node; where it gives none (mp.spawn), of those that began."""
        return max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), len(list(self._folder.glob("rank*.began"))))

    def _end_process(self, status: int) -> NoReturn:
        """Ends this process at once, and its loaders' workers: workers of a fork server would wait for it forever."""
        for worker in multiprocessing.active_children():
            worker.terminate()
        self._exit(status)


_PID = os.getpid()


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _distributed() else int(os.environ.get("RANK", 0))


def _world_size() -> int:
    return torch.distributed.get_world_size() if _distributed() else int(os.environ.get("WORLD_SIZE", 1))


def _cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _synchronize() -> None:
    if _cuda():
        torch.cuda.synchronize()


def _keeps_out() -> list[str]:
    """Returns nothing where a pipeline is another than those whose names are known."""
    pipeline = None if state.pipeline is None else state.pipeline()
    with suppress(Exception):
        return of_pipeline(pipeline)
    return []


def _versions() -> dict[str, str]:
    """Versions of Python, and of the libraries that the script has imported."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "torchrec", "fbgemm_gpu"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            versions[name] = str(version)
    return versions


def _libraries() -> list[str]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    # Wherever else pip has installed packages (--target, and PYTHONPATH): their dist-info lies beside them.
    installed = [path for path in sys.path if path and any(Path(path).glob("*.dist-info"))]
    own = str(Path(torch.__file__).parents[1])
    every = [*paths, *installed, *site.getsitepackages(), site.getusersitepackages(), own]
    return sorted({os.path.realpath(path) for path in every})
