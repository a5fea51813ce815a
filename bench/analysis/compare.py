"""A against B: what records and MLPerf logs prove about the difference, and what they cannot.

dlrm-bench compare A B [...]: every side after the first is compared with the first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from dlrm_bench.bench.analysis.comparability import SM_CLOCK, caveats_of_side, different, settings_of
from dlrm_bench.bench.analysis.mlperf_logs import MLPerfRun, read_mlperf_log
from dlrm_bench.bench.records.distinct import distinct
from dlrm_bench.bench.records.record import RUN_JSON, Record, read_record
from dlrm_bench.bench.records.repetitions import detectable, drift_left, runs_needed
from dlrm_bench.bench.records.statistics import (
    Comparison,
    Metric,
    Ratio,
    Verdict,
    compare,
    mean_statistics,
    summary_statistics,
)

_NAMES: dict[Metric, str] = {"p50": "median", "p90": "p90", "p99": "p99", "mean": "mean"}
_DRIFT_LEFT = 0.5  # runs by which one side may come later in the mean, for pairs to be compared as such
_CLOCK_TOLERANCE = 0.02  # between the median SM clocks of two runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: runs of the same thing, in the order in which they ran."""

    label: str
    series: list[np.ndarray]
    """Latencies of each run [n], slowest rank, warm-up left out; of an MLPerf log the mean alone, [1]."""
    finished: list[str]
    """When each run ended, as sortable text; empty where that is not known."""
    settings: dict[str, list[Any]]
    """The different values, over the runs, of what should be equal; unknown ones are left out."""
    global_batch_size: int | None
    mean_only: bool
    """Whether only the mean latency is known, as in MLPerf logs."""
    warnings: list[str]
    logs: Sequence[MLPerfRun] = ()
    """Every run of MLPerf logs, also those with nothing to compare; empty for records."""

    def metrics(self) -> dict[Metric, float]:
        """Geometric mean over the runs of each known metric, in milliseconds."""
        metrics = mean_statistics(self.series)
        return {"mean": metrics["mean"]} if self.mean_only else metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """B compared with A."""

    a: Side
    b: Side
    comparison: Comparison
    differences: list[str]
    """What should be equal and is not, and caveats of a side; --strict refuses these."""
    notes: list[str]
    """What this comparison cannot know."""

    @property
    def metric(self) -> Metric:
        """The metric that the verdict is about: the median, or the mean where a side knows no more."""
        return "mean" if self.a.mean_only or self.b.mean_only else "p50"

    @property
    def ratio(self) -> Ratio:
        """B over A in that metric."""
        return self.comparison.ratios[self.metric]

    @property
    def verdict(self) -> Verdict:
        """What is proven of B. One run on a side proves nothing: two runs of the same program differ too."""
        return self.ratio.verdict if self.comparison.between_runs else "no difference proven"

    def regressed(self, limit: float) -> bool:
        """Whether B is proven slower and, by the best estimate, by `limit` (0.02: 2 %) or more.

        ValueError with one run on a side, which can prove nothing.
        """
        if not self.comparison.between_runs:
            raise ValueError(
                f"--fail-on needs at least two runs on each side, not {self.comparison.runs[0]} of {self.a.label} and "
                f"{self.comparison.runs[1]} of {self.b.label}: one run cannot show how much runs differ by themselves"
            )
        return self.verdict == "slower" and self.ratio.value >= 1 + limit


def read_side(path: Path) -> Side:
    """Reads a side: a record, a folder of records, an MLPerf log or a folder of such logs.

    ValueError, naming the file, if it is missing, damaged or of another kind.
    """
    if path.is_file():
        return _side_of_logs(str(path), read_mlperf_log(path))
    if not path.exists():
        raise ValueError(f"{path} does not exist: name a record, a folder of records or an MLPerf log")
    if (path / RUN_JSON).exists():
        return side_of_records(str(path), [read_record(path)])
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
        said = [f"{path}: {what} left out: {', '.join(names)}" for what, names in left_out.items() if names]
        return side_of_records(str(path), timed, said + copies)
    logs = sorted(path.glob("result_*.txt"))
    if logs:
        return _side_of_logs(str(path), [run for log in logs for run in read_mlperf_log(log)])
    raise ValueError(f"{path} holds neither {RUN_JSON} nor folders with one nor result_*.txt: name a record or a log")


def side_of_records(label: str, records: Sequence[Record], warnings: Sequence[str] = ()) -> Side:
    """A side made of records. ValueError if one has nothing to compare."""
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
        finished=[record.run["created"] for record in records],
        settings=settings_of(records),
        global_batch_size=records[0].run["config"].get("global_batch_size"),
        mean_only=False,
        warnings=[*warnings, *caveats_of_side(label, records)],
    )


