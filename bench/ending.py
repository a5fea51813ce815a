"""What a run leaves when it ends: its record, or what it measured until then, whatever has become of its folder."""

import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlrm_bench.bench.measure.losses import NonFiniteLossError
from dlrm_bench.bench.measure.provenance import provenance
from dlrm_bench.bench.records.record import (
    ITERATIONS_NPZ,
    TrainingOutcome,
    build_record,
    release_room,
    write_iterations,
    write_record,
)
from dlrm_bench.bench.records.schema import Git, Machine, Profile, RunRecord, Telemetry
from dlrm_bench.bench.saved_state import history_arrays
from dlrm_bench.dlrm.ranks import Ranks

if TYPE_CHECKING:
    from dlrm_bench.bench.run import Run

LOG_NAME = "result_0.txt"


def keep_figures(this: "Run", error: NonFiniteLossError) -> str:
    """Keeps what a run has measured that cannot go on; returns where. Collective."""
    this.clock.pause()
    iterations_ms = this.clock.gather_ms()

    def write(folder: Path) -> None:
        write_iterations(folder, iterations_ms, error.known, history_arrays(this.losses_before))

    kept = f"losses and latencies so far are in {_write_somewhere(this, write) / ITERATIONS_NPZ}"
    good = error.iteration - 1
    if this.checkpoints.saves and good > this.first:
        try:
            if good != this.checkpoints.iteration:  # that one has these weights
                this.save(good, error.known[: good - this.first])
            this.checkpoints.wait()
            kept += f", these weights in {this.config.checkpoint.path}"
        except ValueError as failure:
            kept += f"; {failure}"
    return kept


def write_results(
    this: "Run",
    machine: Machine,
    source: Git,
    command: str,
    losses: list[float],
    telemetry: Telemetry,
    profile: Profile | None,
) -> tuple[Path, RunRecord]:
    """The record, which global rank 0 writes, and its folder; on the others, what else they depend on is theirs.
    Collective."""
    config, ranks = this.config, this.ranks
    iterations_ms = this.clock.gather_ms()
    created: list[Any] = [datetime.now(UTC)]
    dist.broadcast_object_list(created, src=0)
    record = build_record(
        run_id=this.folder.name,
        created=created[0],
        command=command,
        git=source,
        provenance=provenance() if ranks.rank == 0 else None,
        config=config,
        world_size=ranks.world_size,
        machine=machine,
        iterations_ms=iterations_ms,
        losses=losses,
        training=TrainingOutcome(
            status=this.status,
            epoch_num=this.epoch_num,
            auc=this.auc,
            target=config.target_auc,
            best_auc=this.dataset.best_auc,
        ),
        pipeline=this.pipeline.describe(),
        peak_memory_bytes=_peak_memory(ranks),
        telemetry=telemetry,
        profile=profile,
        checkpoints=this.checkpoints.describe(),
    )

    def write(folder: Path) -> None:
        write_record(folder, record, iterations_ms, losses, history_arrays(this.losses_before))

    return _write_somewhere(this, write), record


def _write_somewhere(this: "Run", write: Callable[[Path], None]) -> Path:
    """Lets rank 0 write to the run's folder, or else to one among the temporary files, and returns which. Collective.

    The MLPerf log goes along, as far as its own file does not have it.
    """
    place: list[Any] = [this.folder]
    if this.ranks.rank == 0:
        release_room(this.folder)
        try:
            write(this.folder)
            if this.log.failure is not None:
                raise this.log.failure
        except OSError as error:
            place = [_rescued(this, write, error)]
    dist.broadcast_object_list(place, src=0)
    return Path(place[0])


def _rescued(this: "Run", write: Callable[[Path], None], error: OSError) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="dlrm-bench-")) / this.folder.name
        folder.mkdir()
        write(folder)
        (folder / LOG_NAME).write_text(this.log.text, encoding="utf-8")
    except OSError as again:
        print(f"warning: the record cannot be written: {error}; nor elsewhere: {again}", file=sys.stderr, flush=True)
        return this.folder
    print(f"warning: {error}: the record is in {folder} instead", file=sys.stderr, flush=True)
    return folder


def _peak_memory(ranks: Ranks) -> list[int] | None:
    """Largest amount that PyTorch's allocator gave out on each rank's GPU, in bytes; without peer memory."""
    if ranks.device.type != "cuda":
        return None
    peaks = [0] * ranks.world_size
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated())
    return peaks
