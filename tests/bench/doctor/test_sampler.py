"""A loop of known parts is sampled: by the timer's signal, and by a thread where the script has that signal."""

import signal
import threading
import time

import pytest

from dlrm_bench.bench.doctor.rank_file import Stacks
from dlrm_bench.bench.doctor.sampler import Sampler, period_s


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def loop() -> None:
    for _ in range(20):
        time.sleep(0.006)
        compute(0.003)


def sampled(monkeypatch) -> tuple[bool, Stacks]:
    monkeypatch.setattr("dlrm_bench.bench.doctor.marks._OWN", "/nowhere")
    sampler = Sampler(0.001)
    sampler.start()
    loop()
    return sampler.by_signal, sampler.stop()


def spent_ms(stacks: Stacks, innermost: str) -> tuple[float, float]:
    """(time, time that the thread ran) of the samples whose innermost function is this one."""
    own = [
        sample
        for sample in stacks["samples"]
        if stacks["frames"][stacks["stacks"][sample[1]][0]]["function"] == innermost
    ]
    return sum(sample[2] for sample in own) / 1000, sum(sample[3] for sample in own) / 1000


def assert_parts_are_told(stacks: Stacks) -> None:
    (slept, ran_asleep), (computed, ran) = spent_ms(stacks, "loop"), spent_ms(stacks, "compute")
    assert slept > 100  # of 120
    assert ran_asleep < slept / 2
    assert computed >= ran > 20  # of 60; on a busy machine it computed for longer, most of it without a core
    named = [stacks["frames"][i]["text"] for i in stacks["stacks"][stacks["samples"][3][1]]]
    assert "loop()" in named


def test_by_the_timers_signal(monkeypatch):
    by_signal, stacks = sampled(monkeypatch)
    assert by_signal
    assert_parts_are_told(stacks)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert 0 < stacks["own_us"] < 1e6


def test_a_script_that_uses_the_signal_keeps_it(monkeypatch):
    theirs: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: theirs.append(number))
    try:
        by_signal, stacks = sampled(monkeypatch)
        assert not by_signal
        assert spent_ms(stacks, "loop")[0] > 60  # a busy machine runs the sampling thread late
        signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert theirs == [signal.SIGALRM]


def test_a_loop_that_is_no_main_thread(monkeypatch):
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(sampled(monkeypatch)[0]))
    thread.start()
    thread.join()
    assert found == [False]


@pytest.mark.parametrize(("window_s", "period"), [(0.001, 0.25e-3), (1.0, 2e-3), (1000.0, 10e-3)])
def test_the_period_follows_the_window(window_s, period):
    assert period_s(window_s) == pytest.approx(period)
