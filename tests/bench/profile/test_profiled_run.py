"""A profiled run, and the harness' own cost of an iteration. test_cli.py shows that one runs for real."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from dlrm_bench.bench.checkpoints.checkpoints import Checkpoints
from dlrm_bench.bench.doctor.trace import read_trace
from dlrm_bench.bench.instruments.clock import IterationClock
from dlrm_bench.bench.instruments.losses import LossHistory
from dlrm_bench.bench.instruments.progress import StillBar
from dlrm_bench.bench.instruments.schedule import Schedule
from dlrm_bench.bench.instruments.telemetry import RunMonitor
from dlrm_bench.bench.mlperf.log import MLPerfLog
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.profile.profiled_run import (
    MEASURED,
    PROFILED,
    SETTLING,
    ProfiledPipeline,
    mean_of_ranks,
    profiled_config,
)
from dlrm_bench.bench.records.schema import Span
from dlrm_bench.bench.run import Run
from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.bench.made_records import configured, kernel, profile

CPU = torch.device("cpu")


class Nothing:
    """A pipeline and data set that take no time."""

    train_samples = None
    eval_samples = 0
    best_auc = None

    def __init__(self) -> None:
        self.loss = torch.zeros(())
        self.steps = 0

    def train_batches(self, *_: Any, **__: Any) -> Iterator[int]:
        return repeat(0)

    def prepare(self, batch: Any) -> Any:
        return batch

    def train_step(self, batches: Iterator[Any]) -> torch.Tensor:
        self.steps += 1
        with torch.profiler.record_function("embedding_forward"):
            return self.loss

    def describe(self) -> dict[str, Any]:
        return {}


def loop(iterations: int, pipeline: Any, ranks: Ranks) -> Run:
    config = configured(iterations=iterations)
    schedule = Schedule(global_batch_size=1, iterations=iterations, evaluate_every=None, iterations_per_epoch=math.inf)
    return Run(
        config=config,
        ranks=ranks,
        dataset=Nothing(),  # type: ignore[arg-type]
        schedule=schedule,
        pipeline=pipeline,
        log=MLPerfLog(None),
        clock=IterationClock(CPU),
        losses=LossHistory(CPU, 100),
        bar=StillBar(iterations, "", Console()),
        folder=Path(),
        checkpoints=Checkpoints(config, ranks, pipeline, None),
    )


def thread_us(run: Callable[[], object], iterations: int) -> float:
    """Microseconds of the launching thread's CPU time, which other processes take nothing from, in an iteration."""
    begin = time.thread_time()
    run()
    return (time.thread_time() - begin) / iterations * 1e6


def time_the_loop(ranks: Ranks) -> tuple[float, float]:
    """Microseconds of an iteration that trains nothing, monitor included, and of its step alone; the best of five of
    each, in turn."""
    of_loop, of_step, iterations, alone = [], [], 5000, Nothing()

    def step_again() -> None:
        for _ in range(iterations):
            alone.train_step(iter(()))

    for _ in range(5):
        run = loop(iterations, Nothing(), ranks)
        with RunMonitor(CPU, run.clock):
            of_loop.append(thread_us(run.train, iterations))
        of_step.append(thread_us(step_again, iterations))
    return min(of_loop), min(of_step)


def test_the_harness_adds_next_to_nothing_to_an_iteration(run_ranks: Any) -> None:
    """15 us on an idle core: 1.5 % of the fastest iteration there is, 1 ms. That is 8 steps, each a range of the
    profiler, which are as slow as all of Python is on a slow or busy machine."""
    ((loop_us, step_us),) = run_ranks(1, time_the_loop)
    assert loop_us < 30 * step_us


def measure_nothing(ranks: Ranks, folder: Path) -> tuple[Any, int]:
    pipeline = Nothing()
    config = configured()
    profiled = ProfiledPipeline(pipeline, folder, config, ranks)  # type: ignore[arg-type]
    for _ in range(profiled_config(config).iterations or 0):
        profiled.train_step(iter(()))
    dist.barrier()
    return profiled.profile(), pipeline.steps


def test_a_profiled_run_measures_every_rank(run_ranks: Any, tmp_path: Path) -> None:
    (measured, steps), (same, _) = run_ranks(2, measure_nothing, tmp_path)
    assert measured == same
    assert steps == configured().warmup_iterations + MEASURED + SETTLING + PROFILED
    assert measured["gpu"] is None
    assert measured["host"]["kernel_launches"] == 0
    # Two clocks, read one after the other: of iterations that do nothing, the time between shows.
    assert 0 < measured["host"]["launching_thread_ms"] <= measured["host"]["cpu_ms"] * 1.01 + 0.005
    assert sum(measured["host_threads_ms"].values()) <= measured["host"]["cpu_ms"]
    assert measured["stages_ms"] == measured["host_stages_ms"]
    assert measured["stages_ms"]["embedding_forward"] > 0
    assert list(measured["timeline"]) == ["embedding_forward"]
    assert measured["kernels"] is None
    for rank in range(2):
        names = [event["name"] for event in read_trace(tmp_path / f"trace_rank{rank}.json.gz")]
        assert names.count("embedding_forward") == SETTLING + PROFILED


def test_the_configuration_of_a_profiled_run() -> None:
    config = profiled_config(preset("smoke"))
    assert (config.iterations, config.target_auc) == (50 + MEASURED + SETTLING + PROFILED, None)
    assert config.model == preset("smoke").model