def compare_sides(a: Side, b: Side) -> Result:
    """Compares B with A; pair by pair where their runs alternate in time in a balanced order, so that drift cancels."""
    order = _order(a.finished, b.finished)
    comparison = compare(a.series, b.series, paired=_alternate(order) and abs(drift_left(order)) < _DRIFT_LEFT)
    return Result(a=a, b=b, comparison=comparison, differences=[*_differences(a, b)], notes=[*_notes(a, b, comparison)])


def _side_of_logs(label: str, runs: Sequence[MLPerfRun]) -> Side:
    usable = [run for run in runs if run.train_ms_per_iteration is not None and run.train_ms_per_iteration > 0]
    if not usable:
        raise ValueError(
            f"{label}: no run with a run_stop, a batch size, train_samples and an epoch_num above 0: "
            "there is no latency to compare"
        )
    damaged = {run.path: run.malformed_lines for run in runs if run.malformed_lines}
    return Side(
        label=label,
        series=[np.array([run.train_ms_per_iteration]) for run in usable],
        finished=[],
        settings={"global batch": different(run.global_batch_size for run in usable)},
        global_batch_size=usable[0].global_batch_size,
        mean_only=True,
        warnings=[f"{path}: {lines} malformed lines" for path, lines in damaged.items()]
        + [f"{run.path}: a run that is {run.status}" for run in runs if run.status != "success"],
        logs=runs,
    )


def _differences(a: Side, b: Side) -> Iterator[str]:
    for name in a.settings | b.settings:
        left, right = a.settings.get(name, []), b.settings.get(name, [])
        for side, values in ((a, left), (b, right)):
            if len(values) > 1:
                yield f"{name} varies within {side.label}: {_brief(values)}"
        if not left or not right or left == right:
            continue
        if name == SM_CLOCK and abs(left[0] / right[0] - 1) < _CLOCK_TOLERANCE:
            continue
        yield f"{name} differs: {_brief(left)} in {a.label}, {_brief(right)} in {b.label}"
    yield from a.warnings
    yield from b.warnings


