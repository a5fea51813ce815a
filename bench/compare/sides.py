"""Sides of a comparison: runs of one program, read from records, ladders or MLPerf logs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_bench.bench.compare.comparability import (
    caveats_of_side,
    different,
    machine_of,
    program_of,
    settings_of,
    unknown,
)
from dlrm_bench.bench.limits.efficiency import power_of, sm_clock_of
from dlrm_bench.bench.mlperf.published_logs import MLPerfRun, read_mlperf_log
from dlrm_bench.bench.records.distinct import distinct, record_key
from dlrm_bench.bench.records.ladder import LADDER_JSON, ended_by_precision, members_of
from dlrm_bench.bench.records.record import RUN_JSON, Record, read_record
from dlrm_bench.bench.stats.series import AUTO_CONFIDENCE, CONFIDENCE, Metric, by_clock
from dlrm_bench.bench.stats.statistics import mean_statistics
from dlrm_bench.dlrm.benchmarks import BENCHMARKS
from dlrm_bench.dlrm.data.paths import why_not

REFERENCE_LOGS = "seed*.log"
"""Names of the logs that MLPerf publishes with its reference's convergence points, one folder per batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: runs of one program, in the order in which they ran."""

    label: str
    series: list[np.ndarray]
    """Latencies of each run [n], slowest rank, without warm-up; only the mean of an MLPerf log, [1]."""
    clock_ms: list[float]
    """Elapsed milliseconds per iteration of each run, by the clock: the basis of samples per second."""
    finished: list[str]
    """Time at which each run ended, as sortable text; empty where it is unknown, as in MLPerf logs."""
    machines: list[str]
    """Machine of each run; the same for all MLPerf logs, which do not name it."""
    settings: dict[str, list[Any]]
    """The distinct known values, over the runs, of settings that should be equal."""
    global_batch_size: int | None
    mean_only: bool
    """Whether only the mean latency is known, as in MLPerf logs."""
    warnings: list[str]
    confidence: float = CONFIDENCE
    """Confidence of intervals about this side: higher if the spread of the runs determined their number."""
    programs: Sequence[Mapping[str, str | None]] = ()
    """The distinct programs of the runs: source, pipeline and its options; empty for MLPerf logs."""
    keys: Sequence[tuple[str, str, str]] = ()
    """Identity of each run, equal for its copies; empty for MLPerf logs."""
    unknown: Sequence[str] = ()
    """Fields that --strict requires and records lack."""
    power_w: float | None = None
    """Power of a GPU over the timed iterations in watts, median over the runs; None if no record has it."""
    sm_clock_mhz: float | None = None
    """SM clock over the timed iterations, median over the runs."""
    logs: Sequence[MLPerfRun] = ()
    """All runs of MLPerf logs, also those without a latency; empty for records."""

    def metrics(self) -> dict[Metric, float]:
        """Returns the geometric mean over the runs of each known metric, in milliseconds."""
        metrics = mean_statistics(self.series)
        return {"mean": metrics["mean"]} if self.mean_only else metrics

    def by_clock(self) -> float:
        """Returns elapsed milliseconds per iteration, geometric mean over the runs."""
        return float(np.exp(np.mean(np.log(self.clock_ms))))

    def shortest_s(self) -> float:
        """Returns the timed seconds of the run with the fewest."""
        return min(len(run) * ms for run, ms in zip(self.series, self.clock_ms, strict=True)) / 1000


def read_side(path: Path) -> Side:
    """Reads a side: a record, a folder of records, a ladder's rung (LADDER/RUNG), an MLPerf log or a folder of logs.

    A rung of an interrupted or running ladder is a side with the finished runs. ValueError, naming the file, if it is
    missing, damaged or of another kind.
    """
    path = _in_ladder(path)
    if path.is_file():
        return _side_of_logs(str(path), read_mlperf_log(path))
    if not path.exists():
        members = members_of(path.parent)
        if members is not None:
            return _side_of_rung(path, members)
        raise ValueError(
            f"{path} {why_not(path)}: name a record, a folder of records, a ladder's rung or an MLPerf log"
        )
    if (path / RUN_JSON).exists():
        return side_of_records(str(path), [read_record(path)])
    rungs = members_of(path)
    if rungs is not None:
        raise ValueError(
            f"{path} is a ladder, which compares only with another ladder: name one of its rungs, such as "
            f"{path / next(iter(rungs))} (it has {', '.join(rungs)})"
        )
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    finished = [folder for folder in folders if (folder / RUN_JSON).exists()]
    if finished:
        unfinished = [
            folder.name for folder in folders if (folder / "result_0.txt").exists() and folder not in finished
        ]
        records, copies = distinct([read_record(folder) for folder in finished])
        timed = [record for record in records if record.run["host"] is None]
        left_out = {
            "unfinished runs": unfinished,
            "profiled runs": [r.run["id"] for r in records if r not in timed],
        }
        warnings = [f"{path}: {what} left out: {', '.join(names)}" for what, names in left_out.items() if names]
        return side_of_records(str(path), timed, warnings + copies)
    logs = sorted(path.glob("result_*.txt")) or sorted(path.glob(REFERENCE_LOGS))
    if logs:
        return _side_of_logs(str(path), [run for log in logs for run in read_mlperf_log(log)])
    raise ValueError(f"{path} holds no {RUN_JSON}, no folder with one and no result_*.txt: name a record or a log")


