"""A against B: what records and MLPerf logs prove about the difference, and what they cannot.

dlrm-bench compare A B [...]: every side after the first is compared with the first, or two ladders rung by rung.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_bench.bench.compare.comparability import SM_CLOCK, absent
from dlrm_bench.bench.compare.sides import Side, read_side, rungs_of
from dlrm_bench.bench.stats.repetitions import detectable, drift_left, finds, holm, runs_needed
from dlrm_bench.bench.stats.series import CONFIDENCE, Metric, drift_within, spread_of_log, summary_statistics
from dlrm_bench.bench.stats.statistics import UNPROVEN, Comparison, Estimate, Ratio, Verdict, compare
from dlrm_bench.bench.stats.variance import Levels, agree_by_luck, levels

_DRIFT_LEFT = 0.5  # runs by which one side may come later in the mean, for pairs to be compared as such
_CLOCK_TOLERANCE = 0.02  # between the median SM clocks of two runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """B compared with A."""

    name: str
    """What is compared, where several are: a rung's name, or B's label."""
    a: Side
    b: Side
    comparison: Comparison
    p_value: float
    """Probability under no difference in `estimate`, corrected for all comparisons asked for together (Holm)."""
    comparisons: int
    """How many these were."""
    differences: list[str]
    """What should be equal and is not, and caveats of a side; --strict refuses these."""
    notes: list[str]
    """What this comparison cannot know."""

    @property
    def per_sample(self) -> bool:
        """Whether the batch sizes differ, so that times of a sample are compared, and not of an iteration."""
        return _per_sample(self.a, self.b)

    @property
    def metric(self) -> Metric:
        """The metric that the verdict is about: the median, or the mean, of which throughput and logs are made."""
        return _metric(self.a, self.b)

    @property
    def estimate(self) -> Estimate:
        """The time of B over that of A which the verdict is about."""
        return _estimate(self.a, self.b, self.comparison)

    @property
    def ratio(self) -> Ratio:
        """The estimate with its 95 % interval."""
        return self.estimate.ratio()

    @property
    def verdict(self) -> Verdict:
        """What is proven of B. One run on a side proves nothing: two runs of the same program differ too."""
        if not self.comparison.between_runs or not self.p_value < 1 - CONFIDENCE:
            return UNPROVEN
        return "slower" if self.estimate.log > 0 else "faster"

    @property
    def detectable(self) -> float | None:
        """The smallest difference that so many runs, which differ like these, find; None with one run on a side."""
        if not self.comparison.between_runs:
            return None
        runs = min(self.comparison.runs)
        return detectable(self.spread_between, runs, self.comparison.paired, self.comparisons)

    def runs_needed(self, difference: float) -> int | None:
        """Runs a side that find a difference of this size (0.02: 2 %); None if it takes too many, or is not known."""
        if not self.comparison.between_runs:
            return None
        return runs_needed(self.spread_between, difference, self.comparison.paired, self.comparisons)

    def spread_of_runs(self) -> tuple[Levels, Levels]:
        """What A's and B's runs differ by, level by level."""
        a, b = (levels(side.series, self.metric, side.machines) for side in (self.a, self.b))
        return a, b

    @property
    def spread_between(self) -> float:
        """Standard deviation of several runs' logarithms: of the pairs' differences, or of both sides together."""
        logs = [np.log([summary_statistics(run)[self.metric] for run in side.series]) for side in (self.a, self.b)]
        if self.comparison.paired:
            return float(np.std(logs[1] - logs[0], ddof=1))
        freedom = sum(map(len, logs)) - 2
        return float(np.sqrt(sum(float(np.var(each, ddof=1)) * (len(each) - 1) for each in logs) / freedom))


def compare_paths(paths: Sequence[Path]) -> list[Result]:
    """Compares what the paths name: every side with the first, or the rungs of two ladders by their names.

    ValueError, naming the path, if one is no side, or if only one of two is a ladder.
    """
    ladders = [rungs_of(path) for path in paths]
    if len(paths) == 2 and ladders[0] is not None and ladders[1] is not None:
        return _compare_ladders(paths, ladders[0], ladders[1])
    read = {path: read_side(path) for path in dict.fromkeys(paths)}
    first, *others = [read[path] for path in paths]
    return compare_all([(side.label, first, side) for side in others])


def compare_all(pairs: Sequence[tuple[str, Side, Side]]) -> list[Result]:
    """Compares the (name, A, B) that are looked at together; p values are corrected for their number."""
    results = [compare_sides(a, b, name) for name, a, b in pairs]
    corrected = holm([result.p_value for result in results])
    results = [replace(r, p_value=p, comparisons=len(pairs)) for r, p in zip(results, corrected, strict=True)]
    return [replace(result, notes=[*_notes(result)]) for result in results]


def compare_sides(a: Side, b: Side, name: str = "") -> Result:
    """Compares B with A; pair by pair where their runs alternate in time in a balanced order, so that drift cancels."""
    order = _order(a.finished, b.finished)
    comparison = compare(a.series, b.series, paired=_alternate(order) and abs(drift_left(order)) < _DRIFT_LEFT)
    result = Result(
        name=name or b.label,
        a=a,
        b=b,
        comparison=comparison,
        p_value=_estimate(a, b, comparison).p_value,
        comparisons=1,
        differences=[*_differences(a, b)],
        notes=[],
    )
    return replace(result, notes=[*_notes(result)])


def _compare_ladders(paths: Sequence[Path], a: dict[str, Side], b: dict[str, Side]) -> list[Result]:
    shared = [name for name in a if name in b]
    if not shared:
        raise ValueError(
            f"{paths[0]} and {paths[1]} have no rung in common ({', '.join(a)}; {', '.join(b)}): name two rungs, "
            f"such as {paths[0] / next(iter(a))}"
        )
    results = compare_all([(name, a[name], b[name]) for name in shared])
    alone = [name for name in a | b if name not in shared]
    if not alone:
        return results
    said = f"rungs that one of the ladders alone has are left out: {', '.join(alone)}"
    return [replace(result, notes=[*result.notes, said]) for result in results]


def _per_sample(a: Side, b: Side) -> bool:
    return None not in (a.global_batch_size, b.global_batch_size) and a.global_batch_size != b.global_batch_size


def _metric(a: Side, b: Side) -> Metric:
    return "mean" if a.mean_only or b.mean_only or _per_sample(a, b) else "p50"


def _estimate(a: Side, b: Side, comparison: Comparison) -> Estimate:
    estimate = comparison.estimates[_metric(a, b)]
    if not _per_sample(a, b):
        return estimate
    assert a.global_batch_size is not None
    assert b.global_batch_size is not None
    return estimate.scaled(a.global_batch_size / b.global_batch_size)


def _differences(a: Side, b: Side) -> Iterator[str]:
    for name in a.settings | b.settings:
        left, right = (side.settings.get(name) or absent(side.settings, name) for side in (a, b))
        for side, values in ((a, left), (b, right)):
            if len(values) > 1:
                yield f"{name} varies within {side.label}: {_brief(values)}"
        if not left or not right or left == right:
            continue
        if name == SM_CLOCK and abs(left[0] / right[0] - 1) < _CLOCK_TOLERANCE:
            continue
        left, right = _where_they_differ(left, right)
        yield f"{name} differs: {_brief(left)} in {a.label}, {_brief(right)} in {b.label}"
    shared = set(a.keys) & set(b.keys)
    if shared:
        yield f"{len(shared)} runs are on both sides, and equal themselves: {a.label}, {b.label}"
    yield from a.warnings
    yield from b.warnings


def _where_they_differ(left: list[Any], right: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the values of a setting on both sides; of one with fields, those fields only that differ."""
    if not all(len(values) == 1 and isinstance(values[0], dict) for values in (left, right)):
        return left, right
    names = [name for name in left[0] | right[0] if left[0].get(name) != right[0].get(name)]
    a, b = ([{name: values[0].get(name) for name in names}] for values in (left, right))
    return a, b


