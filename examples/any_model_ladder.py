"""TorchRec models of several kinds, under TrainPipelineSparseDist and under FiveStagePipeline with each switch.

    python -m torch.distributed.run --nproc_per_node 2 examples/any_model_ladder.py --out ladder.json

Each row is one model and batch size under one schedule: milliseconds of an iteration (the slowest rank; the median of
some rounds), milliseconds of CPU time, and, from a profiled run of the same, kernel and graph launches, stream syncs
and the share of time in which the GPU had nothing to do. Losses are compared with stock's, from the same weights.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.distributed import TrainPipelineSparseDist
from workloads import WORKLOADS, build, stream

from dlrm_bench.bench.measure.trace import ITERATION, read_trace, summarize_trace
from dlrm_bench.hstu.config import PRESETS
from dlrm_bench.pipeline.five_stage import FiveStageOptions, FiveStagePipeline

WARM_UP, ROUNDS, PROFILED, COMPARED = 12, 5, 5, 10

OFF = FiveStageOptions(avoid_record_streams=False, pinned_d2h=False)
PINNED = FiveStageOptions()
GRAPH = FiveStageOptions(cuda_graph="dense")
RUNGS: dict[str, tuple[FiveStageOptions | None, bool]] = {
    "stock": (None, False),
    "five-stage": (OFF, False),
    "+ avoid_record_streams": (replace(OFF, avoid_record_streams=True), False),
    "+ pinned_d2h": (PINNED, False),
    "+ cuda_graph": (GRAPH, False),
    "+ trimmed": (GRAPH, True),
    "+ launch_threads": (replace(GRAPH, launch_threads=2), True),
}
"""Options, and whether collections are sharded by the trimming sharders; each with what the one before has."""
SHORT = ("stock", "+ pinned_d2h", "+ trimmed")
IN_FULL = ("two towers", "sequence, lengths vary", *PRESETS)


def slowest(value: float, device: torch.device) -> float:
    of_ranks = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(of_ranks, dist.ReduceOp.MAX)
    return float(of_ranks)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    name: str, rung: str, size: int, device: torch.device, iterations: int
) -> tuple[dict[str, Any], list[float]]:
    options, trimmed = RUNGS[rung]
    workload = WORKLOADS[name]
    model, optimizer = build(workload, size, device, trimmed)
    fixed = trimmed or (options is not None and options.cuda_graph != "none")
    data = stream(workload, workload.batches(size, dist.get_rank(), fixed))
    pipeline: Any = (
        TrainPipelineSparseDist(model, optimizer, device)
        if options is None
        else FiveStagePipeline(model, optimizer, device, options)
    )
    losses = [pipeline.progress(data) for _ in range(max(COMPARED, WARM_UP))]
    rounds, cpu = [], time.process_time()
    for _ in range(ROUNDS):
        wait(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(iterations):
            pipeline.progress(data)
        wait(device)
        rounds.append(1000 * (time.perf_counter() - start) / iterations)
    cpu = 1000 * (time.process_time() - cpu) / (ROUNDS * iterations)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiled:
        for _ in range(PROFILED):
            with record_function(ITERATION):
                pipeline.progress(data)
        wait(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        profiled.export_chrome_trace(str(path))
        summary = summarize_trace(read_trace(path))
    row = {
        "model": name,
        "batch": size,
        "schedule": rung,
        "ms": round(slowest(statistics.median(rounds), device), 4),
        "cpu_ms": round(slowest(cpu, device), 4),
        **{call: round(summary.calls[call], 1) for call in ("kernel_launches", "graph_launches", "stream_syncs")},
        "d2h_copies": round(summary.calls["d2h_copies"], 1),
        "gpu_busy_ms": None if summary.gpu_busy_ms is None else round(summary.gpu_busy_ms, 4),
        "switched_off": getattr(pipeline, "switched_off", {}),
    }
    if row["gpu_busy_ms"] is not None:
        row["gpu_idle"] = round(max(0.0, 1 - row["gpu_busy_ms"] / row["ms"]), 3)
    if hasattr(pipeline, "close"):
        pipeline.close()
    return row, [float(loss[0] if isinstance(loss, tuple) else loss) for loss in losses[:COMPARED]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 4096], help="samples of a rank")
    parser.add_argument("--iterations", type=int, default=20, help="of each of the rounds")
    parser.add_argument("--seconds", type=float, default=600, help="start nothing new after so many")
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.backends.cuda.matmul.allow_tf32 = False
    begin, rows = time.perf_counter(), []
    for name in arguments.models:
        for size in arguments.batch:
            stock: list[float] = []
            for rung in RUNGS if name in IN_FULL else SHORT:
                if slowest(time.perf_counter() - begin, device) > arguments.seconds:
                    continue
                row, losses = measure(name, rung, size, device, arguments.iterations)
                stock = stock or losses
                row["loss_difference"] = max(abs(a - b) / abs(b) for a, b in zip(losses, stock, strict=True))
                rows.append(row)
                if dist.get_rank() == 0:
                    print({k: v for k, v in row.items() if v not in ({}, None)}, flush=True)
                    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
