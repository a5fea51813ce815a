"""The limits of a comparison, in sentences."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dlrm_bench.bench.compare.order import ACCEPT, WAY_OUT, notes_on_order
from dlrm_bench.bench.compare.sides import Side
from dlrm_bench.bench.stats.repetitions import finds
from dlrm_bench.bench.stats.series import Metric, drift_within, spread_of_log
from dlrm_bench.bench.stats.statistics import NO_VERDICT
from dlrm_bench.bench.stats.variance import Levels, agree_by_luck

if TYPE_CHECKING:
    from dlrm_bench.bench.compare.comparison import Result

TOO_COARSE = "record timings with more digits, or make more runs"
METRIC_NAMES: dict[Metric, str] = {"p50": "median", "p90": "p90", "p99": "p99", "mean": "mean"}


def notes_on(result: "Result", accepted: Sequence[str]) -> Iterator[str]:
    """Yields the limits of a comparison. accepted: reasons against a verdict whose risk the user accepts."""
    a, b, comparison = result.a, result.b, result.comparison
    if result.verdict == NO_VERDICT:
        yield f"no verdict: {WAY_OUT}"
    if accepted:
        yield f"{ACCEPT}: a verdict despite differences other than the program: {'; '.join(accepted)}"
    if result.references is not None:
        old, new = (side.label for side in result.references)
        yield (
            f"the verdict is about the difference of differences: B over {new}, less A over {old}. It assumes that "
            "changes between the sittings affected A's program and the reference by the same factor"
        )
    if result.per_sample:
        yield (
            "the batch sizes differ, so the verdict is about samples per second: samples over elapsed time, by the "
            "clock; times per iteration are shown without a verdict"
        )
    if not comparison.between_runs:
        yield (
            f"runs: {comparison.runs[0]} and {comparison.runs[1]}. One run per side does not show how much runs of the "
            "same program differ: the intervals describe these runs only and prove nothing about programs"
        )
    else:
        if result.references is None:
            yield from notes_on_order(a, b)
        yield from _notes_on_runs(result)
    if result.of_logs:
        yield (
            "an MLPerf log has the mean over a whole run, without evaluations, but no percentiles and no state of the "
            "machine: both sides are compared by the clock, and the reader must judge whether the work was the same"
        )
    for side in (a, b):
        if not side.mean_only:
            yield from _notes_on_windows(side, alone=not comparison.between_runs)


def lucky(between: float, spread: tuple[Levels, Levels], paired: bool, freedom: float) -> float | None:
    """Returns the spread of the metric that the runs' iterations explain if the runs differ by far less; else None.

    between: standard deviation of the runs' logarithms, or of their pairs' differences. spread: of A's and B's runs.
    """
    known = [each.iteration for each in spread if each.iteration is not None]
    if len(known) < 2:
        return None
    within = math.hypot(*known) / (1 if paired else math.sqrt(2))
    return within if agree_by_luck(between, within, freedom) else None


def _notes_on_runs(result: "Result") -> Iterator[str]:
    runs = f"{result.comparison.runs[0]} and {result.comparison.runs[1]} runs"
    needed = result.runs_needed(abs(result.estimate.ratio().value - 1))
    if result.detectable is None:
        yield f"{runs} that agree to the last digit do not show how much runs differ: {TOO_COARSE}"
    else:
        yield f"{runs} that differ like these {finds(result.detectable)}" + (
            f"; a difference of the size seen here takes about {needed} per side"
            if needed and needed > min(result.comparison.runs)
            else ""
        )
    if not result.of_logs:
        spread = result.spread_of_runs()
        a, b = (each.in_words() for each in spread)
        yield f"a run's {METRIC_NAMES[result.metric]} varies by level (standard deviation): A {a}; B {b}"
        between = result.comparison.spread(result.estimate)
        within = lucky(between, spread, result.comparison.paired, result.estimate.freedom)
        if within is not None and result.references is None and not result.estimate.too_coarse:
            yield (
                f"runs agree better ({between:.2%}) than their own iterations predict ({within:.2%}): by luck, so the "
                "interval may be too narrow; take more runs"
            )
    several = sorted({machine for side in (result.a, result.b) for machine in side.machines})
    if len(several) > 1:
        yield (
            f"runs on {len(several)} machines: the interval holds for these machines, and other machines of the same "
            "description may differ by more"
        )


def _notes_on_windows(side: Side, alone: bool) -> Iterator[str]:
    """Yields defects of the timed windows of a side's runs: not steady, or too short."""
    drifts = [drift_within(run) for run in side.series]
    changes = [drift.change for drift in drifts if drift is not None and not drift.steady]
    if changes:
        yield (
            f"{side.label}: {len(changes)} of {len(drifts)} runs were not steady: between parts of the timed "
            f"iterations the median changed by up to {max(changes, key=abs):+.1%}; a longer window (--min-time) tells "
            "more"
        )
    if alone and any(spread_of_log(run, "p50").too_short for run in side.series):
        yield (
            f"{side.label}: the series is too short for its autocorrelation, so its interval may be too narrow: time "
            "more iterations"
        )
    short = [len(run) for run in side.series if len(run) < 100]
    if short:
        yield f"{side.label}: p99 of a run of {min(short)} iterations is close to its maximum"