def _brief(values: list[Any]) -> str:
    text = ", ".join(" + ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)
    return text if len(text) < 60 else f"{text[:57]}..."


def _notes(result: Result) -> Iterator[str]:
    a, b, comparison = result.a, result.b, result.comparison
    if result.per_sample:
        yield (
            "the batch sizes differ, so the verdict is about samples per second: the mean time of an iteration over "
            "its samples; times of an iteration stand beside it without one"
        )
    if not comparison.between_runs:
        yield (
            f"runs: {comparison.runs[0]} and {comparison.runs[1]}. With one run on a side it cannot be known how much "
            "runs of the same program differ: the intervals describe these runs only and prove nothing about programs"
        )
    else:
        yield from _notes_on_order(a, b, comparison.paired)
        yield from _notes_on_runs(result)
    if a.mean_only or b.mean_only:
        yield (
            "an MLPerf log gives the mean over a whole run, evaluations left out, and neither percentiles nor the "
            "machine's state: whether the work was the same is for the reader to judge"
        )
    for side in (a, b):
        if not side.mean_only:
            yield from _notes_on_windows(side, alone=not comparison.between_runs)


def _notes_on_order(a: Side, b: Side, paired: bool) -> Iterator[str]:
    if paired or not a.finished or not b.finished:
        return
    order = _order(a.finished, b.finished)
    if a.finished[-1] < b.finished[0] or b.finished[-1] < a.finished[0]:
        yield (
            "all runs of one side came before those of the other: a drift of the machine would look like a difference; "
            "alternate them, as `dlrm-bench ladder` does"
        )
    elif _alternate(order):
        first = (a if drift_left(order) > 0 else b).label
        yield (
            f"the runs alternate, but {first} came first in most pairs: a drift of the machine would look like a "
            "difference, so they are not compared pair by pair; swap every other pair (A B B A), as `dlrm-bench "
            "ladder` does"
        )


def _notes_on_runs(result: Result) -> Iterator[str]:
    runs = f"{result.comparison.runs[0]} and {result.comparison.runs[1]} runs"
    needed = result.runs_needed(abs(result.ratio.value - 1))
    assert result.detectable is not None
    yield f"{runs} that differ like these {finds(result.detectable)}" + (
        f"; one of the size seen here takes about {needed} a side"
        if needed and needed > min(result.comparison.runs)
        else ""
    )
    if not (result.a.mean_only or result.b.mean_only):
        spread = result.spread_of_runs()
        a, b = (each.in_words() for each in spread)
        yield f"a run's {_WORDS[result.metric]} varies by level (standard deviation): A {a}; B {b}"
        within = _by_iterations(spread, result.comparison.paired)
        if agree_by_luck(result.spread_between, within, min(result.comparison.runs)):
            yield (
                f"runs agree better ({result.spread_between:.2%}) than their own iterations let expect ({within:.2%}): "
                "by luck, so that the interval may be too narrow; take more runs"
            )
    several = sorted({machine for side in (result.a, result.b) for machine in side.machines})
    if len(several) > 1:
        yield (
            f"runs on {len(several)} machines: the interval is about these machines, and other machines of the same "
            "description may differ by more"
        )


def _by_iterations(spread: tuple[Levels, Levels], paired: bool) -> float:
    """What runs would spread by if iterations were all that makes them differ; of pairs, their differences."""
    squares = [(each.iteration or 0.0) ** 2 for each in spread]
    return float(np.sqrt(sum(squares) / (1 if paired else 2)))


_WORDS: dict[Metric, str] = {"p50": "median", "mean": "mean", "p90": "p90", "p99": "p99"}


def _notes_on_windows(side: Side, alone: bool) -> Iterator[str]:
    """What is wrong with the timed windows of a side's runs: not steady, too short."""
    drifts = [drift_within(run) for run in side.series]
    changes = [drift.change for drift in drifts if drift is not None and not drift.steady]
    if changes:
        largest = max(changes, key=abs)
        yield (
            f"{side.label}: {len(changes)} of {len(drifts)} runs were not steady: from the first quarter of its timed "
            f"iterations to the last, the median changed by up to {largest:+.1%}; a longer window (--min-time) tells "
            "more"
        )
    if alone and any(spread_of_log(run, "p50").too_short for run in side.series):
        yield (
            f"{side.label}: the series is too short for its autocorrelation, and its interval may be too narrow: time "
            "more iterations"
        )
    short = [len(run) for run in side.series if len(run) < 100]
    if short:
        yield f"{side.label}: p99 of a run of {min(short)} iterations is little more than its largest value"


def _order(a: Sequence[str], b: Sequence[str]) -> list[int]:
    """Sides of all runs, 0 for A and 1 for B, in the order in which they ended; empty where that is not known."""
    return [side for _, side in sorted([*((time, 0) for time in a), *((time, 1) for time in b)])]


def _alternate(order: Sequence[int]) -> bool:
    """Whether each pair of runs that are neighbours in time has one run of each side."""
    pairs = list(zip(order[::2], order[1::2], strict=False))
    return bool(pairs) and len(order) % 2 == 0 and all(first != second for first, second in pairs)
