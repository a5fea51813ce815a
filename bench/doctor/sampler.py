"""Samples the training loop's Python stack over iterations that carry no other instrument.

A timer signal (SIGALRM) begins each sample, and whoever can take it first does. While the loop runs Python, its own
thread does, in the signal's handler: no handover of the interpreter lock is needed, which would be late and biased to
calls that release the lock. While the loop is in a call that has released the lock, as most of torch's operations do, a
helper thread reads `sys._current_frames()`: CPython runs no handler after an operator (`a @ b`, `x[mask]`, `if t:`)
before the next call or the end of a loop's body, at a line that is not the operator's. If the loop does not run on the
main thread, or the script uses that signal or torch.compile, a thread with a timer of its own takes all samples. py-spy
and austin read another process's memory, which containers without CAP_SYS_PTRACE refuse, and do not know iterations.
The cost of sampling is the difference between the sampled and the plain window, which the doctor prints.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

from .marks import SeenStacks, compiles, walk, with_text
from .process_state import state
from .rank_file import Stacks

_SWITCH_S = 50e-6
"""Longest time that the thread waits for the interpreter lock while the loop holds it."""
_SAMPLES = 500
"""Samples aimed at in a window."""
_PERIODS_S = 0.25e-3, 10e-3
"""Shortest and longest period."""
_WAIT_S = 1.0
"""Longest time that the loop waits for a sample that the helper has begun. It ends where the helper never will: in a
process that was forked meanwhile, or where a finalizer that the helper runs waits for a lock of the loop's."""
_END = b"\0"
"""The byte that ends the helper: no signal has the number 0."""
_BYTES = 4096
"""Most that is read at once."""


def period_s(window_s: float) -> float:
    """Seconds between samples in a window of this length."""
    return min(max(window_s / _SAMPLES, _PERIODS_S[0]), _PERIODS_S[1])


_set_handler = getattr(signal.signal, "__wrapped__", signal.signal)
"""Python's own: the hook's notes that the script has set a handler."""


