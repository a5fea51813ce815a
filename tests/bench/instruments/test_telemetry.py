"""Telemetry of a run: NVML's answers summed up, and garbage collections seen."""

import gc
import threading
import time

import pytest
import torch

from dlrm_bench.bench.instruments import telemetry as monitor
from dlrm_bench.bench.instruments.clock import IterationClock, frozen_gc
from dlrm_bench.bench.instruments.telemetry import KEPT, KEPT_OF_WARMUP, RunMonitor, Samples, summarize
from dlrm_bench.bench.machine.description import GpuState

CPU = torch.device("cpu")


def states(*reasons: int | None) -> Samples:
    """One sample every ten iterations."""
    found = [(10 * i, GpuState(1980.0 - i, 50.0 + i, None, bits)) for i, bits in enumerate(reasons, 1)]
    return Samples(found, seconds=[float(i) for i, _ in found], period_s=1.0)


def counted(*energies: tuple[int, float], gpu: str | None = None) -> Samples:
    """Samples of (iterations, joules), with an iteration each second."""
    found = [(i, GpuState(1980.0, 50.0, 700.0, 0, joules)) for i, joules in energies]
    return Samples(found, seconds=[float(i) for i, _ in energies], period_s=1.0, gpu=gpu)


def test_throttling_is_told_in_spans_by_rank_and_reason() -> None:
    conditions = summarize([states(0, 0x4, 0x4 | 0x20, 0x1, 0), states(0, 0, 0, 0, 0x8)], 0.5)
    assert conditions["throttled"] is True
    assert conditions["throttling"] == [
        {"rank": 0, "reason": "power cap", "first_iteration": 20, "last_iteration": 40},
        {"rank": 0, "reason": "software thermal slowdown", "first_iteration": 30, "last_iteration": 40},
        {"rank": 1, "reason": "hardware slowdown", "first_iteration": 50, "last_iteration": 50},
    ]
    assert conditions["sm_clock_mhz"] == [1975, 1977, 1979]
    assert conditions["power_w"] is None
    assert conditions["samples"] == 5


def test_samples_carry_their_iterations_and_energy_is_counted_after_the_warm_up() -> None:
    ranks = [counted(*((i, joules * i) for i in range(0, 1000, 2))) for joules in (1.5, 2.5)]
    conditions = summarize(ranks, 0.5, warmup=100)
    assert conditions["joules_per_iteration"] == pytest.approx(4.0)
    series = conditions["ranks"][1]
    assert len(series["iteration"]) == len(series["energy_j"]) == KEPT + KEPT_OF_WARMUP
    assert series["iteration"] == sorted(set(series["iteration"]))
    assert (series["iteration"][0], series["iteration"][-1]) == (0, 998)
    assert sum(i < 100 for i in series["iteration"]) == KEPT_OF_WARMUP


def test_energy_of_a_gpu_that_ranks_share_is_counted_once() -> None:
    energies = [(i, 2.0 * i) for i in (10, 20, 30, 40)]
    conditions = summarize([counted(*energies, gpu=gpu) for gpu in ("a", "b", "a", "b")], 0.5)
    assert conditions["joules_per_iteration"] == pytest.approx(4.0)
    assert [rank["gpu"] for rank in conditions["ranks"]] == ["a", "b", "a", "b"]
    unknown = summarize([counted(*energies), counted(*energies)], 0.5)
    assert unknown["joules_per_iteration"] == pytest.approx(4.0)


def test_energy_is_unknown_where_a_gpu_counts_none_or_nothing_was_timed() -> None:
    samples = counted(*((i, 2.0 * i) for i in (10, 20, 30, 40)))
    assert summarize([samples, states(0, 0)], 0.5)["joules_per_iteration"] is None
    assert summarize([samples], 0.5, warmup=15)["joules_per_iteration"] is None
    assert summarize([samples], 0.5)["joules_per_iteration"] == 2.0
    samples.period_s = None
    assert summarize([samples], 0.5)["joules_per_iteration"] is None


