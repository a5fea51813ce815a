"""Statistics of how often a batch names the same rows, which determines the times of a table's lookup and update."""

import functools
import math
from dataclasses import dataclass

import numpy as np

# Number of first ids that are summed individually; all others are grouped in bins of a geometric series.
_SINGLE, _BINS = 1000, 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class IdStatistics:
    """The distribution of a feature's ids over its table."""

    skew: float = 0.0
    """Zipf exponent of the first id of a sample; 0 is uniform."""
    expanded: bool = False
    """Whether the other ids are a fixed, uniform function of the first one, as in MLPerf's data; otherwise they are
    drawn independently for each sample."""

    def distinct_rows(self, rows: int, hot: int, samples: int) -> float:
        """Returns the expected number of distinct rows of a table that `samples` bags of `hot` ids name."""
        firsts = _distinct_firsts(rows, samples, self.skew)
        others = (firsts if self.expanded else samples) * (hot - 1)
        return firsts - (rows - firsts) * math.expm1(-others / rows)


UNIFORM = IdStatistics()


@functools.cache
def _distinct_firsts(rows: int, samples: int, skew: float) -> float:
    """Returns the expected number of distinct ids among `samples` of distributions.zipf_ids: the sum of
    1 - exp(-samples * probability) over all ids.

    The distribution function of the density x^-skew on [1, rows + 1) is (x^(1-a) - 1) / (L^(1-a) - 1), at 1 its limit.
    """
    end = rows + 1.0
    singles = np.arange(1.0, min(end, _SINGLE) + 1.0)
    edges = np.union1d(singles[singles <= end], np.geomspace(min(end, _SINGLE), end, _BINS))
    power = 1.0 - skew
    logs = np.log(edges)
    log_end = math.log(end)
    below = logs / log_end if abs(power) * log_end < 1e-9 else np.expm1(power * logs) / math.expm1(power * log_end)
    widths, shares = np.diff(edges), np.diff(below)
    named = widths > 0
    widths, shares = widths[named], shares[named]
    return float(-(widths * np.expm1(-samples * shares / widths)).sum())
