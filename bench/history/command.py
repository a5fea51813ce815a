"""dlrm-bench history: prints the records of each configuration over time and what changed, and writes the page."""

import math
import shlex
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from dlrm_bench.bench.compare.repeat import repeating_flags
from dlrm_bench.bench.history.arguments import HistoryCommand
from dlrm_bench.bench.history.page import write_page
from dlrm_bench.bench.history.sittings import History, Point, read_histories
from dlrm_bench.bench.report.rounding import milliseconds, with_interval
from dlrm_bench.bench.stats.change_points import FEWEST_POINTS, Change
from dlrm_bench.bench.stats.statistics import Ratio


def history_command(console: Console, asked: HistoryCommand) -> int:
    """Prints a table and sentences for each configuration; returns the exit status. ValueError names a bad flag."""
    if not asked.gap_minutes >= 0:
        raise ValueError(f"--gap-minutes is {asked.gap_minutes:g}: it must not be negative")
    histories = read_histories(asked.folder, asked.reference, asked.gap_minutes)
    for history in histories:
        console.print(history_table(history))
        for text in sentences(history):
            console.print(text, soft_wrap=True, markup=False, highlight=False)
    if asked.out is not None:
        others = write_page(histories, list(sentences_of(histories)), asked.out)
        if others:
            console.print(f"note: left alone in {asked.out}: {', '.join(others)}", soft_wrap=True, markup=False)
        console.print(f"page {asked.out / 'index.html'}", soft_wrap=True)
    return 0


def history_table(history: History) -> Table:
    """Returns the points of a history as a table."""
    table = Table(title=history.name, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("first run ended", "program", "runs", "median, ms", "reference, ms", "times as fast", "judged"):
        table.add_column(column, justify="right" if column in ("runs", "median, ms", "reference, ms") else "left")
    for point in history.points:
        table.add_row(*cells(point))
    return table


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


def sentences_of(histories: list[History]) -> Iterator[list[str]]:
    """Yields the sentences of each history."""
    for history in histories:
        yield list(sentences(history))


def sentences(history: History) -> Iterator[str]:
    """Yields what a history shows: its reference, each change, and what is too little to tell."""
    judged = history.judged
    if history.reference is None:
        yield "no program ran beside others in one sitting, so nothing is judged: run an old commit with each new one"
        return
    yield f"reference: {history.reference}, in {len(history.references)} sittings; {len(judged)} points are judged"
    if len(judged) < FEWEST_POINTS:
        yield f"changes are looked for in {FEWEST_POINTS} points and more"
    elif not history.changes:
        yield "no change is proven (5 % of series without one have one by chance)"
    for change in history.changes:
        yield _change(history, judged, change)


def _change(history: History, judged: list[Point], change: Change) -> str:
    ratio = Ratio(*change.estimate.speedup())
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
