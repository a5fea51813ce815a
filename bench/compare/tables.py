"""Comparisons as tables, sentences and JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from dlrm_bench.bench.compare.comparison import Result
from dlrm_bench.bench.compare.sides import Side
from dlrm_bench.bench.stats.repetitions import finds_from
from dlrm_bench.bench.stats.series import Metric
from dlrm_bench.bench.stats.statistics import UNPROVEN, Ratio, Verdict

_NAMES: dict[Metric, str] = {"p50": "median", "p90": "p90", "p99": "p99", "mean": "mean"}


def result_as_json(result: Result) -> dict[str, Any]:
    """The result as JSON; ratios are B over A, null where an interval cannot be known."""
    comparison = result.comparison
    spread = [None if side.mean_only else asdict(of) for side, of in zip(_sides(result), _spread(result), strict=True)]
    return {
        "name": result.name,
        "a": _side_as_json(result.a) | {"spread_of_runs": spread[0]},
        "b": _side_as_json(result.b) | {"spread_of_runs": spread[1]},
        "metric": "samples_per_second" if result.per_sample else result.metric,
        "verdict": result.verdict,
        "p_value": None if math.isnan(result.p_value) else result.p_value,
        "comparisons": result.comparisons,
        "detectable": result.detectable,
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
    batch = result.b.global_batch_size / result.a.global_batch_size
    mean = result.comparison.estimates["mean"].ratio()
    return Ratio(batch / mean.value, batch / mean.high, batch / mean.low)


def result_table(result: Result) -> Table:
    """The result as a table; '~' where nothing is proven, and no word where the verdict is about another row."""
    title = f"Latency of an iteration\nA = {result.a.label}\nB = {result.b.label}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("latency, ms", "A", "B", "B / A", "95 % interval", "B is"):
        table.add_column(column, justify="left" if column.startswith("latency") else "right", no_wrap=True)
    a, b = result.a.metrics(), result.b.metrics()
    for metric in _shared_metrics(result):
        ratio = result.comparison.ratios[metric]
        is_the_verdict = metric == result.metric and not result.per_sample
        said = "" if result.per_sample else _said(result, ratio.verdict, is_the_verdict)
        row = (f"{a[metric]:.3f}", f"{b[metric]:.3f}", *_ratio_cells(ratio), said)
        table.add_row(_NAMES[metric], *row, style="bold" if is_the_verdict else None)
    throughput = throughput_ratio(result)
    if throughput is not None:
        cells = (f"{_throughput(side):,.0f}" for side in _sides(result))
        verdict = Ratio(*(1 / value for value in (throughput.value, throughput.high, throughput.low))).verdict
        said = _said(result, verdict, result.per_sample)
        style = "bold" if result.per_sample else None
        table.add_row("samples / s", *cells, *_ratio_cells(throughput), said, style=style)
    return table


def rungs_table(results: Sequence[Result]) -> Table:
    """The rungs of two ladders side by side; '~' where nothing is proven, all rungs considered."""
    a, b = (label.rpartition("/")[0] for label in (results[0].a.label, results[0].b.label))
    title = f"Latency of an iteration, median\nA = {a}\nB = {b}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("rung", "A, ms", "B, ms", "B / A", "95 % interval", "finds from", "B is"):
        table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
    for result in results:
        medians = (f"{side.metrics()[result.metric]:.3f}" for side in _sides(result))
        finds = "unknown" if result.detectable is None else finds_from(result.detectable)
        table.add_row(result.name, *medians, *_ratio_cells(result.ratio), finds, _said(result, result.verdict, True))
    return table


def verdict_in_words(result: Result) -> str:
    """The result in one sentence."""
    ratio, of_a = result.ratio, "A"
    interval = (ratio.low, ratio.high)
    spread = f"{_NAMES[result.metric]}, {abs(ratio.value - 1):.2%} {'less' if ratio.value < 1 else 'more'} time"
    if result.per_sample:
        of_throughput = 1 / ratio.value - 1
        spread = f"{abs(of_throughput):.2%} {'more' if of_throughput > 0 else 'fewer'} samples per second"
        interval, of_a = (1 / ratio.high, 1 / ratio.low), "A's"
    if math.isnan(ratio.low):
        return f"no difference proven: too few runs ({spread}; interval unknown)"
    spread += f"; 95 % interval {interval[0]:.4f} to {interval[1]:.4f} of {of_a}"
    if not result.comparison.between_runs:
        these = ratio.verdict if ratio.verdict != UNPROVEN else "not distinguishable"
        return f"no difference proven: too few runs. Of these runs alone, B's were {these} ({spread})"
    if result.verdict == UNPROVEN and ratio.verdict != UNPROVEN:
        return (
            f"no difference proven: the interval leaves out 1, but {result.comparisons} comparisons were looked at "
            f"(p = {result.p_value:.3f} after Holm) ({spread})"
        )
    if result.verdict == UNPROVEN:
        return f"no difference proven ({spread})"
    return f"B is {result.verdict} ({spread})"


def _sides(result: Result) -> tuple[Side, Side]:
    return result.a, result.b


def _spread(result: Result) -> tuple[Any, Any]:
    return result.spread_of_runs()


def _shared_metrics(result: Result) -> list[Metric]:
    return [metric for metric in result.a.metrics() if metric in result.b.metrics()]


def _throughput(side: Side) -> float:
    return (side.global_batch_size or 0) / side.metrics()["mean"] * 1000


def _said(result: Result, verdict: Verdict, is_the_verdict: bool) -> str:
    """What a row says of B: of the verdict's row what is proven, all comparisons considered; of others their own."""
    said = result.verdict if is_the_verdict else verdict
    return said if result.comparison.between_runs and said != UNPROVEN else "~"


def _ratio_cells(ratio: Ratio) -> tuple[str, str]:
    interval = "unknown" if math.isnan(ratio.low) else f"{ratio.low:.4f} .. {ratio.high:.4f}"
    return f"{ratio.value:.4f}", interval


def _ratio_as_json(ratio: Ratio | None) -> dict[str, float | None] | None:
    if ratio is None:
        return None
    return {name: None if math.isnan(value) else value for name, value in ratio._asdict().items()}


def _side_as_json(side: Side) -> dict[str, Any]:
    metrics: dict[str, Any] = {f"{name}_ms": value for name, value in side.metrics().items()}
    throughput = _throughput(side) if side.global_batch_size else None
    return {"label": side.label, "runs": len(side.series), **metrics, "samples_per_second": throughput}
