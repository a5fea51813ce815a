"""Samples the training loop's Python stack over iterations that carry no other instrument.

A timer signal (SIGALRM) makes the loop's own thread record its stack: this needs no other thread and no handover of the
interpreter lock, which would be late and biased to calls that release the lock. If the loop does not run on the main
thread, or the script uses that signal or torch.compile, another thread reads `sys._current_frames()` instead. py-spy
and austin read another process's memory, which containers without CAP_SYS_PTRACE refuse, and do not know iterations.
The cost of sampling is the difference between the sampled and the plain window, which the doctor prints.
"""

import resource
import signal
import sys
import threading
import time
from types import FrameType

from .marks import SeenStacks, compiles, walk, with_text
from .rank_file import Stacks

_SWITCH_S = 50e-6
"""Longest time that the thread waits for the interpreter lock while the loop holds it."""
_SAMPLES = 500
"""Samples aimed at in a window."""
_PERIODS_S = 0.25e-3, 10e-3
"""Shortest and longest period."""


def period_s(window_s: float) -> float:
    """Seconds between samples in a window of this length."""
    return min(max(window_s / _SAMPLES, _PERIODS_S[0]), _PERIODS_S[1])


class Sampler:
    """Samples the thread that made it from start() to stop()."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._loop = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._loop)
        self._thread: threading.Thread | None = None
        self._end = self._taking = False
        self._samples: list[tuple[float, int, float, float]] = []
        self._stacks = SeenStacks()
        self._own_s = 0.0
        self._began = self._before = self._cpu_before = 0.0
        self._ticks = 0
        self._blocks = 0
        self._restore = 0.0

    @property
    def by_signal(self) -> bool:
        """Whether the loop's own thread takes the samples."""
        return self._thread is None

    def start(self) -> None:
        """Begins to sample."""
        self._began, self._cpu_before = time.perf_counter(), time.clock_gettime(self._clock)
        self._before = self._began
        unused = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0
        # Within a compiled function torch.compile would compile the handler too.
        if threading.current_thread() is threading.main_thread() and unused and not compiles():
            signal.signal(signal.SIGALRM, self._on_signal)
            signal.siginterrupt(signal.SIGALRM, False)  # calls of libraries go on where it comes
            signal.setitimer(signal.ITIMER_REAL, self._period_s, self._period_s)
            return
        self._restore = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_S, self._restore))
        self._thread = threading.Thread(target=self._sample, name="doctor-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> Stacks:
        """Returns the samples. Reads the lines of their frames, after the last sample."""
        if self._thread is None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        else:
            self._end = True
            self._thread.join()
            sys.setswitchinterval(self._restore)
        stacks = self._stacks.places
        numbers = {place: i for i, place in enumerate(dict.fromkeys(place for stack in stacks for place in stack))}
        return Stacks(
            period_us=self._period_s * 1e6,
            own_us=self._own_s * 1e6,
            frames=[with_text(place) for place in numbers],
            stacks=[[numbers[place] for place in stack] for stack in stacks],
            samples=self._samples,
        )

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        if not self._taking:  # the next signal may come before a sample is taken
            self._taking = True
            self._take(frame)
            self._taking = False

    def _sample(self) -> None:
        while not self._end:
            time.sleep(self._period_s)
            self._take(sys._current_frames().get(self._loop))

    def _take(self, frame: FrameType | None) -> None:
        now, cpu = time.perf_counter(), time.clock_gettime(self._clock)
        elapsed_s, running_s = now - self._before, cpu - self._cpu_before
        stands_for_s = elapsed_s
        if self.by_signal:
            # A C call is sampled once, when it returns, at its line, for all timer ticks during the call.
            ticks = int((now - self._began) / self._period_s)
            stands_for_s = (ticks - self._ticks) * self._period_s
            self._ticks = ticks
            blocks = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            if blocks == self._blocks:
                running_s = elapsed_s  # a thread that gives its core up to no wait could run, had the machine a core
            self._blocks = blocks
        number = self._stacks.number(list(walk(frame)))
        running = min(1.0, running_s / elapsed_s)
        self._samples.append((now * 1e6, number, stands_for_s * 1e6, running * stands_for_s * 1e6))
        self._before, self._cpu_before = now, cpu
        self._own_s += time.perf_counter() - now
