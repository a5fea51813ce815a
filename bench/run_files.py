"""Files of a run: its folder, and at the end its record, or the measurements until a failure, even if the folder is
gone."""

import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from dlrm_bench.bench.checkpoints.restarts import restarted
from dlrm_bench.bench.checkpoints.saved_state import history_arrays
from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.instruments.beginning import BEGINNING
from dlrm_bench.bench.instruments.losses import NonFiniteError
from dlrm_bench.bench.machine.description import short_name
from dlrm_bench.bench.machine.provenance import provenance
from dlrm_bench.bench.mlperf.log import MLPerfLog
from dlrm_bench.bench.records.record import (
    ITERATIONS_NPZ,
    RUN_JSON,
    build_record,
    create_run_folder,
    discard_run_folder,
    first_and_last,
    new_run_id,
    release_room,
    reserve_room,
    write_iterations,
    write_record,
)
from dlrm_bench.bench.records.schema import Evaluations, Git, Machine, Profile, RunRecord, Telemetry, Training
from dlrm_bench.dlrm.benchmark import SampleSizes
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.runtime.ranks import Ranks

if TYPE_CHECKING:
    from dlrm_bench.bench.run import Run

LOG_NAME = "result_0.txt"
_PATIENCE_S = 5
"""Seconds to wait for a disk, less than the 30 after which torchrun kills its ranks."""
_TURN_S = 4
"""Seconds of these in which a thread that ends the run waits for the run's own thread to finish its record."""
_WRITING = threading.Lock()
"""Held by the thread that writes the measurements of this process's run, of which there is one at a time."""


def agree_on_folder(config: RunConfig, ranks: Ranks, machine: Machine) -> Path:
    """Creates the record folder on global rank 0; every rank learns its path, or raises rank 0's error."""
    answer: list[Any] = [None]
    if ranks.rank == 0:
        run_id = restarted(config.run_id) or new_run_id(short_name(machine), config.preset, datetime.now(UTC))
        try:
            answer = [create_run_folder(config.results_dir, run_id)]
            reserve_room(answer[0], config.iterations, ranks.world_size)
        except ValueError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ValueError):
        raise answer[0]
    return answer[0]


def keep_figures(this: "Run", error: NonFiniteError) -> str:
    """Writes the measurements of a run that failed; returns a sentence that names the files. Collective."""
    this.clock.pause()
    write = _figures(this, this.clock.gather_ms(), error.known)
    kept = f"losses and latencies so far are in {_write_somewhere(this, write) / ITERATIONS_NPZ}"
    good = error.whole
    if this.checkpoints.saves and good is not None and good > this.first:
        try:
            if good != this.checkpoints.iteration:  # that one has these weights
                this.checkpoints.wait()
                this.save(good, error.known[: good - this.first])
            this.checkpoints.wait()
            kept += f", these weights in {this.config.checkpoint.path}"
        except ValueError as failure:
            kept += f"; {failure}"
    return kept


@contextlib.contextmanager
def named_checkpoints(this: "Run") -> Iterator[None]:
    """Adds the checkpoint's path to an error while writing a checkpoint, unless it has that or the snapshots' path: the
    error of a full disk lacks it."""
    try:
        yield
    except (OSError, ValueError) as error:
        paths = (this.config.checkpoint.path, this.config.snapshot.folder)
        if any(path is not None and str(path) in str(error) for path in paths):
            raise
        raise ValueError(f"--checkpoint.path {this.config.checkpoint.path}: {error}") from error


def keep_own_figures(this: "Run") -> None:
    """Writes rank 0's measurements of a run that ends at once, by a signal or an error; prints their path.

    For any thread, while others may be blocked in a collective or by the device: nothing here waits for them, so the
    latencies are those of rank 0 alone, and the losses those read until then. A disk that does not answer delays the
    end by seconds only.
    """
    if this.ranks.rank == 0:
        _within_seconds(lambda: _keep_own(this))


def discard_folder(folder: Path, log: MLPerfLog) -> None:
    """Removes the folder of a run that ends before its training, on rank 0, once the log is closed; for any thread.

    The log then describes the configuration alone. A folder with other files, or a log that was changed, stays.
    """
    if log.writes:
        _within_seconds(lambda: discard_run_folder(folder, *_own_log(folder, log)))


def _own_log(folder: Path, log: MLPerfLog) -> list[str]:
    """Returns the name of the log's file, if the file holds nothing but this run's lines."""
    content = _content(folder / LOG_NAME)
    return [LOG_NAME] if content is not None and log.text.startswith(content) else []


