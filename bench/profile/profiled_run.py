"""A profiled run: the configuration of a timed run, with a profiler on for a few iterations.

dlrm-bench host RECORD, or dlrm-bench host --preset launch-bound [--field value ...]

A timed run has no profiler. A profiled run leaves its own record, which has the blocks from host to gpu_of_ranks and
whose latencies must not be compared, and a trace of each rank for Perfetto (https://ui.perfetto.dev). With --nvtx it
traces nothing and emits its ranges for nsys instead: CUPTI serves one profiler at a time.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, profiler
from torch._C._profiler import _ExperimentalConfig

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.doctor.thread_times import spent_ms, thread_times_ms
from dlrm_bench.bench.doctor.trace import ITERATION, read_trace
from dlrm_bench.bench.profile.kernel_names import STAGES
from dlrm_bench.bench.profile.trace import summarize_trace
from dlrm_bench.bench.records.schema import Kernel, Profile, Span
from dlrm_bench.dlrm.runtime.ranks import Ranks

if TYPE_CHECKING:  # a run-time import would load TorchRec into the command line, which only reads records
    from dlrm_bench.pipeline.interface import Pipeline

MEASURED = 50
"""Number of iterations after the warm-up in which CPU time is measured, without the profiler."""
SETTLING = 3
"""Number of iterations with the profiler on that do not count: its start slows them down."""
PROFILED = 5
"""Number of iterations in the trace and in all counts."""


def profiled_config(config: RunConfig) -> RunConfig:
    """Returns the configuration of a profiled run: as many iterations as the profiler needs, and no evaluation.

    The run itself checks whether the data set is long enough.
    """
    iterations = config.warmup_iterations + MEASURED + SETTLING + PROFILED
    return dataclasses.replace(config, iterations=iterations, target_auc=None)


class ProfiledPipeline:
    """A pipeline of pipeline/interface.py whose train_step is measured."""

    def __init__(self, pipeline: "Pipeline", folder: Path, config: RunConfig, ranks: Ranks, nvtx: bool = False) -> None:
        """folder: where the record and the traces go. nvtx: emit ranges for nsys and trace nothing; needs a GPU."""
        cuda = ranks.device.type == "cuda"
        assert cuda or not nvtx
        self._pipeline = pipeline
        self._trace = folder / f"trace_rank{ranks.rank}.json.gz"
        self._ranks = ranks
        self._step = 0
        self._starts = config.warmup_iterations
        self._cpu_ms = self._thread_ms = self._wall_ms = 0.0
        self._threads: list[dict[int, tuple[str, float]]] = []
        self._on = ExitStack()
        self._profiler: profiler.profile | None = None
        if not nvtx:
            self._profiler = profiler.profile(
                activities=[profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if cuda else [])],
                # A second launching thread started before the profiler and would have no ranges.
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )

    def train_step(self, batches: Iterator[Any]) -> Tensor:
        """Runs a step of the pipeline, within a range named ITERATION once the profiler has settled."""
        step = self._step - self._starts
        self._step += 1
        if step == 0:
            self._clocks(-1)
        elif step == MEASURED:
            self._clocks(1)
            self._switch_on()
        if step < MEASURED + SETTLING:
            return self._pipeline.train_step(batches)
        with profiler.record_function(ITERATION):
            loss = self._pipeline.train_step(batches)
        if step == MEASURED + SETTLING + PROFILED - 1:
            self._synchronize()
            self._on.close()
        return loss

    def __getattr__(self, name: str) -> Any:
        """Returns the pipeline's attribute of this name: its other methods are not measured."""
        return getattr(self._pipeline, name)

    def profile(self) -> Profile:
        """Writes the traces and returns their analysis, mean over the ranks. Collective, after training."""
        wall_ms = self._wall_ms / MEASURED
        times = {"cpu_ms": self._cpu_ms / MEASURED, "launching_thread_ms": self._thread_ms / MEASURED}
        own = Profile(
            host={**times, "wall_ms": wall_ms},
            host_threads_ms={name: ms / MEASURED for name, ms in spent_ms(*self._threads).items()},
            gpu=None,
            stages_ms=None,
            host_stages_ms=None,
            timeline=None,
            kernels=None,
            gpu_of_ranks=None,
        )
        if self._profiler is not None:
            self._profiler.export_chrome_trace(str(self._trace))
            trace = summarize_trace(read_trace(self._trace))
            own["host"] |= trace.calls
            own["stages_ms"] = trace.gpu_stages_ms or trace.host_stages_ms
            own["host_stages_ms"], own["timeline"], own["kernels"] = trace.host_stages_ms, trace.timeline, trace.kernels
            if trace.gpu is not None:
                own["gpu"] = trace.gpu._asdict() | {"idle_fraction": trace.gpu.idle_fraction or 0.0}
        everyone: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(everyone, own)
        return mean_of_ranks(everyone)

    def _switch_on(self) -> None:
        if self._profiler is not None:
            self._on.enter_context(self._profiler)
        else:
            self._on.enter_context(torch.cuda.profiler.profile())  # for nsys with --capture-range cudaProfilerApi
            self._on.enter_context(torch.autograd.profiler.emit_nvtx())

    def _clocks(self, sign: int) -> None:
        """Adds (1) or subtracts (-1) the current times of the process, of this thread and of the wall clock.

        The host waits for the GPU before the first measured iteration; after the last one, the host's own time is read
        before it waits. Reading the other threads' times is not part of the measured time at either end.
        """
        if sign < 0:
            self._synchronize()
            self._threads.append(thread_times_ms())
        self._cpu_ms += sign * time.process_time() * 1000
        self._thread_ms += sign * time.thread_time() * 1000
        if sign > 0:
            self._threads.append(thread_times_ms())
        self._synchronize()
        self._wall_ms += sign * time.perf_counter() * 1000

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()


