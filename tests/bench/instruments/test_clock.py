"""The iteration clock: its latencies, the absence of waits, and gathering over ranks."""

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_bench.bench.instruments import clock as clock_module
from dlrm_bench.bench.instruments.clock import IterationClock, frozen_gc
from dlrm_bench.dlrm.runtime.ranks import Ranks

CPU = torch.device("cpu")


class FakeMark:
    """A GPU event whose time is the order in which it was recorded; `reached` says how far the GPU has come."""

    recorded = 0
    reached = 0
    created = 0
    waited = 0

    def __init__(self) -> None:
        FakeMark.created += 1

    def record(self) -> None:
        FakeMark.recorded += 1
        self.at = FakeMark.recorded

    def query(self) -> bool:
        return self.at <= FakeMark.reached

    def synchronize(self) -> None:
        FakeMark.waited += 1
        FakeMark.reached = max(FakeMark.reached, self.at)

    def elapsed_time(self, end: "FakeMark") -> float:
        assert self.query()
        assert end.query()
        return float(end.at * end.at - self.at * self.at)  # tells pairs apart


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> type[FakeMark]:
    for counter in ("recorded", "reached", "created", "waited"):
        setattr(FakeMark, counter, 0)
    monkeypatch.setattr(clock_module, "_HostMark", FakeMark)
    monkeypatch.setattr(clock_module, "MAX_LIVE_MARKS", 8)
    return FakeMark


def run_stretches(clock: IterationClock, *stretches: int) -> None:
    for laps in stretches:
        clock.start()
        for _ in range(laps):
            clock.lap()
        clock.pause()


class FakeTime:
    """The host's clock, in the place of the module `time`."""

    def __init__(self) -> None:
        self._ns = time.perf_counter_ns()

    def perf_counter_ns(self) -> int:
        return self._ns

    def pass_ms(self, ms: int) -> None:
        self._ns += ms * 1_000_000


def test_cpu_latencies_are_those_of_the_iterations_and_leave_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime()
    monkeypatch.setattr(clock_module, "time", fake)
    clock = IterationClock(CPU)
    clock.start()
    for ms in (20, 60):
        fake.pass_ms(ms)
        clock.lap()
    clock.pause()
    fake.pass_ms(200)
    clock.start()
    fake.pass_ms(30)
    clock.lap()
    clock.pause()
    times = clock.local_ms()
    assert times.dtype == np.float32
    assert times.tolist() == [20, 60, 30]
    assert clock.iterations == 3


def test_nothing_waits_for_the_gpu_between_pauses(fake_gpu: type[FakeMark]) -> None:
    clock = IterationClock(CPU)
    clock.start()
    for _ in range(100):  # the GPU reaches nothing: the clock keeps all marks rather than wait
        clock.lap()
    assert fake_gpu.waited == 0
    clock.pause()
    assert fake_gpu.waited == 1
    assert clock.local_ms().tolist() == [2 * lap + 1 for lap in range(1, 101)]


def test_events_of_a_long_stretch_are_read_on_the_way_and_reused(fake_gpu: type[FakeMark]) -> None:
    clock = IterationClock(CPU)
    clock.start()
    for _ in range(1000):
        fake_gpu.reached = fake_gpu.recorded - 3  # the host runs three iterations ahead
        clock.lap()
    assert fake_gpu.created <= 10
    assert fake_gpu.waited == 0
    clock.pause()
    assert clock.local_ms().tolist() == [2 * lap + 1 for lap in range(1, 1001)]


def test_stretches_share_events(fake_gpu: type[FakeMark]) -> None:
    clock = IterationClock(CPU)
    run_stretches(clock, *[5] * 20)
    assert clock.local_ms().shape == (100,)
    assert fake_gpu.created == 6


def test_an_empty_stretch_and_a_second_pause_do_no_harm() -> None:
    clock = IterationClock(CPU)
    clock.pause()
    run_stretches(clock, 2, 0)
    clock.pause()
    assert clock.gather_ms().shape == (1, 2)


