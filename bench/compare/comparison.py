"""Comparison of A and B: the difference that records and MLPerf logs prove, and its limits.

dlrm-bench compare A B [...]: compares every later side with the first, or two ladders rung by rung.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_bench.bench.compare.comparability import SHOULD_BE_EQUAL, SM_CLOCK, absent
from dlrm_bench.bench.compare.notes import notes_on
from dlrm_bench.bench.compare.order import compare_in_order, confounded
from dlrm_bench.bench.compare.sides import Side, read_side, rungs_of
from dlrm_bench.bench.stats.repetitions import detectable_range, holm, runs_needed
from dlrm_bench.bench.stats.series import METRICS, Metric
from dlrm_bench.bench.stats.statistics import NO_VERDICT, UNPROVEN, Comparison, Estimate, Ratio, Verdict
from dlrm_bench.bench.stats.variance import Levels, levels

_CLOCK_TOLERANCE = 0.02  # between the median SM clocks of two runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """B compared with A."""

    name: str
    """Name of the comparison among several: a rung's name, or B's label."""
    a: Side
    b: Side
    comparison: Comparison
    estimate: Estimate
    """B's time over A's, the estimate of the verdict."""
    clock: Estimate | None = None
    """B's time by the clock over A's, the basis of samples per second; None in the comparisons of a ladder's rungs."""
    p_value: float
    """p value of `estimate`, corrected for all comparisons made together (Holm)."""
    comparisons: int = 1
    """Number of comparisons made together."""
    confounded: Sequence[str] = ()
    """Differences other than the program (bench/compare/order.py), which rule out a verdict."""
    references: tuple[Side, Side] | None = None
    """Runs of one program made alongside A's and B's; their difference is subtracted from the estimate."""
    differences: Sequence[str] = ()
    """Settings that should be equal and are not, and caveats of a side; --strict refuses these."""
    notes: Sequence[str] = ()
    """Limits of this comparison, in sentences."""

    @property
    def per_sample(self) -> bool:
        """Whether the batch sizes differ, so that times per sample are compared instead of times per iteration."""
        return _per_sample(self.a, self.b)

    @property
    def metric(self) -> Metric:
        """The metric of the verdict: the median, or the mean if a log has no other.

        If batch sizes differ, the verdict is about samples per second, by the clock.
        """
        return _metric(self.a, self.b)

    @property
    def of_logs(self) -> bool:
        """Whether a side is an MLPerf log, which has the time by the clock alone: the mean of both is then that."""
        return _of_logs(self.a, self.b)

    @property
    def confidence(self) -> float:
        """Confidence of the interval and of the verdict: higher if the spread of the runs determined their number."""
        return max(self.a.confidence, self.b.confidence)

    @property
    def speedup(self) -> Ratio:
        """A's time over B's, with its interval."""
        return self.estimate.speedup(self.confidence)

    @property
    def verdict(self) -> Verdict:
        """The proven difference. One run per side proves nothing: two runs of the same program differ too."""
        if not self.comparison.between_runs:
            return UNPROVEN
        if self.confounded:
            return NO_VERDICT
        if not self.p_value < 1 - self.confidence:
            return UNPROVEN
        return "slower" if self.estimate.log > 0 else "faster"

    @property
    def detectable(self) -> tuple[float, float, float] | None:
        """The smallest difference that this number of runs with this spread finds, as (low, value, high) of its 95 %
        interval; None with one run per side, and if the timings are too coarse."""
        if not self.comparison.between_runs or self.estimate.too_coarse:
            return None
        return detectable_range(self.estimate, self.comparisons, self.confidence)

    def runs_needed(self, difference: float) -> int | None:
        """Returns the number of runs per side that find a difference of this size (0.02: 2 %); None if too many, or
        unknown, as after one run per side or from timings that are too coarse."""
        if not self.comparison.between_runs or self.estimate.too_coarse:
            return None
        spread = self.comparison.spread(self.estimate)
        return runs_needed(spread, difference, self.comparison.paired, self.comparisons, self.confidence)

    def spread_of_runs(self) -> tuple[Levels, Levels]:
        """Returns the spread of A's and of B's runs, level by level."""
        a, b = (levels(side.series, self.metric, side.machines) for side in (self.a, self.b))
        return a, b


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of a comparison."""

    accept_blocked_order: bool = False
    """Give a verdict whatever the order of the runs and their machines."""
    reference: tuple[Path, Path] | None = None
    """Runs of one program and configuration, made alongside A's and alongside B's."""


_USUAL = Terms()


def compare_paths(paths: Sequence[Path], terms: Terms = _USUAL) -> list[Result]:
    """Compares the sides that the paths name: every side with the first, or the rungs of two ladders by their names.

    ValueError, naming the path, if one is no side, if only one of two is a ladder, or if a reference cannot be used.
    """
    ladders = [rungs_of(path) for path in paths]
    if terms.reference is not None and (len(paths) != 2 or None not in ladders):
        raise ValueError("--reference is for two sides: dlrm-bench compare OLD NEW --reference REF_OLD REF_NEW")
    if len(paths) == 2 and ladders[0] is not None and ladders[1] is not None:
        return _compare_ladders(paths, ladders[0], ladders[1], terms)
    read = {path: read_side(path) for path in dict.fromkeys(paths)}
    first, *others = [read[path] for path in paths]
    return compare_all([(side.label, first, side) for side in others], terms)


def compare_all(pairs: Sequence[tuple[str, Side, Side]], terms: Terms = _USUAL) -> list[Result]:
    """Compares each (name, A, B); p values are corrected for the number of all pairs."""
    results = [_compared(a, b, name, terms) for name, a, b in pairs]
    corrected = holm([result.p_value for result in results])
    return [
        _noted(replace(result, p_value=p, comparisons=len(pairs)), terms)
        for result, p in zip(results, corrected, strict=True)
    ]


def _compared(a: Side, b: Side, name: str, terms: Terms) -> Result:
    references, reasons = None, [*confounded(a, b)]
    if terms.reference is not None:
        references = read_side(terms.reference[0]), read_side(terms.reference[1])
        _check_references(references)
        beside = [(side, reference) for side, reference in zip((a, b), references, strict=True)]
        reasons = [f"{side.label}: {why}" for side, reference in beside for why in confounded(reference, side)]
    of_clock = _difference(*_clocked(a, b), None if references is None else _clocked(*references))
    comparison = of_clock if _of_logs(a, b) else _difference(a, b, references)
    clock = _clock(of_clock, comparison)
    estimate = clock.scaled(_samples(a, b)) if _per_sample(a, b) else comparison.estimates[_metric(a, b)]
    return Result(
        name=name or b.label,
        a=a,
        b=b,
        comparison=comparison,
        estimate=estimate,
        clock=clock,
        p_value=estimate.p_value,
        confounded=reasons,
        references=references,
        differences=[*_differences(a, b)],
    )


def _noted(result: Result, terms: Terms) -> Result:
    """Returns the result with its notes, and without reasons against a verdict if the user accepts them."""
    accepted = result.confounded if terms.accept_blocked_order else ()
    result = replace(result, confounded=() if accepted else result.confounded)
    return replace(result, notes=[*notes_on(result, accepted)])


def _difference(a: Side, b: Side, references: tuple[Side, Side] | None) -> Comparison:
    """Returns B over A; with references, B over its reference less A over its reference."""
    if references is None:
        return compare_in_order(a, b)
    old, new = references
    return _over_reference(b, new).minus(_over_reference(a, old))


def _clock(of_clock: Comparison, comparison: Comparison) -> Estimate:
    """Returns the estimate of the time by the clock. One run has a single such time, so its error is that of the mean
    latency."""
    found, of_mean = of_clock.estimates["mean"], comparison.estimates["mean"]
    return found if comparison.between_runs else replace(found, error=of_mean.error, freedom=of_mean.freedom)


def _clocked(*sides: Side) -> tuple[Side, Side]:
    """Returns sides whose runs are their time by the clock alone."""
    a, b = (replace(side, series=[np.array([ms]) for ms in side.clock_ms]) for side in sides)
    return a, b


def _over_reference(side: Side, reference: Side) -> Comparison:
    """Returns the comparison of a side with its reference; no difference, without error, if both are the same runs."""
    if side.keys and set(side.keys) == set(reference.keys):
        n = len(side.series)
        return Comparison(
            estimates={metric: Estimate(0.0, 0.0, math.inf) for metric in METRICS},
            runs=(n, n),
            paired=False,
            between_runs=n > 1,
        )
    return compare_in_order(reference, side)


def _check_references(references: tuple[Side, Side]) -> None:
    """Raises ValueError unless both are runs of one program, with one configuration."""
    old, new = references
    for side in references:
        if len(side.programs) != 1:
            raise ValueError(f"--reference {side.label}: name records of one program, not of {len(side.programs)}")
    (a,), (b,) = old.programs, new.programs
    found = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    configured = [name for name, field in SHOULD_BE_EQUAL.items() if field.startswith("config.")]
    found += [name for name in configured if old.settings.get(name) != new.settings.get(name)]
    if found:
        raise ValueError(
            f"--reference: {old.label} and {new.label} must be runs of one commit and configuration, but differ in "
            f"{', '.join(found)}: `dlrm-bench rerun {old.label}` makes such runs"
        )


def _compare_ladders(paths: Sequence[Path], a: dict[str, Side], b: dict[str, Side], terms: Terms) -> list[Result]:
    shared = [name for name in a if name in b]
    if not shared:
        raise ValueError(
            f"{paths[0]} and {paths[1]} have no rung in common ({', '.join(a)}; {', '.join(b)}): name two rungs, "
            f"such as {paths[0] / next(iter(a))}"
        )
    results = compare_all([(name, a[name], b[name]) for name in shared], terms)
    alone = [name for name in a | b if name not in shared]
    if not alone:
        return results
    note = f"rungs that only one of the ladders has are left out: {', '.join(alone)}"
    return [replace(result, notes=[*result.notes, note]) for result in results]


def _per_sample(a: Side, b: Side) -> bool:
    return None not in (a.global_batch_size, b.global_batch_size) and a.global_batch_size != b.global_batch_size


def _metric(a: Side, b: Side) -> Metric:
    return "mean" if _of_logs(a, b) or _per_sample(a, b) else "p50"


def _of_logs(a: Side, b: Side) -> bool:
    return a.mean_only or b.mean_only


def _samples(a: Side, b: Side) -> float:
    assert a.global_batch_size is not None
    assert b.global_batch_size is not None
    return a.global_batch_size / b.global_batch_size


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
        yield f"{len(shared)} runs are on both sides, and are compared with themselves: {a.label}, {b.label}"
    yield from a.warnings
    yield from b.warnings


def _where_they_differ(left: list[Any], right: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the values of a setting on both sides; of a setting with fields, only the fields that differ."""
    if not all(len(values) == 1 and isinstance(values[0], dict) for values in (left, right)):
        return left, right
    names = [name for name in left[0] | right[0] if left[0].get(name) != right[0].get(name)]
    a, b = ([{name: values[0].get(name) for name in names}] for values in (left, right))
    return a, b


def _brief(values: list[Any]) -> str:
    text = ", ".join(" + ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)
    return text if len(text) < 60 else f"{text[:57]}..."
