"""A loop of known parts is sampled: by the timer's signal, and by a thread where the script has that signal."""

import ctypes
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType, SimpleNamespace

import pytest
import torch

from dlrm_bench.bench.doctor.rank_file import Sampled, Stacks
from dlrm_bench.bench.doctor.sampler import Sampler, period_s
from dlrm_bench.bench.doctor.samples import Samples
from tests.bench.doctor.made import rank_file


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def loop() -> None:
    for _ in range(20):
        time.sleep(0.006)
        compute(0.003)


MATRIX, ROWS = torch.ones(400, 400), torch.ones(400_000)
MASK = ROWS > 0


def multiply() -> None:
    product = MATRIX @ MATRIX
    len(product)


def gather() -> None:
    chosen = ROWS[MASK]
    len(chosen)


def count() -> int:
    n = 0
    for i in range(30_000):
        n = n + i * 3
    return n


def operators() -> None:
    for _ in range(80):
        multiply()
        gather()
        count()


def sampled(work: Callable[[], None] = loop) -> tuple[bool, Stacks]:
    sampler = Sampler(0.001)
    sampler.start()
    work()
    return sampler.by_signal, sampler.stop()


def spent_ms(stacks: Stacks, innermost: str) -> tuple[float, float, float]:
    """(time, time that the thread ran, time that it was blocked) of the samples with this innermost function."""
    own = [
        sample
        for sample in stacks["samples"]
        if stacks["frames"][stacks["stacks"][sample[1]][0]]["function"] == innermost
    ]
    took, ran, coreless = (sum(sample[i] for sample in own) / 1000 for i in (2, 3, 4))
    return took, ran, took - ran - coreless


def samples_of(stacks: Stacks, starts_us: list[float]) -> Samples:
    """The samples of iterations with these starts, and the end of the last one."""
    rank = rank_file([], [])
    rank["sampled"] = Sampled(iterations=len(starts_us) - 1, ms=rank["plain"]["ms"], starts_us=starts_us, **stacks)
    return Samples(rank)


def assert_parts_are_told(stacks: Stacks) -> None:
    slept, ran_asleep, blocked = spent_ms(stacks, "loop")
    assert slept > 100  # of 120
    assert ran_asleep < 0.5 * blocked
    computed, ran, blocked = spent_ms(stacks, "compute")
    assert computed >= ran > 20  # of 60; on a busy machine it computed for longer, most of it without a core
    named = [stacks["frames"][i]["text"] for i in stacks["stacks"][stacks["samples"][3][1]]]
    assert "work()" in named


def test_by_the_timers_signal():
    by_signal, stacks = sampled()
    assert by_signal
    assert_parts_are_told(stacks)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.set_wakeup_fd(-1) == -1
    assert 0 < stacks["own_us"] < 1e6


