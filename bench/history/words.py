"""A history in words: a row of cells for each point, and sentences on the changes."""

import math
import shlex
from collections.abc import Iterator

from dlrm_bench.bench.compare.repeat import repeating_flags
from dlrm_bench.bench.history.sittings import History, Point
from dlrm_bench.bench.report.rounding import milliseconds, with_interval
from dlrm_bench.bench.stats.change_points import FEWEST_POINTS, Change


def cells(point: Point) -> tuple[str, ...]:
    """Returns a point's cells: when, program, runs, its median and the reference's, times as fast, why not judged."""
    beside = "" if point.reference is None else milliseconds(point.reference.metrics()["p50"])
    times = ""
    if point.estimate is not None:
        ratio = point.estimate.speedup()
        times = f"{ratio.value:.4f}" if math.isnan(ratio.low) else with_interval(*ratio)
    runs = str(len(point.side.series))
    median = milliseconds(point.side.metrics()["p50"])
    return point.when[:16], point.program, runs, median, beside, times, "; ".join(point.because) or "yes"


def sentences(history: History) -> Iterator[str]:
    """Yields a history's reference, each change, and the reasons why nothing can be told."""
    judged = history.judged
    if history.reference is None:
        yield "no program ran beside others in one sitting, so nothing is judged: run an old commit with each new one"
        return
    yield f"reference: {history.reference}, in {len(history.references)} sittings; {len(judged)} points are judged"
    if len(judged) < FEWEST_POINTS:
        yield f"changes are looked for in {FEWEST_POINTS} points and more"
    elif not history.changes:
        yield "no change is proven (in 5 % of series without a change, one is found by chance)"
    for change in history.changes:
        yield _change(history, judged, change)


def _change(history: History, judged: list[Point], change: Change) -> str:
    ratio = change.estimate.speedup()
    word = "slower" if change.estimate.log > 0 else "faster"
    before, after = judged[change.at - 1], judged[change.at]
    first, last = judged[change.low - 1], judged[change.high]
    said = f"{word} from {after.program} ({after.when[:10]}) on, proven (p = {change.p_value:.3f}): "
    said += f"{with_interval(*ratio)} times as fast as up to {before.program}"
    if (first, last) != (before, after):
        said += f"; with 95 % it lies between {first.program} and {last.program}"
    return f"{said}. dlrm-bench bisect {_bare(first.program)} {_bare(last.program)} -- {_flags(history)}"


def _bare(program: str) -> str:
    return program.removesuffix("+")


def _flags(history: History) -> str:
    try:
        return shlex.join(repeating_flags(history.records[-1])[0])
    except (ValueError, KeyError):  # of a program of somebody else's, or of a preset that this version does not know
        return "FLAGS"
