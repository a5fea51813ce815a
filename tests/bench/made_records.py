"""Records of runs that never ran, around recorded latencies, for tests of what reads records."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.machine.description import describe_machine
from dlrm_bench.bench.presets import preset
from dlrm_bench.bench.profile.kernel_names import OTHER, STAGES
from dlrm_bench.bench.profile.tables import COUNTS
from dlrm_bench.bench.records.record import RUN_JSON, build_record, first_and_last, write_record
from dlrm_bench.bench.records.schema import Git, Kernel, Machine, Profile, Provenance, Span, Telemetry, Training
from tests.pipelines import changed

SERIES = Path(__file__).resolve().parents[1] / "data" / "series" / "cpu_smoke.npz"
WARMUP = 10
BEGIN = datetime(2026, 11, 21, tzinfo=UTC)
H200: Machine = {
    **describe_machine(),
    "gpus": 8,
    "gpu": "NVIDIA H200",
    "gpu_uuids": [f"uuid-{i}" for i in range(8)],
    "driver": "580.1",
    "power_limit_w": 700.0,
    "sm_clock_mhz": 1980,
    "sm_clock_max_mhz": 1980,
}
PROVENANCE: Provenance = {
    "packages": {"torch": "2.11.0"},
    "environment": {"OMP_NUM_THREADS": "1"},
    "started_by": {"launcher": "torchrun", "command": ["torchrun"], "local_world_size": 2},
}


def recorded_runs() -> list[np.ndarray]:
    """Recorded latencies of 24 runs of the same thing, ms, [250] each."""
    with np.load(SERIES) as runs:
        return [runs[name] for name in sorted(runs)]


def write(
    folder: Path,
    latencies: np.ndarray,
    *,
    minute: int = 0,
    config: RunConfig | None = None,
    world_size: int = 2,
    **changes: Any,
) -> Path:
    """A record, in `folder`, of a run that ended `minute` minutes after BEGIN; its warm-up is made up."""
    folder.mkdir(parents=True)
    slowest = np.concatenate([np.full(WARMUP, 50, np.float32), latencies.astype(np.float32)])
    ms = np.stack([slowest, *[slowest * 0.9] * (world_size - 1)]).astype(np.float32)
    losses = np.linspace(0.7, 0.6, ms.shape[1])
    known: dict[str, Any] = {
        "run_id": folder.name,
        "created": BEGIN + timedelta(minutes=minute),
        "command": f"torchrun --nproc_per_node={world_size} launch/dlrm.py --preset launch-bound --seed 0",
        "git": Git(commit="0123abc", dirty=False, source="456def"),
        "provenance": PROVENANCE,
        "config": config or configured(),
        "world_size": world_size,
        "machine": H200,
        "training": trained(losses),
        "pipeline": {},
        "telemetry": telemetry(),
    }
    write_record(folder, build_record(**known | changes, iterations_ms=ms), ms, losses)
    return folder


def trained(losses: Sequence[float] | np.ndarray = (0.7, 0.6), **changes: Any) -> Training:
    """The outcome of a training without a target."""
    made = Training(
        losses=first_and_last(list(losses)), auc=None, target=None, best_auc=None, epoch_num=0.0, status="no_target"
    )
    return {**made, **changes}  # type: ignore[typeddict-item]


def configured(**changes: Any) -> RunConfig:
    """launch-bound with a short warm-up."""
    return changed(preset("launch-bound"), **{"warmup_iterations": WARMUP} | changes)


def telemetry(throttled: bool = False, clock: float = 1980) -> Telemetry:
    """Returns made answers of NVML and of the garbage collector."""
    span = {"rank": 0, "reason": "power cap", "first_iteration": 20, "last_iteration": 60}
    return Telemetry(
        interval_s=0.5,
        samples=10,
        sm_clock_mhz=[clock - 30, clock, clock],
        temperature_c=[40, 50, 55],
        power_w=[300, 500, 700],
        throttled=throttled,
        throttling=[span] if throttled else [],  # type: ignore[list-item]
        gc_iterations=[],
    )


def profile() -> Profile:
    """Returns a made profile of a run on a GPU."""
    stages = dict.fromkeys((*STAGES, OTHER), 1.5)
    host = ("cpu_ms", "launching_thread_ms", "wall_ms", *COUNTS)
    spans = [Span(start_ms=0.25 * i, end_ms=0.25 * i + 0.5, busy_ms=0.4) for i in range(len(STAGES))]
    return Profile(
        host=dict.fromkeys(host, 12.0),
        host_threads_ms={"batch-reader": 0.02, "idle": 0.0001},
        gpu={"busy_ms": 1.5, "idle_fraction": 0.875},
        stages_ms=stages,
        host_stages_ms=stages,
        timeline=dict(zip(STAGES, spans, strict=True)),
        kernels=[
            kernel("GEMM (nvjet)", "dense_forward_backward", 2000, calls=20),
            kernel("split_embedding_backward_adagrad_cta_per_row_1", "embedding_backward", 900),
            kernel("NCCL SendRecv", "embedding_forward", 800, least=400, most=1200),
            kernel("GEMM (cutlass)", "dense_forward_backward", 500, calls=10),
            *(kernel(f"element-wise {i}", OTHER, 100 - i) for i in range(10)),
        ],
        gpu_of_ranks=None,
    )


def kernel(name: str, stage: str, us: float, *, calls: float = 1, least: float = 0, most: float = 0) -> Kernel:
    """Returns a kernel of `us` microseconds in all."""
    return Kernel(name=name, stage=stage, calls=calls, us=us, least_us=least or us, most_us=most or us)


def edit(folder: Path, **changes: Any) -> None:
    """Changes top-level fields of run.json."""
    path = folder / RUN_JSON
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