def rungs_of(path: Path) -> dict[str, Side] | None:
    """Returns the rungs of a ladder as sides, by name; None if the folder is not a ladder.

    Of an interrupted ladder, returns the rungs with a finished run; ValueError if there is none.
    """
    members = members_of(path)
    if members is None:
        return None
    begun = {name: _side_of_rung(path / name, members) for name, runs in members.items() if runs}
    if not begun:
        raise ValueError(f"{path} was interrupted before its first run ended: {_resuming(path)}")
    return begun


def side_of_records(label: str, records: Sequence[Record], warnings: Sequence[str] = ()) -> Side:
    """Returns the side that the records make up. ValueError if one has no latency, or if their global batch sizes
    differ."""
    for record in records:
        if record.run["host"] is not None:
            raise ValueError(
                f"{record.folder} is a profiled run, whose latencies include the profiler: name timed runs"
            )
        if record.run["latency_ms"] is None:
            raise ValueError(f"{record.folder} ended within its warm-up: it has no latency to compare")
    if not records:
        raise ValueError(f"{label} holds no timed run")
    records = sorted(records, key=lambda record: record.run["created"])
    return Side(
        label=label,
        series=[record.latencies_ms.astype(np.float64) for record in records],
        clock_ms=[by_clock(record.iterations_ms, record.run["warmup_iterations"]) for record in records],
        finished=[record.run["created"] for record in records],
        machines=[machine_of(record) for record in records],
        settings=settings_of(records),
        global_batch_size=_one_batch_size(label, [r.run["config"].get("global_batch_size") for r in records]),
        mean_only=False,
        warnings=[*warnings, *caveats_of_side(label, records)],
        programs=different(program_of(record) for record in records),
        keys=[record_key(record) for record in records],
        unknown=unknown(label, records),
        power_w=_median(power_of(record.run) for record in records),
        sm_clock_mhz=_median(sm_clock_of(record.run) for record in records),
    )


def first_run_of(path: Path) -> Path:
    """Returns a side's first record: the path itself, unless it names a rung of a ladder (LADDER/RUNG)."""
    path = _in_ladder(path)
    members = None if path.exists() else members_of(path.parent)
    return path.parent / members[path.name][0] if members and members.get(path.name) else path


def _in_ladder(path: Path) -> Path:
    """Returns LADDER/RUNG for LADDER*/RUNG, which shells do not expand, because a rung is not a folder."""
    ladders = [] if path.exists() else glob(str(path.parent))
    return Path(ladders[0]) / path.name if len(ladders) == 1 else path


def _side_of_rung(path: Path, members: dict[str, list[str]]) -> Side:
    """Returns the side of a rung; members: ids of the runs by rung, of the ladder at path.parent."""
    if path.name not in members:
        raise ValueError(f"{path.parent} has no rung {path.name!r}: choose one of {', '.join(members)}")
    runs, cut = members[path.name], not (path.parent / LADDER_JSON).exists()
    if not runs:
        raise ValueError(f"{path.parent} was interrupted before a run of {path.name} ended: {_resuming(path.parent)}")
    said = [f"{path.parent} was interrupted, and has {len(runs)} run(s) of {path.name}"] if cut else []
    side = side_of_records(str(path), [read_record(path.parent / member) for member in runs], said)
    return replace(side, confidence=AUTO_CONFIDENCE) if ended_by_precision(path.parent) else side


def _resuming(ladder: Path) -> str:
    return f"resume it with dlrm-bench ladder --resume {ladder}"


def _side_of_logs(label: str, runs: Sequence[MLPerfRun]) -> Side:
    named = {run.known.name: run for run in runs if run.known is not None}
    for run in runs:
        if run.benchmark is not None and run.known is None:
            raise ValueError(
                f"{run.path} is a log of {run.benchmark}, another benchmark, whose iterations do other work: name "
                f"logs of {' or '.join(b.name for b in BENCHMARKS if b.ruleset is not None)}"
            )
    if len(named) > 1:
        paths = " and ".join(f"{run.path} of {name}" for name, run in named.items())
        raise ValueError(f"{label} holds logs of several benchmarks, {paths}: name logs of one")
    usable = [run for run in runs if run.train_ms_per_iteration is not None and run.train_ms_per_iteration > 0]
    if not usable:
        raise ValueError(
            f"{label} has no finished run: without run_stop, batch size, train_samples and an epoch_num above 0 in its "
            "log there is no latency to compare"
        )
    damaged = {run.path: run.malformed_lines for run in runs if run.malformed_lines}
    return Side(
        label=label,
        series=[np.array([run.train_ms_per_iteration]) for run in usable],
        clock_ms=[run.train_ms_per_iteration or 0.0 for run in usable],
        finished=[],
        machines=[""] * len(usable),
        settings={"benchmark": list(named), "global batch": different(run.global_batch_size for run in usable)},
        global_batch_size=_one_batch_size(label, [run.global_batch_size for run in usable]),
        mean_only=True,
        warnings=[f"{path}: {lines} malformed lines" for path, lines in damaged.items()]
        + [f"{run.path}: the run's status is {run.status}" for run in runs if run.status != "success"]
        + [f"{run.path}: does not name its benchmark" for run in usable if run.benchmark is None],
        logs=runs,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _one_batch_size(label: str, sizes: Sequence[int | None]) -> int | None:
    """Returns the batch size that all runs share. ValueError if they have several: no latency describes them."""
    found = different(sizes)
    if len(found) > 1:
        raise ValueError(
            f"{label} holds runs of several global batch sizes ({', '.join(map(str, found))}): name runs of one"
        )
    return found[0] if found else None
