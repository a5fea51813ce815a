"""The samples of a rank's stack: milliseconds of an iteration below a line, with their error."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import NamedTuple

from .rank_file import Frame, RankFile

_Z = 1.959964
"""Quantile of the normal distribution for 95 %."""


class Estimate(NamedTuple):
    """Milliseconds of an iteration, with a 95 % interval over the iterations."""

    ms: float
    half_ms: float
    """Half of the interval's length."""

    @property
    def low(self) -> float:
        """Lower end, 0 at least."""
        return max(0.0, self.ms - self.half_ms)

    @property
    def high(self) -> float:
        """Upper end."""
        return self.ms + self.half_ms


class Sample(NamedTuple):
    """One sample of the loop's stack."""

    iteration: int
    stack: int
    """Its number in `Samples.stacks`."""
    ms: float
    """Time that it stands for, in an iteration without the sampler."""
    running_ms: float
    """Time within it that the loop's thread ran."""
    coreless_ms: float
    """Time within it that the thread could have run and had no core: after it lost one, or when it woke."""

    @property
    def blocked_ms(self) -> float:
        """Time within it that the thread was blocked."""
        return self.ms - self.running_ms - self.coreless_ms

    def times(self, share: float) -> "Sample":
        """Returns the sample with a share of its times."""
        return self._replace(
            ms=self.ms * share, running_ms=self.running_ms * share, coreless_ms=self.coreless_ms * share
        )


class Samples:
    """The samples of one rank."""

    def __init__(self, rank: RankFile) -> None:
        sampled = rank["sampled"]
        self.iterations = sampled["iterations"]
        self.stacks: list[list[Frame]] = [[sampled["frames"][i] for i in stack] for stack in sampled["stacks"]]
        starts = sampled["starts_us"]
        self.times_ms = [(end - begin) / 1000 for begin, end in pairwise(starts)]
        self.scale = rank["plain"]["ms"] / sampled["ms"]
        """Factor on times of the window: the sampler makes iterations longer."""
        taken = [
            (bisect_right(starts, at) - 1, stack, us, min(running, us), coreless)
            for at, stack, us, running, coreless in sampled["samples"]
            if starts[0] <= at < starts[-1] and sampled["stacks"][stack]
        ]
        self.samples = [
            Sample(i, stack, us / 1000, running / 1000, coreless / 1000).times(self.scale)
            for i, stack, us, running, coreless in taken
        ]
        self._period_ms = sampled["period_us"] / 1000 * self.scale

    def estimate(
        self, chosen: Sequence[Sample], time: Callable[[Sample], float] = lambda sample: sample.ms
    ) -> Estimate:
        """Time of an iteration that the chosen samples stand for."""
        each = [0.0] * self.iterations
        for sample in chosen:
            each[sample.iteration] += time(sample)
        # Without samples, the interval is that of one sample: work shorter than a period may be missed every time.
        estimate = estimate_of(each)
        return estimate._replace(half_ms=max(estimate.half_ms, self._period_ms / len(each)))


def estimate_of(each: Sequence[float]) -> Estimate:
    """The mean over iterations of milliseconds of each, with its interval."""
    n = len(each)
    return Estimate(fmean(each), student_t(n - 1) * stdev(each) / math.sqrt(n) if n > 1 else math.inf)


def student_t(degrees: int) -> float:
    """The 97.5 % point of Student's t, to 1 % from 2 degrees on (Abramowitz and Stegun, 26.7.5)."""
    z, v = _Z, degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
