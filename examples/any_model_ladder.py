"""TorchRec models of several kinds, under TrainPipelineSparseDist and under FiveStagePipeline with each switch.

    PYTHONPATH=. torchrun --nproc_per_node 2 examples/any_model_ladder.py --out ladder.json
    PYTHONPATH=. torchrun --nproc_per_node 2 examples/any_model_ladder.py --out hstu.json --models hstu-small

Each row is one model and batch size under one schedule: milliseconds of an iteration (the slowest rank; the median of
some rounds), milliseconds of CPU time, and, from a profiled run of the same, kernel and graph launches, stream syncs,
copies to the host, and the time in which the GPU computed; it is idle for the rest of an iteration. Collectives do not
count there: they take as long as they wait for another rank, which the profiler delays. Losses are compared with
stock's, from the same weights; where a graph has room for more tokens than a batch has, layers compute in bf16, or one
row of a table is named more than 1024 times, they are alike and not equal. hstu-small needs 44 GiB on each of two GPUs
at 32 samples, and most of 140 at 256; hstu-tiny trains on CPUs too.
"""

import argparse
import gc
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.distributed import TrainPipelineSparseDist
from workloads import DISTINCT, WORKLOADS, Sharders, build, stream

from dlrm_bench.bench.doctor.trace import ITERATION, read_trace
from dlrm_bench.bench.machine.description import describe_machine
from dlrm_bench.bench.profile.trace import summarize_trace
from dlrm_bench.pipeline.five_stage import FiveStageOptions, FiveStagePipeline

WARM_UP, PROFILED, COMPARED = 2 * DISTINCT + 2, 3, 10  # graphs of all forms are captured in the second turn

OFF = FiveStageOptions(avoid_record_streams=False, pinned_d2h=False)
PINNED = FiveStageOptions()
GRAPH = FiveStageOptions(cuda_graph="dense")
RUNGS: dict[str, tuple[FiveStageOptions | None, Sharders]] = {
    "stock": (None, "TorchRec's"),
    "five-stage": (OFF, "TorchRec's"),
    "+ avoid_record_streams": (replace(OFF, avoid_record_streams=True), "TorchRec's"),
    "+ pinned_d2h": (PINNED, "TorchRec's"),
    "+ cuda_graph": (GRAPH, "TorchRec's"),
    "+ trimmed": (GRAPH, "trimming"),
    "+ graphs of dists": (GRAPH, "trimming, graphs"),
    "+ launch_threads": (replace(GRAPH, launch_threads=2), "trimming, graphs"),
}
"""Each with what the one before has."""
SWITCHES = {"+ graphs of dists": "cuda_graph"} | {f"+ {name}": name for name in FiveStageOptions.__dataclass_fields__}
"""The option that a rung switches on, by which the pipeline says what is off."""
FIRST = ("stock", "+ pinned_d2h", "+ cuda_graph", "+ trimmed", "+ graphs of dists")
"""Measured on all models and sizes before the others are."""


def slowest(value: float, device: torch.device) -> float:
    of_ranks = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(of_ranks, dist.ReduceOp.MAX)
    return float(of_ranks)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    name: str, rung: str, size: int, device: torch.device, iterations: int, rounds: int
) -> tuple[dict[str, Any], list[float]]:
    options, sharders = RUNGS[rung]
    workload = WORKLOADS[name]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, optimizer = build(workload, size, device, sharders)
    fixed = options is not None and options.cuda_graph != "none"
    data = stream(workload, workload.batches(size, dist.get_rank(), fixed))
    pipeline: Any = (
        TrainPipelineSparseDist(model, optimizer, device)
        if options is None
        else FiveStagePipeline(model, optimizer, device, options)
    )
    losses = [pipeline.progress(data) for _ in range(max(COMPARED, WARM_UP))]
    of_rounds, cpu = [], time.process_time()
    for _ in range(rounds):
        wait(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(iterations):
            pipeline.progress(data)
        wait(device)
        of_rounds.append(1000 * (time.perf_counter() - start) / iterations)
    cpu = 1000 * (time.process_time() - cpu) / (rounds * iterations)
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
        "ms": round(slowest(statistics.median(of_rounds), device), 4),
        "cpu_ms": round(slowest(cpu, device), 4),
        **{call: round(summary.calls[call], 1) for call in ("kernel_launches", "graph_launches", "stream_syncs")},
        "d2h_copies": round(summary.calls["d2h_copies"], 1),
        "gpu_busy_ms": None if summary.gpu_busy_ms is None else round(summary.gpu_busy_ms, 4),
        "gpu_computing_ms": None if summary.gpu_computing_ms is None else round(summary.gpu_computing_ms, 4),
        "host_stages_ms": {stage: round(ms, 3) for stage, ms in summary.host_stages_ms.items()},
        "gpu_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
        "switched_off": getattr(pipeline, "switched_off", {}),
    }
    if hasattr(pipeline, "close"):
        pipeline.close()
    return row, [float(loss[0] if isinstance(loss, tuple) else loss) for loss in losses[:COMPARED]]


