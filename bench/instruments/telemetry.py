"""The state of the machine during a run: clocks, temperature, power and throttling by NVML, garbage collections.

One thread per rank queries NVML for its GPU: a hundred times per second after the warm-up, then ever less often down to
twice per second, so that even a window of 0.2 s has ten samples. A query takes 0.1 ms, and neither waits for the GPU
nor holds Python's interpreter lock. That of the energy counter takes milliseconds of a core: it is made as often as the
counter changes.
"""

import gc
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlrm_bench.bench.instruments.clock import IterationClock
from dlrm_bench.bench.machine.description import GpuState, current_gpu, gpu_state, gpu_uuid, nvml_session
from dlrm_bench.bench.records.schema import SampleSeries, Telemetry, Throttling

INTERVAL_S = 0.5
"""The longest time between two samples, in seconds."""
_WARMUP_INTERVAL_S = 0.02
_FIRST_INTERVAL_S = 0.01
_ENERGY_INTERVAL_S = 0.1
"""The shortest time between two queries of the energy counter, which changes ten times per second."""
_OF_ELAPSED = 0.05
"""Time to the next sample, as a share of the time since the warm-up."""
KEPT_OF_WARMUP, KEPT = 10, 100
"""Number of samples of a rank that a record holds, evenly chosen, of the warm-up and after it."""
_FEWEST_CHANGES = 3
"""Smallest number of changes of an energy counter for which energy is computed; each is seen up to one sample late."""
CLOCK_JUMP_S = 1.0
"""A difference of this many seconds is a jump of the wall clock: NTP's largest steady correction, 500 ppm, takes half
an hour for it."""

# nvml.h, nvmlClocksEventReasons: the reasons that throttle a GPU.
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(slots=True)
class Samples:
    """The samples of one rank: the GPU's states, each with the number of iterations launched by then."""

    states: list[tuple[int, GpuState]] = field(default_factory=list)
    stretches: list[int] = field(default_factory=list)
    """Stretch of iterations in which each state was seen, 0 in an evaluation; empty if all are of one stretch."""
    seconds: list[float] = field(default_factory=list)
    """Time of each state by the host's monotonic clock."""
    period_s: float | None = None
    """Mean latency of the iterations after the warm-up, in seconds; None if there are none."""
    gc_iterations: list[int] = field(default_factory=list)
    gpu: str | None = None
    """UUID of the GPU; None if NVML does not report it."""
    clock_jump_s: float = 0.0


class RunMonitor:
    """Context manager around a training loop that `clock` times."""

    def __init__(
        self, device: torch.device, clock: IterationClock, warmup: int = 0, interval_s: float = INTERVAL_S
    ) -> None:
        """warmup: number of iterations that are not timed, whose energy is left out. interval_s: seconds between later
        samples."""
        self._cuda = device.type == "cuda"
        self._clock = clock
        self._warmup, self._interval_s = warmup, interval_s
        self._samples = Samples()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "RunMonitor":
        self._begun = time.time(), time.monotonic()
        gc.callbacks.append(self._on_gc)
        if self._cuda:
            gpu = torch.cuda.current_device()  # a thread has a current device of its own
            self._thread = threading.Thread(target=self._watch, args=(gpu,), name="run-monitor", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, monotonic = time.time() - self._begun[0], time.monotonic() - self._begun[1]
        self._samples.clock_jump_s = wall - monotonic
        gc.callbacks.remove(self._on_gc)
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=10)  # a driver that hangs must not hang the run

    def gather(self, warmup: int | None = None) -> Telemetry:
        """Returns the telemetry of all ranks, on every rank. Collective, after the loop.

        warmup: number of iterations that were not timed, if it differs from the one given before.
        """
        # The loop begins with a collection, and Python may make another one after its end: neither cost the loop time.
        within = [i for i in self._samples.gc_iterations if 0 < i < self._clock.iterations]
        self._samples.gc_iterations = within
        warmup = self._warmup if warmup is None else warmup
        timed = self._clock.local_ms()[warmup:]
        self._samples.period_s = float(timed.mean(dtype=np.float64)) / 1000 if len(timed) else None
        ranks: list[Any] = [self._samples]
        if dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, self._samples)
        return summarize(ranks, self._interval_s, warmup)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self._samples.gc_iterations.append(self._clock.iterations)

    def _watch(self, device: int) -> None:
        torch.cuda.set_device(device)
        with nvml_session() as works:
            gpu = current_gpu() if works else None
            self._samples.gpu = gpu_uuid(gpu)
            ended, begin, energy_at = gpu is None, None, float("-inf")
            while not ended:  # not before the first wait, when the GPU may still be idle
                wait = _WARMUP_INTERVAL_S
                if self._clock.iterations >= self._warmup:
                    begin = begin or time.monotonic()
                    wait = max(_FIRST_INTERVAL_S, _OF_ELAPSED * (time.monotonic() - begin))
                ended = self._end.wait(min(wait, self._interval_s))
                stretch, iterations = self._clock.stretch, self._clock.iterations
                if energy := ended or time.monotonic() - energy_at >= _ENERGY_INTERVAL_S:
                    energy_at = time.monotonic()
                self._samples.states.append((iterations, gpu_state(gpu, energy)))
                self._samples.seconds.append(time.monotonic())
                self._samples.stretches.append(stretch)


