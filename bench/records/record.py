"""The record of one run: a folder with run.json and iterations.npz, written once and never edited.

run.json holds program, machine, configuration and results; iterations.npz every iteration's latency on every rank and
its loss. run.json is written last: a folder without it is an unfinished run.
"""

import contextlib
import math
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_bench.bench.config import RunConfig, as_json
from dlrm_bench.bench.limits.efficiency import efficiency_of
from dlrm_bench.bench.records.json_file import check_form, json_text, read_json, whole_file, write_whole
from dlrm_bench.bench.records.schema import (
    READABLE_SCHEMAS,
    RECORD_SCHEMA,
    Checkpointing,
    Git,
    LatencySummary,
    Losses,
    Machine,
    Profile,
    Provenance,
    RunRecord,
    Telemetry,
    Training,
)
from dlrm_bench.bench.records.upgrade import check_readable, upgraded
from dlrm_bench.bench.stats.series import by_clock, drift_within, median_ci95, slowest_rank, summary_statistics
from dlrm_bench.dlrm.benchmark import SampleSizes

RUN_JSON = "run.json"
ITERATIONS_NPZ = "iterations.npz"
_RESERVE = ".reserved"
_ROOM_BYTES = 1 << 21  # run.json, profiles included, and the MLPerf log


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record as read from its folder."""

    folder: Path
    run: RunRecord
    iterations_ms: np.ndarray
    """float32 [ranks, iterations], milliseconds, warm-up included."""
    losses: np.ndarray
    """float32 [iterations]."""

    @property
    def latencies_ms(self) -> np.ndarray:
        """Latencies [n] of the iterations after the warm-up, each that of its slowest rank."""
        return slowest_rank(self.iterations_ms, self.run["warmup_iterations"])


def new_run_id(machine_short: str, preset: str, now: datetime) -> str:
    """Returns the name of a record folder, such as '20261121T004512Z-8xh200-launch-bound'; names sort by date (UTC)."""
    assert now.tzinfo is not None, "a time without its zone cannot be converted to UTC"
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{machine_short}-{preset}"


def create_run_folder(results_dir: Path, run_id: str) -> Path:
    """Creates results_dir/run_id, and results_dir if needed. ValueError if the folder exists or cannot be created."""
    folder = results_dir / run_id
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(
            f"{folder} exists and records are never overwritten: choose another --run-id, --results-dir or --out"
        ) from None
    except OSError as error:
        raise ValueError(f"{folder} cannot be created ({error.strerror}): choose another --results-dir") from error
    return folder


def reserve_room(folder: Path, iterations: int | None, ranks: int) -> None:
    """Reserves the disk space that the record may need, until `release_room`. ValueError if there is too little: the
    folder, which nothing was written to, is gone then."""
    room = _ROOM_BYTES + 4 * (ranks + 2) * (iterations or 0)
    try:
        with (folder / _RESERVE).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, room)
    except OSError as error:
        discard_run_folder(folder)
        raise ValueError(
            f"{folder} has no room for a record of {room / 1e6:.1f} MB ({error.strerror}): choose another --results-dir"
        ) from error


def release_room(folder: Path) -> None:
    """Frees the space of `reserve_room` for the record. Failures, for example of a folder that was made immutable or
    removed, are left to the writer of the record."""
    with contextlib.suppress(OSError):
        (folder / _RESERVE).unlink(missing_ok=True)


def discard_run_folder(folder: Path, *own: str) -> None:
    """Removes the folder of a run that never trained, with the files named in `own`; if it contains anything else, only
    its reserved space. Failures are left, as by `release_room`."""
    release_room(folder)
    with contextlib.suppress(OSError):
        if {file.name for file in folder.iterdir()} <= set(own):
            for name in own:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


def summarize_latency(iterations_ms: np.ndarray, warmup: int) -> LatencySummary:
    """Returns the summary of latencies [ranks, iterations], in milliseconds, without the first `warmup` iterations.

    ValueError if nothing is left. Interval and drift are those of bench/stats/series.py.
    """
    slowest = slowest_rank(iterations_ms, warmup)
    if not len(slowest):
        raise ValueError(
            f"--warmup-iterations {warmup} leaves none of the {iterations_ms.shape[1]} iterations to summarize"
        )
    metrics = summary_statistics(slowest)
    drift = drift_within(slowest)
    return LatencySummary(
        n=len(slowest),
        mean=metrics["mean"],
        by_clock=by_clock(iterations_ms, warmup),
        p50=metrics["p50"],
        p90=metrics["p90"],
        p99=metrics["p99"],
        ci95=median_ci95(slowest),
        drift=None if drift is None else drift.change,
        steady=None if drift is None else drift.steady,
    )


def build_record(
    *,
    run_id: str,
    created: datetime,
    command: str,
    git: Git,
    config: RunConfig,
    world_size: int,
    machine: Machine,
    iterations_ms: np.ndarray,
    training: Training | None,
    pipeline: dict[str, Any],
    peak_memory_bytes: Sequence[int] | None = None,
    telemetry: Telemetry | None = None,
    profile: Profile | None = None,
    provenance: Provenance | None = None,
    checkpoints: Checkpointing | None = None,
    warmup: int | None = None,
    sample_sizes: SampleSizes | None = None,
    start_s: dict[str, float] | None = None,
) -> RunRecord:
    """Assembles run.json.

    iterations_ms: float32 [ranks, iterations]. peak_memory_bytes: one number for each rank. profile: None for timed
    runs. warmup: number of iterations that are not timed; None for the configured number.
    """
    global_batch_size = config.local_batch_size * world_size
    warmup = config.warmup_iterations if warmup is None else warmup
    latency = summarize_latency(iterations_ms, warmup) if iterations_ms.shape[1] > warmup else None
    record = RunRecord(
        schema=RECORD_SCHEMA,
        id=run_id,
        created=created.astimezone(UTC).isoformat(timespec="seconds"),
        command=command,
        git=git,
        **({"provenance": provenance} if provenance else {}),  # type: ignore[typeddict-item]
        config={**as_json(config), "world_size": world_size, "global_batch_size": global_batch_size},
        pipeline=pipeline,
        machine=machine,
        warmup_iterations=warmup,
        latency_ms=latency,
        samples_per_second=global_batch_size / latency["by_clock"] * 1000 if latency else None,
        efficiency=None,
        memory_gb=None if peak_memory_bytes is None else {"peak_allocated": [b / 1e9 for b in peak_memory_bytes]},
        **(profile or dict.fromkeys(Profile.__annotations__)),  # type: ignore[typeddict-item]
        conditions=telemetry,
        sample_sizes=None if sample_sizes is None else dict(sample_sizes),
        checkpoints=checkpoints,
        start_s=start_s,
        training=training,
    )
    record["efficiency"] = efficiency_of(record)
    return record


def write_record(
    folder: Path,
    record: RunRecord,
    iterations_ms: np.ndarray,
    losses: np.ndarray | Sequence[float],
    before: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes iterations.npz and then, in one step, run.json into `folder`.

    iterations_ms: float32 [ranks, iterations], raw. losses: [iterations]. before: history_arrays of the checkpoint that
    a run resumed. ValueError if the folder holds a record already, or if the record contains a non-finite number.
    """
    path = folder / RUN_JSON
    if path.exists():
        raise ValueError(f"{path} exists and records are never edited: choose another --run-id or --results-dir")
    latency_ms, loss = iterations_ms.astype(np.float32), np.asarray(losses, dtype=np.float32)
    check_form(path, record, RunRecord, READABLE_SCHEMAS)
    _check_iterations(folder / ITERATIONS_NPZ, record, latency_ms, loss)
    text = json_text(record)
    write_iterations(folder, latency_ms, loss, before)
    write_whole(path, text)