def emit_nvtx(ranks: Ranks, folder: Path) -> Any:
    pipeline = Nothing()
    profiled = ProfiledPipeline(pipeline, folder, configured(), ranks, nvtx=True)  # type: ignore[arg-type]
    for _ in range(profiled_config(configured()).iterations or 0):
        profiled.train_step(iter(()))
    return profiled.profile()


@pytest.mark.gpu
def test_an_nvtx_run_counts_nothing_and_leaves_no_trace(run_ranks: Any, tmp_path: Path) -> None:
    (measured,) = run_ranks(1, emit_nvtx, tmp_path, gpu=True)
    assert set(measured["host"]) == {"cpu_ms", "launching_thread_ms", "wall_ms"}
    assert measured["stages_ms"] is measured["kernels"] is None
    assert list(tmp_path.iterdir()) == []


class OnGpu(Nothing):
    """One matrix product, one read that waits, and one replay of a graph of two kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.ones(256, 256, device="cuda")
        self.out = torch.empty_like(self.x)
        self.graph = torch.cuda.CUDAGraph()
        torch.mm(self.x, self.x, out=self.out)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            torch.mm(self.x, self.x, out=self.out)
            self.out.add_(1)

    def train_step(self, batches: Iterator[Any]) -> torch.Tensor:
        with torch.profiler.record_function("embedding_forward"):
            torch.mm(self.x, self.x, out=self.out)
            self.out[0, 0].item()
        self.graph.replay()
        return self.loss


def measure_on_gpu(ranks: Ranks, folder: Path) -> Any:
    profiled = ProfiledPipeline(OnGpu(), folder, configured(), ranks)  # type: ignore[arg-type]
    for _ in range(profiled_config(configured()).iterations or 0):
        profiled.train_step(iter(()))
    return profiled.profile()


@pytest.mark.gpu
def test_what_kineto_says_of_a_gpu(run_ranks: Any, tmp_path: Path) -> None:
    """Names and categories of this torch's real traces are those that the made-up ones have."""
    (measured,) = run_ranks(1, measure_on_gpu, tmp_path, gpu=True)
    host = measured["host"]
    assert (host["graph_launches"], host["stream_syncs"], host["d2h_copies"]) == (1, 1, 1)
    assert host["kernel_launches"] >= 1
    assert 0 < measured["gpu"]["busy_ms"] < host["wall_ms"]
    assert measured["stages_ms"]["embedding_forward"] > 0
    of_names = {(each["name"].partition(" (")[0], each["stage"]) for each in measured["kernels"]}
    assert {("GEMM", "embedding_forward"), ("GEMM", "dense_forward_backward")} <= of_names
    assert {"embedding_forward", "dense_forward_backward"} == set(measured["timeline"])


class Launching(Nothing):
    """A pipeline whose second thread, older than the profiler, launches the input dist."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(1)
        self._pool.submit(int).result()

    def train_step(self, batches: Iterator[Any]) -> torch.Tensor:
        self._pool.submit(self._input_dist).result()
        return super().train_step(batches)

    @staticmethod
    def _input_dist() -> None:
        with torch.profiler.record_function("input_dist"):
            torch.ones(10).sum()


def measure_two_threads(ranks: Ranks, folder: Path) -> Any:
    profiled = ProfiledPipeline(Launching(), folder, configured(), ranks)  # type: ignore[arg-type]
    for _ in range(profiled_config(configured()).iterations or 0):
        profiled.train_step(iter(()))
    return profiled.profile()


def test_a_second_launching_thread_is_seen(run_ranks: Any, tmp_path: Path) -> None:
    (measured,) = run_ranks(1, measure_two_threads, tmp_path)
    assert measured["host_stages_ms"]["input_dist"] > 0
    assert list(measured["timeline"]) == ["input_dist", "embedding_forward"]


def test_the_mean_of_ranks() -> None:
    """A rank without a kernel spent nothing on it; a stage's times are those of the ranks that had it."""
    one, other = profile(), profile()
    same = mean_of_ranks([one, other])
    assert same["gpu"] == {**(one["gpu"] or {}), "mean_idle_fraction": 0.875}
    assert {**same, "gpu": one["gpu"], "gpu_of_ranks": None} == one
    one["kernels"] = [kernel("a", "other", 10, calls=2), kernel("b", "other", 4)]
    other["kernels"] = [kernel("a", "other", 30, calls=4)]
    other["timeline"] = {"dense_update": Span(start_ms=2, end_ms=3, busy_ms=0)}
    other["host"] = dict.fromkeys(other["host"], 14.0)
    other["gpu"] = {"busy_ms": 2.5, "idle_fraction": 0.5}
    mean = mean_of_ranks([one, other])
    # 0.875 is that of the rank that the other waits for
    assert mean["gpu"] == {"busy_ms": 2.0, "idle_fraction": 0.875, "mean_idle_fraction": 0.6875}
    assert mean["gpu_of_ranks"] == [one["gpu"], other["gpu"]]
    assert mean["kernels"] == [
        kernel("a", "other", 20, calls=3, least=10, most=30),
        {**kernel("b", "other", 2, calls=0.5, most=4), "least_us": 0},
    ]
    assert mean["timeline"] is not None
    assert mean["timeline"]["dense_update"] == {"start_ms": 1.5, "end_ms": 2.25, "busy_ms": 0.2}
    assert mean["timeline"]["input_dist"] == one["timeline"]["input_dist"]  # type: ignore[index]
    assert mean["host"]["cpu_ms"] == 13
