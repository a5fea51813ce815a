"""The instrumented twin, and what the harness itself costs an iteration. That a twin runs, test_cli.py shows."""

import math
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.clock import IterationClock
from bench.host_cost import MEASURED, PROFILED, SETTLING, InstrumentedPipeline, host_table, twin_config, twin_flags
from bench.kernel_names import STAGES
from bench.losses import LossHistory
from bench.mllog import MLPerfLog
from bench.monitor import RunMonitor
from bench.record import read_record
from bench.run import Run
from bench.schedule import Schedule
from bench.trace import read_trace
from dlrm.presets import preset
from dlrm.ranks import Ranks
from tests.bench.records import configured, edit, instruments, recorded_runs, write

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
    )


def time_the_loop(ranks: Ranks) -> float:
    """Microseconds of an iteration that trains nothing, monitor included; the best of five loops."""
    best = math.inf
    for _ in range(5):
        run = loop(5000, Nothing(), ranks)
        with RunMonitor(CPU, run.clock):
            begin = time.perf_counter()
            run.train()
            best = min(best, time.perf_counter() - begin)
    return best / 5000 * 1e6


def test_the_harness_adds_next_to_nothing_to_an_iteration(run_ranks: Any) -> None:
    (overhead_us,) = run_ranks(1, time_the_loop)
    assert overhead_us < 100  # 15 us on an idle core: 1.5 % of the fastest iteration there is, 1 ms


def measure_nothing(ranks: Ranks, folder: Path) -> tuple[Any, int]:
    pipeline = Nothing()
    config = configured()
    twin = InstrumentedPipeline(pipeline, folder, config, ranks)  # type: ignore[arg-type]
    for _ in range(twin_config(config).iterations or 0):
        twin.train_step(iter(()))
    dist.barrier()
    return twin.instruments(), pipeline.steps


def test_the_twin_measures_every_rank(run_ranks: Any, tmp_path: Path) -> None:
    (measured, steps), (same, _) = run_ranks(2, measure_nothing, tmp_path)
    assert measured == same
    assert steps == configured().warmup_iterations + MEASURED + SETTLING + PROFILED
    assert measured["gpu"] is None
    assert measured["host"]["kernel_launches"] == 0
    assert 0 < measured["host"]["launching_thread_ms"] <= measured["host"]["cpu_ms"] * 1.01
    assert measured["stages_ms"] == measured["host_stages_ms"]
    assert measured["stages_ms"]["embedding_forward"] > 0
    for rank in range(2):
        names = [event["name"] for event in read_trace(tmp_path / f"trace_rank{rank}.json.gz")]
        assert names.count("embedding_forward") == SETTLING + PROFILED


def test_the_twins_configuration() -> None:
    twin = twin_config(preset("smoke"))
    assert (twin.iterations, twin.target_auc) == (50 + MEASURED + SETTLING + PROFILED, None)
    assert twin.model == preset("smoke").model


def test_the_flags_of_a_record(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", recorded_runs()[0], world_size=4)
    assert twin_flags(read_record(folder)) == (["--preset", "launch-bound", "--seed", "0"], 4)
    for command, message in (
        ("python train.py", "cannot repeat `python train.py`"),
        ("torchrun launch/dlrm.py", "cannot repeat"),
        ("torchrun --nnodes=2 --nproc_per_node=8 launch/dlrm.py", "several nodes"),
    ):
        edit(folder, command=command)
        with pytest.raises(ValueError, match=message):
            twin_flags(read_record(folder))


def test_the_table(tmp_path: Path) -> None:
    twin = read_record(write(tmp_path / "twin", recorded_runs()[0], instruments=instruments())).run
    table = host_table(twin)
    assert table.row_count == 7 + len(STAGES) + 1
    assert "88% idle" in list(table.columns[2].cells)
    timed = read_record(write(tmp_path / "timed", recorded_runs()[0])).run
    with pytest.raises(ValueError, match="timed is a timed run without instruments"):
        host_table(timed)
