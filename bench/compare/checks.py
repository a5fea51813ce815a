"""Checks for CI: a regression is excluded, two programs are equivalent, or the runs decide neither."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlrm_bench.bench.compare.comparison import Result
from dlrm_bench.bench.compare.notes import TOO_COARSE

Outcome = Literal["passed", "failed", "not enough runs", "no verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of a check of one comparison."""

    outcome: Outcome
    text: str
    """The outcome in a sentence."""


def check_regression(result: Result, limit: float) -> Check:
    """Passes if a regression of `limit` (0.02: 2 %) is excluded, fails if it is not excluded and B is proven slower.

    Excluded: a one-sided test at 5 % (3 % for `--rounds auto`) rejects that B takes 1 + limit times A's time or more.
    Otherwise undecided: too few runs.
    """
    refused = _refused(result)
    if refused is not None:
        return refused
    ratio = result.estimate.ratio(_one_sided(result))
    most = f"at {result.confidence * 100:.0f} % confidence at most {_more_or_less(ratio.high - 1)}"
    text = f"B takes {_more_or_less(ratio.value - 1)} time, {most}"
    if result.estimate.p_at_least(1 + limit) < 1 - result.confidence:
        return Check(outcome="passed", text=f"a regression of {limit:.2%} is excluded: {text}")
    if result.verdict == "slower":
        text = f"B is proven slower, and a regression of {limit:.2%} is not excluded: {text}"
        return Check(outcome="failed", text=text)
    return _undecided(result, limit, f"B is not proven slower, a regression of {limit:.2%} not excluded: {text}")


def check_equivalence(result: Result, margin: float) -> Check:
    """Passes if B's time is proven to be within `margin` (0.02: 2 %) of A's, fails if it is proven not to be.

    Two one-sided tests at 5 % each (3 % for `--rounds auto`), against 1 + margin and its reciprocal; proven not: the
    interval of the comparison is outside.
    """
    refused = _refused(result)
    if refused is not None:
        return refused
    ratio = result.estimate.ratio(_one_sided(result))
    interval = f"{_one_sided(result) * 100:.0f} % interval"
    text = f"the {interval} of B's time over A's is {ratio.low:.4f} to {ratio.high:.4f}"
    if result.estimate.p_not_equivalent(margin) < 1 - result.confidence:
        return Check(outcome="passed", text=f"A and B are equivalent within {margin:.2%}: {text}")
    whole = result.estimate.ratio(result.confidence)
    if whole.low > 1 + margin or whole.high < 1 / (1 + margin):
        return Check(outcome="failed", text=f"A and B differ by more than {margin:.2%}: {text}")
    return _undecided(result, margin, f"equivalence within {margin:.2%} is neither proven nor excluded: {text}")


def worst(checks: Sequence[Check]) -> Outcome:
    """Returns the worst outcome of the checks."""
    outcomes = {check.outcome for check in checks}
    return next((o for o in ("failed", "no verdict", "not enough runs") if o in outcomes), "passed")


def percentage(flag: str, text: str | None) -> float | None:
    """Returns the fraction of a percentage: 0.02 for '2%' or '2'; None for None."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 10:
        raise ValueError(f"{flag} {text!r} is not a percentage: write one such as 2%")
    return value


def _one_sided(result: Result) -> float:
    """Returns the confidence of the interval that a one-sided test gives: 90 % have 5 % above them."""
    return 2 * result.confidence - 1


def _refused(result: Result) -> Check | None:
    """Returns the outcome of a check that these runs cannot answer, with one run per side or without a verdict; else
    None."""
    if not result.comparison.between_runs or math.isnan(result.estimate.error):
        a, b = result.comparison.runs
        text = (
            f"{a} and {b} runs: at least two per side are needed, because one run does not show how much runs of the "
            "same program differ"
        )
        return Check(outcome="not enough runs", text=text)
    if result.estimate.too_coarse and not result.confounded:
        text = f"the timings are too coarse, as runs agree to the last digit: {TOO_COARSE}"
        return Check(outcome="not enough runs", text=text)
    return Check(outcome="no verdict", text="; ".join(result.confounded)) if result.confounded else None


def _undecided(result: Result, size: float, text: str) -> Check:
    needed = result.runs_needed(size) if size > 0 else None
    more = f"; about {needed} runs per side would decide it" if needed and needed > min(result.comparison.runs) else ""
    return Check(outcome="not enough runs", text=text + more)


def _more_or_less(change: float) -> str:
    return f"{abs(change):.2%} {'more' if change > 0 else 'less'}"