def write_iterations(
    folder: Path,
    iterations_ms: np.ndarray,
    losses: np.ndarray | Sequence[float],
    before: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes iterations.npz alone, in one step, for a run that does not finish.

    iterations_ms: float32 [ranks, iterations], raw. losses: the known losses of the first of these iterations. before:
    history_arrays of the checkpoint that a run resumed.
    """
    latency_ms, loss = iterations_ms.astype(np.float32), np.asarray(losses, dtype=np.float32)
    with whole_file(folder / ITERATIONS_NPZ) as file:
        np.savez_compressed(file, allow_pickle=False, latency_ms=latency_ms, loss=loss, **(before or {}))


def read_record(folder: Path) -> Record:
    """Reads and checks the record in `folder`.

    ValueError, naming the file, if a file is missing, corrupt or of an unknown schema, if a field is missing, or if the
    summary disagrees with the raw times.
    """
    path = folder / RUN_JSON
    try:
        record = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {folder} is not the record of a finished run") from None
    check_form(path, record, RunRecord, READABLE_SCHEMAS)
    latency_ms, loss = _read_arrays(folder / ITERATIONS_NPZ)
    _check_iterations(folder / ITERATIONS_NPZ, record, latency_ms, loss)
    check_readable(path, record["config"], record["schema"])
    record["config"] = upgraded(record["config"], record["schema"])
    _set_by_clock(record, latency_ms)
    return Record(folder=folder, run=record, iterations_ms=latency_ms, losses=loss)


def _set_by_clock(record: RunRecord, iterations_ms: np.ndarray) -> None:
    """Sets the time by the clock and samples per second: older records lack the former, and compute the latter from the
    mean of the slowest ranks, which makes it smaller."""
    latency, samples = record["latency_ms"], record["config"].get("global_batch_size")
    if latency is not None:
        latency["by_clock"] = by_clock(iterations_ms, record["warmup_iterations"])
        if record["samples_per_second"] is not None and samples:
            record["samples_per_second"] = samples / latency["by_clock"] * 1000


def first_and_last(losses: Sequence[float]) -> Losses:
    """Returns the losses of the first and the last iteration, None if they are not finite."""
    ends = (losses[0], losses[-1]) if losses else (math.nan, math.nan)
    first, last = (loss if math.isfinite(loss) else None for loss in ends)
    return Losses(first=first, last=last)


def of_numpy(error: Exception) -> str:
    """Returns numpy's reason for not loading a file, without its advice to use allow_pickle=True, which runs code."""
    message = str(error)
    if "allow_pickle" not in message:
        return message
    return "its header is too long" if message.startswith("Header info") else "it holds Python objects, not numbers"


def _read_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays["latency_ms"], arrays["loss"]
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: restore it or leave the record out") from None
    except KeyError as error:
        raise ValueError(f"{path} lacks an array: {error.args[0]}") from error
    except (OSError, EOFError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is corrupt ({of_numpy(error)}): restore it or leave the record out") from error


def _check_iterations(path: Path, record: RunRecord, latency_ms: np.ndarray, loss: np.ndarray) -> None:
    """Checks the shapes of the raw times, and that they give the record's summary; ValueError names the file."""
    ranks = record["config"].get("world_size")
    if latency_ms.dtype != np.float32 or latency_ms.ndim != 2 or len(latency_ms) != ranks:
        raise ValueError(
            f"{path}: latency_ms is {latency_ms.dtype} {list(latency_ms.shape)}, expected float32 [{ranks}, iterations]"
        )
    if loss.dtype != np.float32 or loss.shape != latency_ms.shape[1:]:
        raise ValueError(f"{path}: loss is {loss.dtype} {list(loss.shape)}, expected float32 [{latency_ms.shape[1]}]")
    slowest = slowest_rank(latency_ms, record["warmup_iterations"])
    summary = record["latency_ms"]
    if summary is None or not len(slowest):
        if summary is not None or len(slowest):
            raise ValueError(f"{path} has {len(slowest)} iterations after the warm-up; {RUN_JSON} says otherwise")
        return
    written: Mapping[str, Any] = summary
    for name, value in (("n", len(slowest)), *summary_statistics(slowest).items()):
        # The sums of another numpy version may differ in the last bits. The interval is not recomputed: older versions
        # of the harness computed it differently.
        if not math.isclose(written[name], value, rel_tol=1e-9):
            raise ValueError(
                f"{path} disagrees with {RUN_JSON}: latency_ms.{name} is {value} by the raw times and "
                f"{written[name]} in the summary"
            )