def _within_seconds(work: Callable[[], None]) -> None:
    """Runs `work` on a thread, and waits for its end for _PATIENCE_S at most."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)


def _keep_own(this: "Run") -> None:
    release_room(this.folder)
    iterations_ms = this.clock.so_far_ms()[None]
    if not _WRITING.acquire(timeout=_TURN_S):
        print(f"warning: the files of {this.folder} are still being written", file=sys.stderr, flush=True)
        return
    try:
        if this.place is None and iterations_ms.size:
            folder = _write_alone(this, _figures(this, iterations_ms, this.losses.known))
            if (folder / ITERATIONS_NPZ).is_file():
                text = f"rank 0: its latencies so far, and the losses that were read, are in {folder / ITERATIONS_NPZ}"
                print(text, file=sys.stderr, flush=True)
    finally:
        _WRITING.release()
    restore_log(this)


def restore_log(this: "Run") -> None:
    """Writes the MLPerf log again, on rank 0 once the log is closed, if its file lacks lines; prints its path and the
    reason."""
    folder = this.place or this.folder
    content = _content(folder / LOG_NAME)
    if this.ranks.rank != 0 or content == this.log.text:
        return
    try:
        if folder != this.folder:  # which has the log as of the writing of the figures
            (folder / LOG_NAME).write_text(this.log.text, encoding="utf-8")
            return
        if content is None:
            why = "was deleted during the run"
        else:  # changed by somebody, and left alone, or cut short by a full disk
            why = f"lacks lines ({this.log.failure})" if this.log.failure else "was changed during the run"
            folder = _temporary_folder(this)
        (folder / LOG_NAME).write_text(this.log.text, encoding="utf-8")
        text = f"{this.folder / LOG_NAME} {why}: the run's log is in {folder / LOG_NAME}"
        print(f"warning: {text}", file=sys.stderr, flush=True)
    except OSError as error:
        _rescued(this, lambda _: None, error)


def write_results(
    this: "Run",
    machine: Machine,
    source: Git,
    command: str,
    iterations_ms: np.ndarray,
    losses: list[float],
    warmup: int,
    telemetry: Telemetry,
    profile: Profile | None,
) -> tuple[Path, RunRecord]:
    """Returns the record, which global rank 0 writes, and its folder; on other ranks, the record of their own
    provenance. Collective.

    iterations_ms: float32 [ranks, iterations]. losses: of the same iterations. warmup: number of iterations that are
    not timed.
    """
    config, ranks = this.config, this.ranks
    metrics = {} if this.metrics is None else this.metrics.finish()
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
        training=_training(this, losses),
        pipeline=this.pipeline.describe(),
        peak_memory_bytes=_peak_memory(ranks),
        telemetry=telemetry,
        profile=profile,
        checkpoints=this.checkpoints.describe(),
        warmup=warmup,
        sample_sizes=_sample_sizes(this, warmup) if ranks.rank == 0 else None,
        start_s=dict(BEGINNING.seconds),
    )

    def write(folder: Path) -> None:
        arrays = history_arrays(this.losses_before) | metrics
        write_record(folder, record, iterations_ms, losses, arrays)

    folder = _write_somewhere(this, write)
    restore_log(this)
    return folder, record


def _training(this: "Run", losses: list[float]) -> Training:
    training = Training(
        losses=first_and_last(losses),
        auc=this.auc,
        target=this.config.target_auc,
        best_auc=this.dataset.best_auc,
        epoch_num=this.epoch_num,
        status=this.status,
    )
    if this.metrics is not None:
        training["train_metrics"] = this.metrics.last
    if this.log.evaluation_s:
        seconds = [round(each, 6) for each in this.log.evaluation_s]
        batches = this.evaluated // len(seconds)  # padded to all samples, or without those that fill no global batch
        samples = min(this.dataset.eval_samples, batches * this.schedule.global_batch_size)
        training["evaluations"] = Evaluations(samples=samples, seconds=seconds)
    return training


def _sample_sizes(this: "Run", warmup: int) -> SampleSizes | None:
    """Returns the sizes of the samples of this run's timed iterations, or of all if none were; None if work depends on
    no sizes."""
    measure = named(this.config.benchmark).sample_sizes
    if measure is None:
        return None
    trained = range(this.first, this.first + this.clock.iterations)
    timed = trained[warmup:]
    return measure(this.dataset, this.config, this.ranks.world_size, timed or trained) if trained else None


def _write_somewhere(this: "Run", write: Callable[[Path], None]) -> Path:
    """Makes rank 0 write to the run's folder, or else to a temporary one; returns the folder. Collective.

    The MLPerf log is written there too, if its own file lacks lines.
    """
    place: list[Any] = [_write_here(this, write) if this.ranks.rank == 0 else None]
    dist.broadcast_object_list(place, src=0)
    return Path(place[0])


def _write_here(this: "Run", write: Callable[[Path], None]) -> Path:
    """Does the work of _write_somewhere on rank 0."""
    # A signal ends the run on another thread, which would write the figures of rank 0 over those of all ranks.
    with _WRITING:
        return _write_alone(this, write)


def _write_alone(this: "Run", write: Callable[[Path], None]) -> Path:
    """Does the work of _write_here for a thread that holds _WRITING."""
    release_room(this.folder)
    try:
        write(this.folder)
        if this.log.failure is not None:
            raise this.log.failure
        this.place = this.folder
    except OSError as error:
        this.place = _rescued(this, write, error)
    return this.place


def _figures(this: "Run", iterations_ms: np.ndarray, losses: Sequence[float]) -> Callable[[Path], None]:
    """Returns the function that writes iterations.npz of an unfinished run into a folder; see write_iterations."""
    return lambda folder: write_iterations(folder, iterations_ms, losses, history_arrays(this.losses_before))


def _content(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _temporary_folder(this: "Run") -> Path:
    folder = Path(tempfile.mkdtemp(prefix="dlrm-bench-")) / this.folder.name
    folder.mkdir()
    return folder


def _rescued(this: "Run", write: Callable[[Path], None], error: OSError) -> Path:
    try:
        folder = _temporary_folder(this)
        write(folder)
        (folder / LOG_NAME).write_text(this.log.text, encoding="utf-8")
    except OSError as again:
        print(f"warning: the record cannot be written: {error}; nor elsewhere: {again}", file=sys.stderr, flush=True)
        return this.folder
    what = "the record" if (folder / RUN_JSON).exists() else "what the run left"
    print(f"warning: {error}: {what} is in {folder} instead", file=sys.stderr, flush=True)
    return folder


def _peak_memory(ranks: Ranks) -> list[int] | None:
    """Returns the peak memory that PyTorch's allocator gave out on each rank's GPU, in bytes; without peer memory."""
    if ranks.device.type != "cuda":
        return None
    peaks = [0] * ranks.world_size
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated())
    return peaks