def mean_of_ranks(ranks: Sequence[Profile]) -> Profile:
    """Returns the mean of the ranks' profiles; kernels keep their extremes too.

    A kernel counts as zero on a rank that did not have it; times of a stage are means over the ranks that had it. The
    idle fraction is the largest of any rank: the others wait for that rank, in collectives that count as busy. The
    mean, and each rank's own fraction, are recorded too.
    """
    spans: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    kernels: defaultdict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for rank in ranks:
        for stage, span in (rank["timeline"] or {}).items():
            spans[stage].append(dict(span))  # type: ignore[arg-type]
        for kernel in rank["kernels"] or ():
            kernels[kernel["name"], kernel["stage"]].append(kernel)
    timeline = {stage: Span(**_mean(spans[stage])) for stage in STAGES if stage in spans}  # type: ignore[typeddict-item]
    merged = [_merged(same, len(ranks)) for same in kernels.values()]
    gpus = [rank["gpu"] for rank in ranks if rank["gpu"] is not None]
    gpu = _mean(gpus)
    if gpu is not None:
        gpu["mean_idle_fraction"] = gpu["idle_fraction"]
        gpu["idle_fraction"] = max(of_rank["idle_fraction"] for of_rank in gpus)
    blocks = ("host", "stages_ms", "host_stages_ms")
    return Profile(
        **{block: _mean([rank[block] for rank in ranks]) for block in blocks},  # type: ignore[typeddict-item,literal-required]
        host_threads_ms=_mean_by_name([rank["host_threads_ms"] for rank in ranks]),
        gpu=gpu,
        timeline=timeline or None,
        kernels=sorted(merged, key=lambda kernel: -kernel["us"]) or None,
        gpu_of_ranks=gpus or None,
    )


def _merged(same: Sequence[Kernel], ranks: int) -> Kernel:
    """Merges one kernel of several ranks; it counts as zero on ranks without it."""
    calls, us = (sum(kernel[field] for kernel in same) / ranks for field in ("calls", "us"))
    least = min(kernel["least_us"] for kernel in same) if len(same) == ranks else 0.0
    most = max(kernel["most_us"] for kernel in same)
    return Kernel(name=same[0]["name"], stage=same[0]["stage"], calls=calls, us=us, least_us=least, most_us=most)


def _mean_by_name(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the mean by name, largest first; a name counts as zero on a rank without it."""
    total: defaultdict[str, float] = defaultdict(float)
    for rank in ranks:
        for name, ms in rank.items():
            total[name] += ms / len(ranks)
    return dict(sorted(total.items(), key=lambda each: -each[1]))


def _mean(blocks: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    known = [block for block in blocks if block is not None]
    return {name: fmean(block[name] for block in known) for name in known[0]} if known else None
