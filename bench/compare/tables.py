"""Comparisons as tables, sentences and JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from dlrm_bench.bench.compare.comparison import Result
from dlrm_bench.bench.compare.notes import METRIC_NAMES
from dlrm_bench.bench.compare.sides import Side
from dlrm_bench.bench.stats.repetitions import finds_from
from dlrm_bench.bench.stats.series import Metric
from dlrm_bench.bench.stats.statistics import NO_VERDICT, UNPROVEN, Ratio

BY_CLOCK = "by clock"


def result_as_json(result: Result) -> dict[str, Any]:
    """Returns the result as JSON, null where a value is unknown.

    times_as_fast: how many times as fast as A B is (A's time over B's), by metric, each {value, low, high}.
    throughput_ratio: samples per second of B over A's, batches over elapsed time. estimate: what the verdict is about,
    the natural logarithm of B's time over A's with its standard error and degrees of freedom. mean: where a side is an
    MLPerf log, of the time by the clock. p_value: corrected for `comparisons` (Holm); the verdict asks for 1 -
    confidence. no_verdict_because: what differs beside the program.
    detectable: the smallest difference that so many runs find, and detectable_interval its own 95 % interval.
    """
    comparison, confidence = result.comparison, result.confidence
    sides = zip(_sides(result), result.spread_of_runs(), strict=True)
    spread = [None if side.mean_only else asdict(of) for side, of in sides]
    low, value, high = result.detectable or (None, None, None)
    return {
        "name": result.name,
        "a": _side_as_json(result.a) | {"spread_of_runs": spread[0]},
        "b": _side_as_json(result.b) | {"spread_of_runs": spread[1]},
        "metric": "samples_per_second" if result.per_sample else result.metric,
        "verdict": result.verdict,
        "no_verdict_because": list(result.confounded),
        "estimate": {name: _known(value) for name, value in asdict(result.estimate).items()},
        "p_value": _known(result.p_value),
        "comparisons": result.comparisons,
        "confidence": confidence,
        "detectable": value,
        "detectable_interval": None if low is None else [low, high],
        "times_as_fast": {
            metric: _ratio_as_json(comparison.estimates[metric].speedup(confidence))
            for metric in _shared_metrics(result)
        },
        "throughput_ratio": _ratio_as_json(throughput_ratio(result)),
        "runs": list(comparison.runs),
        "paired": comparison.paired,
        "references": None if result.references is None else [side.label for side in result.references],
        "between_run_variance_known": comparison.between_runs,
        "differences": list(result.differences),
        "notes": list(result.notes),
    }


def throughput_ratio(result: Result) -> Ratio | None:
    """Returns samples per second of B over those of A; None if a batch size is unknown."""
    a, b = result.a.global_batch_size, result.b.global_batch_size
    if not a or not b:
        return None
    return None if result.clock is None else result.clock.scaled(a / b).speedup(result.confidence)


def result_table(result: Result) -> Table:
    """Returns the result as a table. Only the row of the verdict has a word: if each row said 'faster' on its own, up
    to 16 % of comparisons of a program with itself would have one."""
    title = f"Latency of an iteration\nA = {result.a.label}\nB = {result.b.label}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("latency, ms", "A", "B", "times as fast", _interval(result), "B is"):
        table.add_column(column, justify="left" if column.startswith("latency") else "right", no_wrap=True)
    a, b = result.a.metrics(), result.b.metrics()
    rows = [
        (METRIC_NAMES[metric], a[metric], b[metric], result.comparison.estimates[metric], metric == result.metric)
        for metric in ([] if result.of_logs else _shared_metrics(result))
    ]
    if result.clock is not None:
        rows.append((BY_CLOCK, result.a.by_clock(), result.b.by_clock(), result.clock, result.of_logs))
    for name, of_a, of_b, estimate, of_the_metric in rows:
        is_the_verdict = of_the_metric and not result.per_sample
        cells = (f"{of_a:.3f}", f"{of_b:.3f}", *_ratio_cells(estimate.speedup(result.confidence)))
        style = "bold" if is_the_verdict else None
        table.add_row(name, *cells, _said(result) if is_the_verdict else "", style=style)
    throughput = throughput_ratio(result)
    if throughput is not None:
        of_sides = (f"{_throughput(side):,.0f}" for side in _sides(result))
        style = "bold" if result.per_sample else None
        table.add_row(
            "samples / s", *of_sides, *_ratio_cells(throughput), _said(result) if result.per_sample else "", style=style
        )
    return table


def rungs_table(results: Sequence[Result]) -> Table:
    """Returns a table of the rungs of two ladders side by side; '~' if no difference is proven, corrected for all
    rungs."""
    a, b = (label.rpartition("/")[0] for label in (results[0].a.label, results[0].b.label))
    title = f"Latency of an iteration, median\nA = {a}\nB = {b}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("rung", "A, ms", "B, ms", "times as fast", _interval(results[0]), "finds from", "B is"):
        table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
    for result in results:
        medians = (f"{side.metrics()[result.metric]:.3f}" for side in _sides(result))
        finds = "unknown" if result.detectable is None else finds_from(result.detectable)
        table.add_row(result.name, *medians, *_ratio_cells(result.speedup), finds, _said(result))
    return table


def verdict_in_words(result: Result) -> str:
    """Returns the result in one sentence."""
    speedup = result.speedup
    times = f"{speedup.value:.4f} times as fast as A"
    what = METRIC_NAMES[result.metric]
    if result.of_logs or result.per_sample:
        what = "samples per second" if result.per_sample else BY_CLOCK
    if math.isnan(speedup.low):
        return f"no difference proven: too few runs (B: {times}, {what}; interval unknown)"
    text = f"{times} ({what}; {_interval(result)} {speedup.low:.4f} to {speedup.high:.4f})"
    if not result.comparison.between_runs:
        alone = result.estimate.verdict(result.confidence)
        these = alone if alone != UNPROVEN else "not distinguishable"
        return f"no difference proven: too few runs. Among these runs alone, B's were {these}: {text}"
    if result.verdict == NO_VERDICT:
        return f"no verdict, B was {text}: {'; '.join(result.confounded)}"
    if result.estimate.too_coarse:
        return f"no difference proven: the timings are too coarse, as runs agree to the last digit; B was {text}"
    if result.verdict == UNPROVEN and result.estimate.verdict(result.confidence) != UNPROVEN:
        return (
            f"no difference proven: the interval excludes 1, but {result.comparisons} comparisons were made "
            f"(p = {result.p_value:.3f} after Holm); B was {text}"
        )
    if result.verdict == UNPROVEN:
        return f"no difference proven; B was {text}"
    return f"B is {result.verdict}, {text}"


def _sides(result: Result) -> tuple[Side, Side]:
    return result.a, result.b


def _shared_metrics(result: Result) -> list[Metric]:
    return [metric for metric in result.a.metrics() if metric in result.b.metrics()]


def _throughput(side: Side) -> float:
    return (side.global_batch_size or 0) / side.by_clock() * 1000


def _said(result: Result) -> str:
    """Returns the proven difference in words, corrected for all comparisons."""
    return "~" if result.verdict == UNPROVEN else result.verdict


def _interval(result: Result) -> str:
    return f"{result.confidence:.0%} interval".replace("%", " %")


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _ratio_cells(ratio: Ratio) -> tuple[str, str]:
    interval = "unknown" if math.isnan(ratio.low) else f"{ratio.low:.4f} .. {ratio.high:.4f}"
    return f"{ratio.value:.4f} x", interval


def _ratio_as_json(ratio: Ratio | None) -> dict[str, float | None] | None:
    if ratio is None:
        return None
    return {name: _known(value) for name, value in ratio._asdict().items()}


def _side_as_json(side: Side) -> dict[str, Any]:
    metrics: dict[str, Any] = {f"{name}_ms": value for name, value in side.metrics().items()}
    throughput = _throughput(side) if side.global_batch_size else None
    return {
        "label": side.label,
        "runs": len(side.series),
        **metrics,
        "by_clock_ms": side.by_clock(),
        "samples_per_second": throughput,
        "power_w": side.power_w,
        "sm_clock_mhz": side.sm_clock_mhz,
    }
