"""Records of timings from any program, made from plain times, for `dlrm-bench compare` and `dlrm-bench report`.

    from dlrm_bench.bench.records.own_timings import write_timings
    write_timings(Path("mine/run-0"), milliseconds, name="my trainer", samples=4096)

Write one record per run, and make several runs per side in the order A B B A: otherwise nothing can be proven.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np

from dlrm_bench.bench.records.record import (
    ITERATIONS_NPZ,
    create_run_folder,
    discard_run_folder,
    of_numpy,
    summarize_latency,
    write_record,
)
from dlrm_bench.bench.records.schema import RECORD_SCHEMA, Git, Machine, RunRecord

PRESET = "own"
"""The preset in the configuration of such a record, which is none of the harness's presets."""
UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_COUNTS = ("step", "steps", "iteration", "iter", "index", "epoch")
"""Names of columns that count iterations."""


def write_timings(
    folder: Path,
    times_ms: np.ndarray,
    *,
    name: str,
    samples: int,
    warmup: int = 0,
    finished: datetime | None = None,
    losses: np.ndarray | None = None,
    machine: Mapping[str, Any] | None = None,
    commit: str | None = None,
    command: str = "",
) -> RunRecord:
    """Writes the record of one run and returns it.

    folder: must not exist. times_ms: milliseconds of every iteration, [iterations] or [ranks, iterations], warm-up
    included and nothing left out. name: the program's, equal for all runs of a side. samples: number of samples per
    iteration, over all ranks. warmup: number of first iterations that all figures leave out. finished: time at which
    the run ended, by default now; compare pairs runs by it. losses: [iterations]. machine: known fields of Machine,
    such as gpus, gpu, hosts. ValueError names the argument that cannot be used.
    """
    times = np.atleast_2d(np.asarray(times_ms, dtype=np.float32))
    if times.ndim != 2 or times.shape[1] <= warmup:
        raise ValueError(f"times are {list(np.shape(times_ms))} and the warm-up {warmup}: nothing is left to compare")
    bad = np.argwhere(~(np.isfinite(times) & (times > 0)))
    if len(bad):
        rank, iteration = bad[0]
        raise ValueError(
            f"iteration {iteration} of rank {rank} took {times[rank, iteration]} ms: times must be positive and finite"
        )
    if samples < 1 or warmup < 0:
        raise ValueError(f"samples ({samples}) must be positive, and the warm-up ({warmup}) not negative")
    loss = np.full(times.shape[1], np.nan, np.float32) if losses is None else np.asarray(losses, dtype=np.float32)
    if loss.shape != times.shape[1:]:
        raise ValueError(
            f"losses are {list(loss.shape)} of {times.shape[1]} iterations: give a loss for each, or leave them out"
        )
    described = _machine(machine or {})
    ended = (finished or datetime.now(UTC)).astimezone(UTC)
    latency = summarize_latency(times, warmup)
    create_run_folder(folder.parent, folder.name)
    record = RunRecord(
        schema=RECORD_SCHEMA,
        id=folder.name,
        created=ended.isoformat(timespec="seconds"),
        command=command,
        git=Git(commit=commit, dirty=None),
        config={
            "preset": PRESET,
            "pipeline": {"name": name},
            "world_size": len(times),
            "local_batch_size": samples // len(times),
            "global_batch_size": samples,
        },
        pipeline={},
        machine=described,
        warmup_iterations=warmup,
        latency_ms=latency,
        samples_per_second=samples / latency["by_clock"] * 1000,
        memory_gb=None,
        host=None,
        gpu=None,
        stages_ms=None,
        training=None,
    )
    try:
        write_record(folder, record, times, loss)
    except BaseException:
        discard_run_folder(folder, ITERATIONS_NPZ)  # so that the next try can have it
        raise
    return record


def read_times(file: Path, unit: str = "ms") -> np.ndarray:
    """Returns the times of a run in milliseconds, float64 [ranks, iterations], from a file of another program.

    A .npy file has [iterations] or [ranks, iterations]; any other file a line for each iteration, with a column for
    each rank, separated by commas or blanks, and at most one line of names above. ValueError names the file, also
    where a column counts iterations in place of timing them.
    """
    if unit not in UNITS_MS:
        raise ValueError(f"--unit {unit!r} is unknown: choose one of {', '.join(UNITS_MS)}")
    names: list[str] = []
    try:
        if file.suffix == ".npy":
            times = np.atleast_2d(np.load(file, allow_pickle=False))
        else:
            # Some rows of a spreadsheet are of separators alone.
            lines = [line for line in file.read_text().splitlines() if line.replace(",", " ").strip()]
            if lines and not _is_number(lines[0].replace(",", " ").split()[0]):
                names = _names(lines.pop(0))
            times = np.array([[float(cell) for cell in line.replace(",", " ").split()] for line in lines]).T
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): name a file of times") from error
    except (ValueError, EOFError) as error:  # EOFError: of an empty .npy
        raise ValueError(f"{file} holds no times: {of_numpy(error)}") from error
    if times.ndim != 2 or not times.size or times.dtype.kind not in "fiu":
        raise ValueError(f"{file} holds no times: expected a number for each iteration and rank")
    _check_columns(file, times, names)
    return times.astype(np.float64) * UNITS_MS[unit]


def _names(line: str) -> list[str]:
    """Returns the names of columns, in lower case: with blanks in them where commas separate them."""
    names = line.split(",") if "," in line else line.split()
    return [name.strip(" \t\"'#").lower() for name in names]


def _check_columns(file: Path, times: np.ndarray, names: Sequence[str]) -> None:
    """Raises ValueError where a column of times [columns, iterations] counts iterations: by its name, or as its values
    are 0, 1, 2 or 1, 2, 3 and so on."""
    for place, column in enumerate(times):
        name = names[place] if len(names) == len(times) else ""
        from_zero = column - np.arange(len(column))
        counts = len(column) > 1 and bool((from_zero == column[0]).all()) and column[0] in (0, 1)
        if counts or name in _COUNTS:
            raise ValueError(
                f"{file}: column {place + 1}{f' ({name})' if name else ''} counts iterations and is no rank's times: "
                "leave it out of the file"
            )


def time_of_end(file: Path, stated: str | None) -> datetime:
    """Returns the time at which the run of a file of times ended: as stated in ISO 8601, or when the file was written.
    ValueError if neither can be read."""
    if stated is None:
        return datetime.fromtimestamp(file.stat().st_mtime, UTC)
    try:
        return datetime.fromisoformat(stated)
    except ValueError as error:
        raise ValueError(f"--finished {stated!r} is not a time: write 2026-11-22T10:30:00+00:00") from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _machine(known: Mapping[str, Any]) -> Machine:
    """Returns a machine with these fields, and None for all others."""
    unknown = sorted(set(known) - set(Machine.__annotations__))
    if unknown:
        raise ValueError(f"machine has no {', '.join(unknown)}: its fields are {', '.join(Machine.__annotations__)}")
    nothing: dict[str, Any] = dict.fromkeys(Machine.__required_keys__)
    described: Any = {**nothing, "nodes": 1, "gpus": 0, "python": "unknown", "torch": "unknown", **known}
    return cast(Machine, described)