def test_iterations_that_the_host_launches_ahead_take_no_energy() -> None:
    """600 W, 0.2 s an iteration, whatever number of them the host has launched: 8 more, and all before the end."""
    samples = counted(*((min(8 + i // 2, 24), 60.0 * i) for i in range(48)))
    samples.seconds = [0.1 * i for i in range(48)]
    samples.period_s = 0.2
    assert summarize([samples], 0.5, warmup=8)["joules_per_iteration"] == pytest.approx(120.0)


def test_energy_of_an_evaluation_is_left_out() -> None:
    """2 J an iteration; after iteration 100 an evaluation takes 5 kJ, in which no iteration is launched."""
    training = [(i, 2.0 * i, 1, 1.0 * i) for i in range(0, 101, 4)]
    evaluation = [(100, 200.0 + 50.0 * n, 0, 100.0 + n) for n in range(1, 101)]
    after = [(i, 5000.0 + 2.0 * i, 2, 100.0 + i) for i in range(104, 201, 4)]
    seen = [*training, *evaluation, *after]
    samples = counted(*((i, joules) for i, joules, _, _ in seen))
    samples.seconds = [second for _, _, _, second in seen]
    assert (summarize([samples], 0.5)["joules_per_iteration"] or 0) > 18
    samples.stretches = [stretch for _, _, stretch, _ in seen]
    assert summarize([samples], 0.5)["joules_per_iteration"] == pytest.approx(2.0)


def test_energy_is_that_between_changes_of_a_counter_that_lags() -> None:
    """2 J an iteration, counted every 50 iterations; from the first sample to the last it would be 1.70."""
    samples = counted(*((i, 100.0 * (i // 50)) for i in range(1, 248, 3)))
    assert summarize([samples], 0.5)["joules_per_iteration"] == pytest.approx(2.0, abs=0.05)


def test_idle_and_application_clocks_are_not_throttling() -> None:
    assert summarize([states(0x1, 0x2, 0x100)], 0.5)["throttled"] is False


def test_what_nvml_does_not_say_is_unknown() -> None:
    assert summarize([states(None, None)], 0.5)["throttled"] is None
    assert summarize([Samples()], 0.5)["sm_clock_mhz"] is None


def test_a_collection_within_the_loop_is_seen_and_those_around_it_are_not() -> None:
    clock = IterationClock(CPU)
    with RunMonitor(CPU, clock) as watched:
        with frozen_gc():
            clock.start()
            for iteration in range(20):
                if iteration == 7:
                    gc.collect()
                clock.lap()
            clock.pause()
        gc.collect()
    assert watched.gather()["gc_iterations"] == [7]
    assert watched._on_gc not in gc.callbacks


def test_the_gpu_is_sampled_while_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = threading.Semaphore(0)
    asked: list[bool] = []

    def gpu_state(_: str, energy: bool) -> GpuState:
        asked.append(energy)
        sampled.release()
        return GpuState(1980.0, 50.0, 700.0, 0x4)

    monkeypatch.setattr(monitor, "current_gpu", lambda: "gpu")
    monkeypatch.setattr(monitor, "gpu_state", gpu_state)
    monkeypatch.setattr(monitor, "nvml_session", lambda: monitor_session())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    clock = IterationClock(CPU)
    monkeypatch.setattr(monitor, "_ENERGY_INTERVAL_S", 60.0)
    with RunMonitor(torch.device("cuda"), clock, interval_s=0.01) as watched:
        clock.start()
        for lap in range(50):
            clock.lap()
            if lap in (20, 40):
                assert sampled.acquire(timeout=60)
        clock.pause()
    assert asked == [True, *[False] * (len(asked) - 2), True]  # the energy counter's interval, and the end
    conditions = watched.gather()
    assert conditions["samples"] >= 3  # two in the loop, one at its end
    assert conditions["throttled"] is True
    assert conditions["throttling"][0]["last_iteration"] == 50


class monitor_session:  # noqa: N801
    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.gpu
def test_nvml_answers_on_this_gpu_and_costs_next_to_nothing() -> None:
    from dlrm_bench.bench.machine.description import current_gpu, gpu_state, nvml_session

    with nvml_session() as works:
        assert works
        gpu = current_gpu()
        gpu_state(gpu)
        seconds = []
        for _ in range(20):
            begin = time.perf_counter()
            state = gpu_state(gpu)
            seconds.append(time.perf_counter() - begin)
        assert min(seconds) < 0.02
    assert state.sm_clock_mhz is not None
    assert state.clocks_event_reasons is not None