def _brief(values: list[Any]) -> str:
    text = ", ".join(" + ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)
    return text if len(text) < 60 else f"{text[:57]}..."


def _notes(a: Side, b: Side, comparison: Comparison) -> Iterator[str]:
    if not comparison.between_runs:
        yield (
            f"runs: {comparison.runs[0]} and {comparison.runs[1]}. With one run on a side it cannot be known how much "
            "runs of the same program differ: the intervals describe these runs only and prove nothing about programs"
        )
    elif (
        not comparison.paired
        and a.finished
        and b.finished
        and (a.finished[-1] < b.finished[0] or b.finished[-1] < a.finished[0])
    ):
        yield (
            "all runs of one side came before those of the other: a drift of the machine would look like a difference; "
            "alternate them, as `dlrm-bench ladder` does"
        )
    elif not comparison.paired and _alternate(order := _order(a.finished, b.finished)):
        first = (a if drift_left(order) > 0 else b).label
        yield (
            f"the runs alternate, but {first} came first in most pairs: a drift of the machine would look like a "
            "difference, so they are not compared pair by pair; swap every other pair (A B B A), as `dlrm-bench "
            "ladder` does"
        )
    if comparison.between_runs:
        spread = _spread(a, b, comparison.paired)
        least = detectable(spread, min(comparison.runs), comparison.paired)
        runs = f"{comparison.runs[0]} and {comparison.runs[1]} runs"
        seen = comparison.ratios["mean" if a.mean_only or b.mean_only else "p50"].value
        needed = runs_needed(spread, abs(seen - 1), comparison.paired)
        yield f"{runs} that differ like these find differences from {least:.2%} on" + (
            f"; one of the size seen here takes about {needed} a side"
            if needed and needed > min(comparison.runs)
            else ""
        )
    if a.mean_only or b.mean_only:
        yield (
            "an MLPerf log gives the mean over a whole run, evaluations left out, and neither percentiles nor the "
            "machine's state: whether the work was the same is for the reader to judge"
        )
    short = [len(run) for side in (a, b) if not side.mean_only for run in side.series if len(run) < 100]
    if short:
        yield f"p99 of a run of {min(short)} iterations is little more than its largest value"


def _order(a: Sequence[str], b: Sequence[str]) -> list[int]:
    """Sides of all runs, 0 for A and 1 for B, in the order in which they ended; empty where that is not known."""
    return [side for _, side in sorted([*((time, 0) for time in a), *((time, 1) for time in b)])]


def _alternate(order: Sequence[int]) -> bool:
    """Whether each pair of runs that are neighbours in time has one run of each side."""
    pairs = list(zip(order[::2], order[1::2], strict=False))
    return bool(pairs) and len(order) % 2 == 0 and all(first != second for first, second in pairs)


def _spread(a: Side, b: Side, paired: bool) -> float:
    """Standard deviation of the logarithms of the runs' metric: of the pairs' differences, or pooled over the sides."""
    metric: Metric = "mean" if a.mean_only or b.mean_only else "p50"
    logs = [np.log([summary_statistics(run)[metric] for run in side.series]) for side in (a, b)]
    if paired:
        return float(np.std(logs[1] - logs[0], ddof=1))
    return math.sqrt(sum(float(np.var(each, ddof=1)) * (len(each) - 1) for each in logs) / (sum(map(len, logs)) - 2))


def result_as_json(result: Result) -> dict[str, Any]:
    """The result as JSON; ratios are B over A, null where an interval cannot be known."""
    comparison = result.comparison
    return {
        "a": _side_as_json(result.a),
        "b": _side_as_json(result.b),
        "metric": result.metric,
        "verdict": result.verdict,
        "ratios": {metric: _ratio_as_json(comparison.ratios[metric]) for metric in _shared_metrics(result)},
        "throughput_ratio": _ratio_as_json(throughput_ratio(result)),
        "runs": list(comparison.runs),
        "paired": comparison.paired,
        "between_run_variance_known": comparison.between_runs,
        "differences": result.differences,
        "notes": result.notes,
    }


def throughput_ratio(result: Result) -> Ratio | None:
    """Samples per second of B over those of A; None where a batch size is not known."""
    if not result.a.global_batch_size or not result.b.global_batch_size:
        return None
    mean, batch = result.comparison.ratios["mean"], result.b.global_batch_size / result.a.global_batch_size
    return Ratio(batch / mean.value, batch / mean.high, batch / mean.low)


def result_table(result: Result) -> Table:
    """The result as a table; '~' where nothing is proven."""
    title = f"Latency of an iteration\nA = {result.a.label}\nB = {result.b.label}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("latency, ms", "A", "B", "B / A", "95 % interval", "B is"):
        table.add_column(column, justify="left" if column.startswith("latency") else "right", no_wrap=True)
    proves = result.comparison.between_runs
    a, b = result.a.metrics(), result.b.metrics()
    for metric in _shared_metrics(result):
        ratio = result.comparison.ratios[metric]
        row = (f"{a[metric]:.3f}", f"{b[metric]:.3f}", *_ratio_cells(ratio, ratio.verdict if proves else None))
        table.add_row(_NAMES[metric], *row, style="bold" if metric == result.metric else None)
    throughput = throughput_ratio(result)
    if throughput is not None:
        cells = (f"{_throughput(side):,.0f}" for side in (result.a, result.b))
        verdict = Ratio(*(1 / value for value in (throughput.value, throughput.high, throughput.low))).verdict
        table.add_row("samples / s", *cells, *_ratio_cells(throughput, verdict if proves else None))
    return table


def verdict_in_words(result: Result) -> str:
    """The result in one sentence."""
    ratio, name = result.ratio, _NAMES[result.metric]
    spread = f"{name}, {abs(ratio.value - 1):.2%} {'less' if ratio.value < 1 else 'more'} time"
    if math.isnan(ratio.low):
        return f"no difference proven: too few runs ({spread}; interval unknown)"
    spread += f"; 95 % interval {ratio.low:.4f} to {ratio.high:.4f} of A"
    if not result.comparison.between_runs:
        these = ratio.verdict if ratio.verdict != "no difference proven" else "not distinguishable"
        return f"no difference proven: too few runs. Of these runs alone, B's were {these} ({spread})"
    if result.verdict == "no difference proven":
        return f"no difference proven ({spread})"
    return f"B is {result.verdict} ({spread})"


def _shared_metrics(result: Result) -> list[Metric]:
    return [metric for metric in result.a.metrics() if metric in result.b.metrics()]


def _throughput(side: Side) -> float:
    return (side.global_batch_size or 0) / side.metrics()["mean"] * 1000


def _ratio_cells(ratio: Ratio, verdict: Verdict | None) -> tuple[str, str, str]:
    interval = "unknown" if math.isnan(ratio.low) else f"{ratio.low:.4f} .. {ratio.high:.4f}"
    proven = verdict if verdict not in (None, "no difference proven") else "~"
    return f"{ratio.value:.4f}", interval, str(proven)


def _ratio_as_json(ratio: Ratio | None) -> dict[str, float | None] | None:
    if ratio is None:
        return None
    return {name: None if math.isnan(value) else value for name, value in ratio._asdict().items()}


def _side_as_json(side: Side) -> dict[str, Any]:
    metrics: dict[str, Any] = {f"{name}_ms": value for name, value in side.metrics().items()}
    throughput = _throughput(side) if side.global_batch_size else None
    return {"label": side.label, "runs": len(side.series), **metrics, "samples_per_second": throughput}
