"""Change points of a series: where its mean changes, with what confidence, and between which points.

Circular binary segmentation (Olshen, Venkatraman, Lucito and Wigler, Biostatistics 5(4), 2004): the arc of points in a
segment whose mean differs most from that of the rest is cut out, as long as a permutation test finds so large a
difference too rare. An arc that reaches an end of the segment is one change, any other arc two. Segments are tested
together, as by Matteson and James (Journal of the American Statistical Association 109(505), 2014), so that one test at
a level decides on each further change. The test is exact for independent points of any one distribution, whatever its
tails, but not for points that drift by themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .series import CONFIDENCE
from .statistics import Estimate, welch

FEWEST_POINTS = 8
"""Minimum number of points for a change: with fewer, hardly any arrangement is rarer than one in twenty."""
_PERMUTATIONS = 999
_SHORTEST = 2  # points of a segment
_LIKELIHOOD = 7.35
"""95 % quantile of the likelihood ratio of a change's position (Hansen, Econometrica 68(3), 2000, table 1)."""
_AT_ONCE = 4_000_000  # sums that are held in memory


_Arcs = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the mean."""

    at: int
    """Index of the first point after the change."""
    low: int
    high: int
    """Ends of a 95 % interval of `at`."""
    p_value: float
    """p value of the change when it was found: changes are found one after another, each at the same level."""
    estimate: Estimate
    """Mean of the points from this change to the next, less the mean from the previous change to this one (Welch)."""


def change_points(values: Sequence[float], level: float = 1 - CONFIDENCE, seed: int = 0) -> list[Change]:
    """Returns the changes of the mean of a series [n], in order; none below FEWEST_POINTS.

    level: probability of any change in a series without one. seed: of the permutations.
    """
    series, rng = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    cuts: dict[int, float] = {}  # p values, by place
    while len(series) >= FEWEST_POINTS:
        segments = list(pairwise([0, *sorted(cuts), len(series)]))
        # Shuffled within each segment: known changes stay, and all segments are tested together.
        shuffled = (rng.permuted(np.tile(series[a:b], (_PERMUTATIONS, 1)), axis=1) for a, b in segments)
        by_chance = np.max([_rarity(rows) for rows in shuffled], axis=0)
        # One change before two: an arc within a segment is larger by chance, and its other end is tested next.
        for arcs in (_steps, _arcs):
            rarest, first, last = max((_rarity(series[a:b][None], arcs)[0], a, b) for a, b in segments)
            p_value = (1 + int((by_chance >= rarest).sum())) / (1 + _PERMUTATIONS)
            if rarest > 0 and p_value <= level:
                squares, *places = arcs(series[first:last][None])
                own = (int(place[np.argmax(squares[0])]) for place in places)
                cuts.update({first + at: p_value for at in own if 0 < at < last - first})
                break
        else:
            break
    found = [0, *sorted(cuts), len(series)]
    return [_change(series, *around, cuts[around[1]]) for around in zip(found, found[1:], found[2:], strict=False)]


def _change(series: np.ndarray, before: int, at: int, after: int, p_value: float) -> Change:
    """Returns the change at `at`, between its neighbours `before` and `after`.

    Its interval has the positions at which one step explains the points between these nearly as well.
    """
    places = range(before + 1, after)
    left = {k: _squares(series[before:k]) + _squares(series[k:after]) for k in places}
    least = min(left.values())
    likely = [k for k in places if (after - before - 2) * (left[k] - least) <= _LIKELIHOOD * least]
    low, high = min(at, *likely), max(at, *likely)
    return Change(at, low, high, p_value, welch(series[before:at], series[at:after]))


def _squares(values: np.ndarray) -> float:
    return float(((values - values.mean()) ** 2).sum())


def _arcs(rows: np.ndarray) -> _Arcs:
    """Returns for each row [k, n] and arc the sum of squares between the arc and the rest, [k, arcs], and the arcs'
    begins and ends, [arcs]. No arc leaves a segment of fewer than _SHORTEST points."""
    n = rows.shape[1]
    begins, ends = np.triu_indices(n + 1, _SHORTEST)
    inside = ((begins == 0) | (begins >= _SHORTEST)) & ((ends == n) | (n - ends >= _SHORTEST)) & (ends - begins < n)
    begins, ends = begins[inside], ends[inside]
    sums = np.zeros((len(rows), n + 1))
    np.cumsum(rows - rows.mean(axis=1, keepdims=True), axis=1, out=sums[:, 1:])
    lengths = ends - begins
    return (sums[:, ends] - sums[:, begins]) ** 2 * n / (lengths * (n - lengths)), begins, ends


def _steps(rows: np.ndarray) -> _Arcs:
    """Returns the result of _arcs for the arcs that reach the end of a segment: of one change each."""
    squares, begins, ends = _arcs(rows)
    step = ends == rows.shape[1]
    return squares[:, step], begins[step], ends[step]


def _rarity(rows: np.ndarray, arcs: Callable[[np.ndarray], _Arcs] = _arcs) -> np.ndarray:
    """Returns the rarity of the largest difference between an arc and the rest, for each row [k, n]: [k].

    It is -log p of Student's t for this arc alone, which makes segments of different lengths comparable; 0 if no arc
    leaves enough points, or if nothing differs. arcs: the arcs that count; by default all.
    """
    k, n = rows.shape
    if n < 2 * _SHORTEST:
        return np.zeros(k)
    from scipy.special import fdtrc  # a quarter of a second

    step = max(1, 2 * _AT_ONCE // n**2)
    most = np.concatenate([arcs(rows[i : i + step])[0].max(axis=1) for i in range(0, k, step)])
    total = ((rows - rows.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    within = np.maximum(total - most, 1e-12 * total)
    statistic = np.divide(most * (n - 2), within, out=np.zeros(k), where=within > 0)
    return np.asarray(-np.log(np.maximum(fdtrc(1, n - 2, statistic), 1e-300)))