def table(runs: list[list[dict[str, Any]]]) -> str:
    """Returns the rows of all runs in Markdown; ratios are within a run."""
    lines = [
        "| model | samples a rank | schedule | ms | stock's over it | CPU, ms | launches + graphs, syncs, D2H "
        "| GPU computing, ms | GPU idle | GPU memory, GiB | loss against stock's |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [(run, row) for run, of_run in enumerate(runs) for row in of_run]
    of_stock = {(run, row["model"], row["batch"]): row["ms"] for run, row in rows if row["schedule"] == "stock"}
    models, rungs = list(dict.fromkeys(row["model"] for _, row in rows)), list(RUNGS)
    rows.sort(key=lambda of: (models.index(of[1]["model"]), of[1]["batch"], of[0], rungs.index(of[1]["schedule"])))
    for run, row in rows:
        ratio = of_stock.get((run, row["model"], row["batch"]), float("nan")) / row["ms"]
        off = SWITCHES.get(row["schedule"]) in row["switched_off"]  # so that it is the rung before
        calls = (
            f"{row['kernel_launches']:g} + {row['graph_launches']:g}, {row['stream_syncs']:g}, {row['d2h_copies']:g}"
        )
        gpu = ("", "", "")
        if row["gpu_computing_ms"] is not None:
            idle = max(0.0, 1 - row["gpu_computing_ms"] / row["ms"])
            gpu = f"{row['gpu_computing_ms']:.2f}", f"{idle:.0%}", f"{row['gpu_memory_gib']:.1f}"
        loss = "equal" if row["loss_difference"] == 0 else f"{row['loss_difference']:.0e}"
        times = f"{row['ms']:.2f}", "off" if off else f"{ratio:.2f}", f"{row['cpu_ms']:.2f}"
        cells = row["model"], row["batch"], row["schedule"], *times, calls, *gpu, loss
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def in_order(models: list[str], batch: list[int] | None, schedules: list[str]) -> list[tuple[str, int, str]]:
    """Returns (model, samples of a rank, schedule): small batches of all models first, and FIRST before all else."""
    of_models = [[(name, size) for size in batch or WORKLOADS[name].sizes] for name in models]
    sizes = [one for of_size in zip_longest(*of_models) for one in of_size if one is not None]
    parts = [[rung for rung in schedules if (rung in FIRST) == first] for first in (True, False)]
    return [(name, size, rung) for part in parts for name, size in sizes for rung in part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="a file for the rows; OUT.md has them as a table")
    what.add_argument("--page", type=Path, nargs="+", help="such files of earlier runs, to print as one table")
    parser.add_argument(
        "--batch", type=int, nargs="+", help="samples of a rank, in the place of each model's own sizes"
    )
    parser.add_argument("--schedules", nargs="+", choices=list(RUNGS), default=list(RUNGS), help="those to measure")
    parser.add_argument("--iterations", type=int, default=20, help="of each round")
    parser.add_argument("--rounds", type=int, default=5, help="whose median is given")
    parser.add_argument("--seconds", type=float, default=600, help="start nothing new after so many")
    cuda = torch.cuda.is_available()
    fitting = [name for name in WORKLOADS if name != ("hstu-tiny" if cuda else "hstu-small")]
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=fitting)
    arguments = parser.parse_args()
    if arguments.page:
        print(table([json.loads(path.read_text())["rows"] for path in arguments.page]))
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.backends.cuda.matmul.allow_tf32 = False
    begin, rows = time.perf_counter(), list[dict[str, Any]]()
    record = {"command": shlex.join(sys.argv), "commit": os.environ.get("SOURCE_COMMIT"), "rows": rows}
    record["machine"] = describe_machine()
    of_stock: dict[tuple[str, int], list[float]] = {}
    for name, size, rung in in_order(arguments.models, arguments.batch, arguments.schedules):
        if slowest(time.perf_counter() - begin, device) > arguments.seconds:
            break
        row, losses = measure(name, rung, size, device, arguments.iterations, arguments.rounds)
        gc.collect()  # models are in cycles, and two of the largest do not fit beside each other
        if cuda:
            torch.cuda.empty_cache()
        stock = of_stock.setdefault((name, size), losses)
        row["loss_difference"] = max(abs(a - b) / abs(b) for a, b in zip(losses, stock, strict=True))
        rows.append(row)
        if dist.get_rank() == 0:
            print({k: v for k, v in row.items() if v not in ({}, None)}, flush=True)
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
            arguments.out.with_suffix(".md").write_text(table([rows]) + "\n")
    if dist.get_rank() == 0:
        print(table([rows]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
