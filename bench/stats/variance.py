"""The spread of runs of one program, level by level: iterations, processes, machines.

The levels are those of Kalibera and Jones (Rigorous Benchmarking in Reasonable Time, ISMM 2013): each repetition of a
higher level repeats the lower ones, and more of a lower level cannot make up for the spread of a higher one.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .series import CONFIDENCE, Metric, spread_of_log, summary_statistics
from .statistics import NO_SPREAD


@dataclass(frozen=True, slots=True)
class Levels:
    """Standard deviation that each level adds to the logarithm of one run's metric; None if it is unknown."""

    iteration: float | None
    """Part due to the noise of the run's iterations, which longer runs reduce."""
    process: float | None
    """Part due to another process at another time, which only more runs reduce."""
    machine: float | None
    """Part due to another machine, which only more machines reduce."""

    def in_words(self) -> str:
        """Returns text such as 'iterations 0.4 %, processes 3.1 %, machines unknown'."""
        named = (("iterations", self.iteration), ("processes", self.process), ("machines", self.machine))
        return ", ".join(f"{name} {'unknown' if value is None else f'{value:.2%}'}" for name, value in named)


def levels(runs: Sequence[np.ndarray], metric: Metric, machines: Sequence[Hashable]) -> Levels:
    """Splits the variance of runs' log metric by level.

    runs: latencies [n] of each. machines: the machine of each run. The iterations' share is a run's own error
    (bench/stats/series.py) in place of Kalibera and Jones's variance over n, because iterations are correlated; the
    rest follows their section 6.2: the share of a level is the variance seen there less the part that the levels below
    explain, and never below zero.
    """
    logs = np.array([math.log(summary_statistics(run)[metric]) for run in runs])
    errors = np.array([spread_of_log(run, metric).error for run in runs])
    within = None if np.isnan(errors).any() else float((errors**2).mean())
    by_machine = [logs[[m == machine for m in machines]] for machine in dict.fromkeys(machines)]
    freedom = len(logs) - len(by_machine)
    if freedom < 1:
        return Levels(_root(within), None, None)
    between = sum(float(((each - each.mean()) ** 2).sum()) for each in by_machine) / freedom
    over_machines = None
    if len(by_machine) > 1:
        means = np.array([each.mean() for each in by_machine])
        a_mean = between * float(np.mean([1 / len(each) for each in by_machine]))
        over_machines = max(0.0, float(means.var(ddof=1)) - a_mean)
    return Levels(_root(within), _root(max(0.0, between - (within or 0.0))), _root(over_machines))


def agree_by_luck(between: float, within: float, freedom: float) -> bool:
    """Whether a spread between runs this small has a probability below 5 % if only their iterations make them differ.

    between: standard deviation of the runs' log metric, or of their pairs' differences, with `freedom` degrees of
    freedom. within: the part of it due to the noise of iterations. An interval from such runs is too narrow, and always
    if there is no spread.
    """
    if between < NO_SPREAD or within == 0:
        return between < NO_SPREAD
    from scipy.special import chdtr  # a quarter of a second

    return float(chdtr(freedom, freedom * (between / within) ** 2)) < 1 - CONFIDENCE


def _root(variance: float | None) -> float | None:
    return None if variance is None else math.sqrt(variance)