@pytest.mark.parametrize("by_signal", [True, False])
def test_operators_have_their_own_lines(monkeypatch, by_signal):
    """No signal handler runs after an operator before the next call, which is on another line. On a busy machine the
    sampler's thread comes late to all of a window: one of three windows tells the lines."""
    if not by_signal:
        monkeypatch.setattr("dlrm_bench.bench.doctor.sampler.compiles", lambda: True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        windows = [sampled(operators) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert all(found == by_signal for found, _ in windows)
    assert any(operators_have_their_lines(stacks) for _, stacks in windows)


def operators_have_their_lines(stacks: Stacks) -> bool:
    """Whether at least 0.7 of a function's samples are at its operator."""
    spent: Counter[str] = Counter()
    for _, stack, us, _, _ in stacks["samples"]:
        frame = stacks["frames"][stacks["stacks"][stack][0]]
        spent[f"{frame['function']}: {frame['text']}"] += int(us)
    for function, line in (("multiply", "product = MATRIX @ MATRIX"), ("gather", "chosen = ROWS[MASK]")):
        own = spent[f"{function}: {line}"]
        if own <= max(0.7 * sum(us for at, us in spent.items() if at.startswith(function)), 0.02 * spent.total()):
            return False
    counts = [us for at, us in spent.items() if at.startswith("count: ") and ("for i" in at or "n = n" in at)]
    return sum(counts) > 0.05 * spent.total()


def test_the_helper_receives_no_signal():
    """Python does not interrupt the loop for one."""
    blocked: list[bool] = []

    def read_masks() -> None:
        (helper,) = (thread for thread in threading.enumerate() if thread.name == "doctor-sampler")
        for thread in (helper, threading.main_thread()):
            lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text(encoding="utf-8").splitlines()
            (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
            blocked.append(bool(mask >> (signal.SIGALRM - 1) & 1))

    assert sampled(read_masks)[0]
    assert blocked == [True, False]


def test_a_helper_without_a_core_moves_no_time_to_the_next_line(monkeypatch):
    """Late in each sleep the helper keeps the interpreter lock for 8 ms: the loop waits for its sample. The median, as
    a busy machine may also stall in a sleep or after it."""
    keep_lock = ctypes.PyDLL(None).usleep
    began: list[float] = []
    kept: list[float] = []
    starts: list[float] = []
    slept_ms: list[float] = []

    def late() -> dict[int, FrameType]:
        if began and time.perf_counter() - began[0] > 0.023:
            kept.append(began.pop())
            keep_lock(8000)
        return sys._current_frames()

    def work() -> None:
        for _ in range(12):
            began[:] = [time.perf_counter()]
            starts.append(began[0] * 1e6)
            time.sleep(0.03)
            slept_ms.append(time.perf_counter() * 1e3 - starts[-1] / 1e3)
            began.clear()
            compute(0.012)
        starts.append(time.perf_counter() * 1e6)

    monkeypatch.setattr("dlrm_bench.bench.doctor.sampler.sys", SimpleNamespace(_current_frames=late))
    by_signal, stacks = sampled(work)
    assert by_signal
    assert len(kept) > 6
    samples = samples_of(stacks, starts)
    sampled_ms = [0.0] * len(slept_ms)
    for sample in samples.samples:
        if samples.stacks[sample.stack][0]["text"] == "time.sleep(0.03)":
            sampled_ms[sample.iteration] += sample.ms
    assert abs(median(map(operator.sub, sampled_ms, slept_ms))) < 1.5


def test_the_first_sample_stands_for_no_time_before_the_iterations(monkeypatch):
    starts: list[float] = []  # of the first iteration
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(0.05)

    def work() -> None:
        starts.append(time.perf_counter() * 1e6)
        loop()

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    by_signal, stacks = sampled(work)
    assert by_signal
    at, _, us, _, _ = next(sample for sample in stacks["samples"] if sample[0] >= starts[0])
    assert us < at - starts[0] + 10_000  # a busy machine may stall before the first iteration


def test_a_wait_for_a_core_is_no_blocking():
    """Two processes compute on one core: each waits for half of the time, and is never blocked."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        sampler = Sampler(0.002)
        sampler.start()
        compute(0.3)
        stacks = sampler.stop()
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, cores)
    took, ran, coreless = (sum(sample[i] for sample in stacks["samples"]) for i in (2, 3, 4))
    assert took > 400_000
    assert ran + coreless > 0.8 * took
    assert coreless > 0.2 * took


def test_a_pipe_of_the_scripts_for_signals_stays():
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    try:
        assert not sampled()[0]
    finally:
        assert signal.set_wakeup_fd(-1) == writes
        os.close(reads)
        os.close(writes)


def test_a_script_that_uses_the_signal_keeps_it():
    theirs: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: theirs.append(number))
    try:
        by_signal, stacks = sampled()
        assert not by_signal
        assert spent_ms(stacks, "loop")[0] > 60  # a busy machine runs the sampling thread late
        signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert theirs == [signal.SIGALRM]


def test_a_loop_that_is_no_main_thread():
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(sampled()[0]))
    thread.start()
    thread.join()
    assert found == [False]


@pytest.mark.parametrize(("window_s", "period"), [(0.001, 0.25e-3), (1.0, 2e-3), (1000.0, 10e-3)])
def test_the_period_follows_the_window(window_s, period):
    assert period_s(window_s) == pytest.approx(period)