class Sampler:
    """Samples the thread that made it from start() to stop()."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._loop = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._loop)
        self._waits = _WaitsForCore(threading.get_native_id())
        self._thread: threading.Thread | None = None
        self._wakes: tuple[int, int] | None = None
        """The pipe through which the signal wakes the helper; None without the signal."""
        self._end = False
        self._taking = threading.Lock()
        self._handling = False
        """Whether the loop's thread is in the signal's handler."""
        self._samples: list[tuple[float, int, float, float, float]] = []
        self._settled = 0
        """Number of samples that have their waits for a core."""
        self._stacks = SeenStacks()
        self._own_s = 0.0
        self._began = self._before = self._cpu_before = 0.0
        self._started = 0.0
        """The time at which start() ended: the first sample stands for none before it, as of a thread that starts."""
        self._ticks = 0
        self._restore = 0.0

    @property
    def by_signal(self) -> bool:
        """Whether the timer's signal begins each sample."""
        return self._wakes is not None

    def start(self) -> None:
        """Begins to sample."""
        self._began, self._cpu_before = time.perf_counter(), time.clock_gettime(self._clock)
        self._before = self._began
        free = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0
        unused = free and not state.alarmed
        main = threading.current_thread() is threading.main_thread()
        # Within a compiled function torch.compile would compile the handler too.
        if main and unused and not compiles() and self._open_pipe():
            self._thread = threading.Thread(target=self._sample_at_signals, name="doctor-sampler", daemon=True)
            self._thread.start()
            _set_handler(signal.SIGALRM, self._on_signal)
            signal.siginterrupt(signal.SIGALRM, False)  # calls of libraries go on where it comes
            signal.setitimer(signal.ITIMER_REAL, self._period_s, self._period_s)
        else:
            self._restore = sys.getswitchinterval()
            sys.setswitchinterval(min(_SWITCH_S, self._restore))
            self._thread = threading.Thread(target=self._sample, name="doctor-sampler", daemon=True)
            self._thread.start()
        self._started = time.perf_counter()

    def stop(self) -> Stacks:
        """Returns the samples. Reads the lines of their frames, after the last sample."""
        assert self._thread is not None
        if self._wakes is None:
            self._end = True
            self._thread.join()
            sys.setswitchinterval(self._restore)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _set_handler(signal.SIGALRM, signal.SIG_DFL)
            self._close_pipe(*self._wakes)
        self._waits.close()
        stacks = self._stacks.places
        numbers = {place: i for i, place in enumerate(dict.fromkeys(place for stack in stacks for place in stack))}
        return Stacks(
            period_us=self._period_s * 1e6,
            own_us=self._own_s * 1e6,
            frames=[with_text(place) for place in numbers],
            stacks=[[numbers[place] for place in stack] for stack in stacks],
            samples=self._samples,
        )

    def _open_pipe(self) -> bool:
        """Whether signals now write to a pipe; not where the script has such a pipe itself."""
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        theirs = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if theirs == -1:
            self._wakes = reads, writes
            return True
        signal.set_wakeup_fd(theirs)
        os.close(reads)
        os.close(writes)
        return False

    def _close_pipe(self, reads: int, writes: int) -> None:
        theirs = signal.set_wakeup_fd(-1)
        if theirs not in (-1, writes):
            signal.set_wakeup_fd(theirs)  # the script's, since then
        os.write(writes, _END)
        assert self._thread is not None
        self._thread.join()
        os.close(reads)
        os.close(writes)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        if self._handling:  # the next signal, before this sample is taken
            return
        self._handling = True
        # The helper may have begun this sample and have no core, or no interpreter lock: if the loop went on, all of
        # that time would go to a later line.
        if self._taking.acquire(timeout=_WAIT_S):
            self._take_tick(frame)
            self._settle()
            self._taking.release()
        self._handling = False

    def _sample_at_signals(self) -> None:
        assert self._wakes is not None
        # Python does not interrupt the loop for a signal that another thread receives: the helper would sample a later
        # line, where the loop releases the interpreter lock.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        while _END not in os.read(self._wakes[0], _BYTES):  # a forked worker's signals may come after it
            if self._taking.acquire(blocking=False):
                self._take_tick(sys._current_frames().get(self._loop))
                self._taking.release()

    def _sample(self) -> None:
        while not self._end:
            time.sleep(self._period_s)
            now = time.perf_counter()
            self._take(sys._current_frames().get(self._loop), now, now - self._before)

    def _take_tick(self, frame: FrameType | None) -> None:
        """Takes a sample for the timer's ticks since the last one; none where the other thread has taken it.

        A call that keeps the lock is sampled once, when it returns, at its line, for all ticks during the call.
        """
        now = time.perf_counter()
        ticks = int((now - self._began) / self._period_s)
        since, self._ticks = ticks - self._ticks, ticks
        if since:
            self._take(frame, now, since * self._period_s)

    def _take(self, frame: FrameType | None, now: float, stands_for_s: float) -> None:
        cpu = time.clock_gettime(self._clock)
        stands_for_s = max(0.0, min(stands_for_s, now - self._started))
        number = self._stacks.number(list(walk(frame)))
        running = min(1.0, (cpu - self._cpu_before) / (now - self._before))
        self._samples.append((now * 1e6, number, stands_for_s * 1e6, running * stands_for_s * 1e6, 0.0))
        self._before, self._cpu_before = now, cpu
        self._own_s += time.perf_counter() - now

    def _settle(self) -> None:
        """Gives the loop's waits for a core to the samples since it ran last."""
        waited_us = self._waits.since_last_us()
        for i in range(self._settled, len(self._samples)):
            at, number, us, ran_us, _ = self._samples[i]
            own_us = max(0.0, min(waited_us, us - ran_us))
            self._samples[i] = at, number, us, ran_us, own_us
            waited_us -= own_us
        self._settled = len(self._samples)


class _WaitsForCore:
    """Time that a thread could have run and got no core, by the scheduler's statistics (Linux, sched-stats.rst)."""

    def __init__(self, thread: int) -> None:
        """thread: its native id."""
        self._file: int | None = None
        with suppress(OSError):  # some kernels keep no statistics
            self._file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        self._before_us = 0.0
        self.since_last_us()

    def since_last_us(self) -> float:
        """Returns microseconds since the last call; 0 where the kernel does not say."""
        if self._file is None:
            return 0.0
        us = int(os.pread(self._file, _BYTES, 0).split()[1]) / 1e3
        since, self._before_us = us - self._before_us, us
        return since

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