def summarize(ranks: Sequence[Samples], interval_s: float, warmup: int = 0) -> Telemetry:
    """Returns the telemetry of all ranks' samples; energy is that after the first `warmup` iterations."""
    states = [state for samples in ranks for _, state in samples.states]
    throttling = [span for rank, samples in enumerate(ranks) for span in _spans(rank, samples)]
    by_gpu = {samples.gpu or rank: samples for rank, samples in enumerate(ranks)}  # ranks may share one
    return Telemetry(
        interval_s=interval_s,
        samples=max(len(samples.states) for samples in ranks),
        sm_clock_mhz=_triple([state.sm_clock_mhz for state in states]),
        temperature_c=_triple([state.temperature_c for state in states]),
        power_w=_triple([state.power_w for state in states]),
        throttled=bool(throttling) if any(state.clocks_event_reasons is not None for state in states) else None,
        throttling=throttling,
        clock_jump_s=_clock_jump_s(ranks),
        gc_iterations=sorted({iteration for samples in ranks for iteration in samples.gc_iterations}),
        ranks=[_series(samples, warmup) for samples in ranks],
        joules_per_iteration=_joules_per_iteration(list(by_gpu.values()), warmup),
    )


def _series(samples: Samples, warmup: int) -> SampleSeries:
    """Returns one rank's samples, or KEPT_OF_WARMUP and KEPT of them, with the first and last of each."""
    early = [each for each in samples.states if each[0] < warmup]
    states = _evenly(early, KEPT_OF_WARMUP) + _evenly(samples.states[len(early) :], KEPT)
    return SampleSeries(
        gpu=samples.gpu,
        iteration=[iteration for iteration, _ in states],
        **{name: [getattr(state, name) for _, state in states] for name in GpuState._fields},  # type: ignore[typeddict-item]
    )


def _evenly(states: list[tuple[int, GpuState]], kept: int) -> list[tuple[int, GpuState]]:
    n = len(states)
    return states if n <= kept else [states[round(i * (n - 1) / (kept - 1))] for i in range(kept)]


def _joules_per_iteration(gpus: Sequence[Samples], warmup: int) -> float | None:
    """Returns the energy of all GPUs per iteration, in joules: the mean power by their energy counters times the mean
    latency; None if a GPU has no counter, or if a counter changed too seldom.

    In each stretch of iterations it counts from the first sample that saw a counter change to the last such sample: a
    counter changes ten times per second, and its value in between is up to 0.1 s old. Energy of evaluations between
    stretches is left out. Iterations of that time are not counted: the host launches them ahead of the GPU.
    """
    total = 0.0
    for samples in gpus:
        energy, seconds, changes = 0.0, 0.0, 0
        for timed in _by_stretch(samples, warmup):
            changed = [new for old, new in pairwise(timed) if new[1] != old[1]]
            changes += len(changed)
            if len(changed) > 1:
                energy += changed[-1][1] - changed[0][1]
                seconds += changed[-1][0] - changed[0][0]
        if changes < _FEWEST_CHANGES or seconds <= 0 or samples.period_s is None:
            return None
        total += energy / seconds * samples.period_s
    return total if gpus else None


def _by_stretch(samples: Samples, warmup: int) -> list[list[tuple[float, float]]]:
    """Returns (seconds, energy) of the samples after the warm-up, grouped by stretch."""
    found: dict[int, list[tuple[float, float]]] = {}
    stretches = samples.stretches or [1] * len(samples.states)
    for (iterations, state), stretch, at in zip(samples.states, stretches, samples.seconds, strict=True):
        if stretch and iterations >= warmup and state.energy_j is not None:
            found.setdefault(stretch, []).append((at, state.energy_j))
    return list(found.values())


def _clock_jump_s(ranks: Sequence[Samples]) -> float | None:
    """Returns the largest jump of any rank's wall clock in seconds; None if all differences are a clock's steady
    correction."""
    jump = max((samples.clock_jump_s for samples in ranks), key=abs)
    return round(jump, 1) if abs(jump) > CLOCK_JUMP_S else None


def _triple(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [round(float(value), 1) for value in np.percentile(known, (0, 50, 100))] if known else None


def _spans(rank: int, samples: Samples) -> list[Throttling]:
    """Returns spans of throttling: consecutive samples with the same reason make one span, up to the next sample."""
    spans: list[Throttling] = []
    for bit, reason in THROTTLE_REASONS.items():
        open_span: Throttling | None = None
        for iteration, state in samples.states:
            if open_span is not None:
                open_span["last_iteration"] = iteration
            if not (state.clocks_event_reasons or 0) & bit:
                open_span = None
            elif open_span is None:
                open_span = Throttling(rank=rank, reason=reason, first_iteration=iteration, last_iteration=iteration)
                spans.append(open_span)
    return spans
