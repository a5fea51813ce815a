"""The instrumented twin of a run: the same configuration, with a profiler on for a few iterations.

dlrm-bench host RECORD, or dlrm-bench host --preset launch-bound [--field value ...]

The timed run carries no instruments; its twin leaves a record of its own, whose host, gpu and stages_ms blocks are
filled and whose latencies nobody should compare, and a trace of each rank for Perfetto (https://ui.perfetto.dev).
"""

import dataclasses
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from bench.record import Instruments, Record, RunRecord
from bench.trace import ITERATION, OTHER, STAGES, read_trace, summarize_trace
from dlrm.config import RunConfig
from dlrm.ranks import Ranks

if TYPE_CHECKING:  # at run time it would bring TorchRec into the command line, which reads records only
    from pipeline.interface import Pipeline

MEASURED = 50
"""Iterations after the warm-up that measure CPU time, without the profiler."""
SETTLING = 3
"""Iterations with the profiler on that are not looked at: its start slows them down."""
PROFILED = 5
"""Iterations in the trace and in all counts."""


def twin_config(config: RunConfig) -> RunConfig:
    """The configuration of the twin: as many iterations as the instruments need, no evaluation.

    ValueError where the data set is too short is the run's own.
    """
    iterations = config.warmup_iterations + MEASURED + SETTLING + PROFILED
    return dataclasses.replace(config, iterations=iterations, target_auc=None)


class InstrumentedPipeline:
    """A pipeline whose train_step is measured; see pipeline.interface.Pipeline."""

    def __init__(self, pipeline: "Pipeline", folder: Path, config: RunConfig, ranks: Ranks) -> None:
        """folder: of the record, where the traces go."""
        self._pipeline = pipeline
        self._trace = folder / f"trace_rank{ranks.rank}.json.gz"
        self._ranks = ranks
        self._step = 0
        self._starts = config.warmup_iterations
        self._cpu_ms = self._thread_ms = self._wall_ms = 0.0
        activities = [ProfilerActivity.CPU]
        if ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)

    def train_step(self, batches: Iterator[Any]) -> Tensor:
        """A step of the pipeline, within a range named ITERATION once the profiler has settled."""
        step = self._step - self._starts
        self._step += 1
        if step == 0:
            self._clocks(-1)
        elif step == MEASURED:
            self._clocks(1)
            self._profile.start()
        if step < MEASURED + SETTLING:
            return self._pipeline.train_step(batches)
        with record_function(ITERATION):
            loss = self._pipeline.train_step(batches)
        if step == MEASURED + SETTLING + PROFILED - 1:
            self._synchronize()
            self._profile.stop()
        return loss

    def prepare(self, batch: Any) -> Any:
        """The pipeline's."""
        return self._pipeline.prepare(batch)

    def evaluate(self, batches: Iterator[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """The pipeline's."""
        return self._pipeline.evaluate(batches)

    def describe(self) -> dict[str, Any]:
        """The pipeline's."""
        return self._pipeline.describe()

    def close(self) -> None:
        """The pipeline's."""
        self._pipeline.close()

    def instruments(self) -> Instruments:
        """Writes the traces; what they say, as mean of the ranks, on every rank. Collective."""
        self._profile.export_chrome_trace(str(self._trace))
        trace = summarize_trace(read_trace(self._trace))
        wall_ms = self._wall_ms / MEASURED
        own: dict[str, Any] = {
            "host": {
                "cpu_ms": self._cpu_ms / MEASURED,
                "launching_thread_ms": self._thread_ms / MEASURED,
                "wall_ms": wall_ms,
                **trace.calls,
            },
            "gpu": None,
            "stages_ms": trace.gpu_stages_ms or trace.host_stages_ms,
            "host_stages_ms": trace.host_stages_ms,
        }
        if trace.gpu_busy_ms is not None:
            own["gpu"] = {"busy_ms": trace.gpu_busy_ms, "idle_fraction": max(0.0, 1 - trace.gpu_busy_ms / wall_ms)}
        everyone: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(everyone, own)
        return Instruments(**{block: _mean([rank[block] for rank in everyone]) for block in own})  # type: ignore[typeddict-item]

    def _clocks(self, sign: int) -> None:
        """Adds (1) or takes away (-1) the times so far of the process, this thread, and the wall."""
        self._synchronize()
        self._cpu_ms += sign * time.process_time() * 1000
        self._thread_ms += sign * time.thread_time() * 1000
        self._wall_ms += sign * time.perf_counter() * 1000

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()


def twin_flags(record: Record) -> tuple[list[str], int]:
    """Flags of launch/dlrm.py that repeat a record's run, and its number of processes.

    ValueError if the record's command is not one of ours on one node.
    """
    words = shlex.split(record.run["command"])
    try:
        launcher = words.index("launch/dlrm.py")
        (processes,) = (int(w.partition("=")[2]) for w in words[:launcher] if w.startswith("--nproc_per_node="))
    except ValueError:
        raise ValueError(f"{record.folder}: cannot repeat `{record.run['command']}`: give --preset and flags") from None
    if any(word.startswith("--nnodes") for word in words[:launcher]):
        raise ValueError(f"{record.folder} is a run on several nodes: its twin runs on one; give --preset and flags")
    return words[launcher + 1 :], processes


def host_table(run: RunRecord) -> Table:
    """The instruments of a twin, for people. ValueError if the record is not a twin's."""
    host, gpu = run["host"], run["gpu"]
    stages, host_stages = run["stages_ms"], run.get("host_stages_ms")
    if host is None or stages is None or host_stages is None:
        raise ValueError(f"{run['id']} is a timed run without instruments: `dlrm-bench host` makes its twin")
    table = Table(title=f"{run['id']}: an iteration of one rank", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("", "host", "GPU"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_row("busy, ms", f"{host['cpu_ms']:.3f} CPU time", f"{gpu['busy_ms']:.3f}" if gpu else "")
    table.add_row("of, ms", f"{host['wall_ms']:.3f}", f"{gpu['idle_fraction']:.0%} idle" if gpu else "")
    for name in ("kernel_launches", "graph_launches", "stream_syncs", "memcpy_calls", "d2h_copies"):
        table.add_row(name.replace("_", " "), f"{host[name]:g}", "")
    for stage in (*STAGES, OTHER):
        on_gpu = f"{stages[stage]:.3f}" if gpu else ""
        table.add_row(f"{stage.replace('_', ' ')}, ms", f"{host_stages[stage]:.3f}", on_gpu)
    return table


def _mean(blocks: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    known = [block for block in blocks if block is not None]
    return {name: fmean(block[name] for block in known) for name in known[0]} if known else None