def test_misuse_is_caught() -> None:
    clock = IterationClock(CPU)
    with pytest.raises(AssertionError, match="start"):
        clock.lap()
    clock.start()
    with pytest.raises(AssertionError, match="pause"):
        clock.start()
    with pytest.raises(AssertionError, match="pause"):
        clock.local_ms()


def gather_on_rank(ranks: Ranks) -> tuple[np.ndarray, np.ndarray]:
    fake = FakeTime()
    clock_module.time = fake  # type: ignore[assignment]  # of this rank's process
    clock = IterationClock(CPU)
    clock.start()
    for lap in range(3):
        fake.pass_ms(10 + 30 * ranks.rank + lap)
        clock.lap()
    clock.pause()
    return clock.local_ms(), clock.gather_ms()


def test_gather_gives_every_rank_all_rows(run_ranks: Callable[..., list[Any]]) -> None:
    expected = [[10, 11, 12], [40, 41, 42]]
    for rank, (local, gathered) in enumerate(run_ranks(2, gather_on_rank)):
        assert gathered.dtype == np.float32
        assert local.tolist() == expected[rank]
        assert gathered.tolist() == expected


def test_what_another_thread_can_have_without_waiting(fake_gpu: type[FakeMark]) -> None:
    clock = IterationClock(CPU)
    assert clock.so_far_ms().tolist() == []
    clock.start()  # mark 1
    for _ in range(5):
        clock.lap()  # marks 2 to 6
    fake_gpu.reached = 4
    assert clock.so_far_ms().tolist() == [3, 5, 7]
    fake_gpu.reached = 6
    assert clock.so_far_ms().tolist() == [3, 5, 7, 9, 11]
    assert fake_gpu.waited == 0
    clock.pause()
    assert clock.so_far_ms().tolist() == clock.local_ms().tolist() == [3, 5, 7, 9, 11]
    for _ in range(3):  # some are read in laps, others are marks
        run_stretches(clock, 20)
    clock.start()
    fake_gpu.reached = 10**6
    for _ in range(12):
        clock.lap()
    assert len(clock.so_far_ms()) == clock.iterations == 77
    known = clock.so_far_ms()
    clock.pause()
    assert known.tolist() == clock.local_ms().tolist()


def test_another_thread_reads_beside_one_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a time that is none, nor one more or less than a mark that is being read."""
    monkeypatch.setattr(clock_module, "MAX_LIVE_MARKS", 8)
    clock = IterationClock(CPU)
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            run_stretches(clock, 50)
            time.sleep(1e-5)

    thread = threading.Thread(target=train)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        seen = []
        for _ in range(200):
            before = clock.iterations
            seen.append((before, clock.so_far_ms()))
        over.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    times = clock.local_ms()
    for before, known in seen:
        assert len(known) >= before - 8  # all but the marks, where the other thread went on in each try
        assert np.array_equal(known, times[: len(known)])


def test_reading_does_not_keep_the_clock_from_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all tries are used up: NumPy lets other threads run while it copies, and laps go on."""
    clock = IterationClock(CPU)
    clock._ms.extend([1.0] * 1_000_000)
    monkeypatch.setattr(clock_module, "_TRIES", 0)
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            clock.so_far_ms()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(100_000):
            clock._ms.append(2.0)
    finally:
        over.set()
        reader.join()


def test_frozen_gc_restores_the_collector() -> None:
    assert gc.isenabled()
    with contextlib.suppress(KeyError), frozen_gc():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.disable()
    try:
        with frozen_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_latency_is_the_gpus_not_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "MAX_LIVE_MARKS", 16)
    clock = IterationClock(torch.device("cuda"))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    clock.start()
    for _ in range(40):
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
        clock.lap()
    launched_ms = (time.perf_counter() - begin) * 1000
    clock.pause()
    finished_ms = (time.perf_counter() - begin) * 1000
    times = clock.local_ms()
    assert times.shape == (40,)
    assert (times > 5).all()
    assert times.sum() == pytest.approx(finished_ms, rel=0.1)
    assert launched_ms < 0.5 * finished_ms
