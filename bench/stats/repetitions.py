"""Number and order of runs, and the differences that a number of runs can find.

The unit is a run: its metric (a median, say) is one number, and runs of one program differ. The differences that runs
find depend only on that spread, regardless of the number of iterations in each run.
"""

import math
from collections.abc import Sequence

import numpy as np

from .series import CONFIDENCE
from .statistics import Estimate, student_t

# scipy.special takes a quarter of a second to import: functions that need it import it.
POWER = 0.8
_USELESS = 100.0
"""Detectable factor whose digits, and those of larger ones, mean nothing: two rounds of noisy runs give 13 digits."""


def detectable(spread: float, runs: int, paired: bool, comparisons: int = 1, confidence: float = CONFIDENCE) -> float:
    """Returns the smallest relative difference that `runs` runs per side find with a probability of 80 %; 0.02 means 2
    %, inf with one run.

    spread: standard deviation of the logarithms of the runs' metric on one side; if paired, of their differences within
    a pair. comparisons: number of comparisons made together; the smallest p value must then pass 0.05 / that number
    (Holm). confidence: of the interval that must exclude 1. From the noncentral t distribution of the test's statistic
    (Chow, Shao and Wang, Sample Size Calculations in Clinical Research, 2008, section 3.2).
    """
    if runs < 2:
        return math.inf
    freedom = runs - 1 if paired else 2 * (runs - 1)
    error = spread * math.sqrt((1 if paired else 2) / runs)
    return detectable_by(Estimate(0.0, error, freedom), comparisons, confidence)


def detectable_by(estimate: Estimate, comparisons: int = 1, confidence: float = CONFIDENCE) -> float:
    """Returns the smallest relative difference that an estimate with this error finds with a probability of 80 %;
    arguments as for detectable."""
    from scipy.special import nctdtrinc

    least = student_t(1 - (1 - confidence) / 2 / comparisons, estimate.freedom)
    return math.expm1(min(700.0, float(nctdtrinc(estimate.freedom, 1 - POWER, least)) * estimate.error))


def detectable_range(
    estimate: Estimate, comparisons: int = 1, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Returns (low, value, high): the difference that an estimate finds, and its 95 % interval.

    The spread of a few runs is poorly known: after two rounds its interval reaches from 0.45 to 32 times the observed
    value (chi-squared).
    """
    from scipy.special import gammaincinv

    half = estimate.freedom / 2
    ends = (math.sqrt(half / float(gammaincinv(half, p))) for p in ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2))
    errors = [factor * estimate.error for factor in ends]
    errors.insert(1, estimate.error)
    low, value, high = (
        detectable_by(Estimate(0.0, error, estimate.freedom), comparisons, confidence) for error in errors
    )
    return low, value, high


def runs_needed(
    spread: float,
    difference: float,
    paired: bool,
    comparisons: int = 1,
    confidence: float = CONFIDENCE,
    most: int = 10_000,
) -> int | None:
    """Returns the smallest number of runs per side that finds `difference` (0.02: 2 %), see `detectable`; None if over
    `most`."""
    if spread > 0 and difference <= 0:
        return None
    low, high = 2, 2
    while detectable(spread, high, paired, comparisons, confidence) > difference:
        low, high = high + 1, high * 2
        if low > most:
            return None
    while low < high:
        middle = (low + high) // 2
        if detectable(spread, middle, paired, comparisons, confidence) <= difference:
            high = middle
        else:
            low = middle + 1
    return high if high <= most else None


def finds(differences: tuple[float, float, float]) -> str:
    """Returns a phrase such as 'find differences from 3.10% (1.86% to 8.91%, with so few runs)'.

    differences: the result of `detectable_range`. A difference of 1 or more is given as a factor, like the ratios
    beside it.
    """
    low, value, high = differences
    if 1 + value >= _USELESS:
        return f"find no factor below {_USELESS:.0f}"
    what = f"factors from {1 + value:.2f}" if value >= 1 else f"differences from {value:.2%}"
    return f"find {what} ({_size(low)} to {_size(high)}, with so few runs)"


def finds_from(differences: tuple[float, float, float]) -> str:
    """Returns the difference for a table's cell, such as '3.10% (1.86% .. 8.91%)'."""
    low, value, high = map(_size, differences)
    return f"{value} ({low} .. {high})"


def _size(difference: float) -> str:
    if 1 + difference >= _USELESS:
        return f"over {_USELESS:.0f} x"
    return f"{1 + difference:.2f} x" if difference >= 1 else f"{difference:.2%}"


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns each p value corrected for all tests made together (Holm, Scandinavian Journal of Statistics 6, 1979).

    Rejecting those of at most 0.05 keeps the probability of any false rejection at 0.05. nan stays nan and is not
    counted.
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = list(map(float, p_values)), 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[i] = largest
    return corrected


def balanced_orders(items: int, rounds: int, seed: int) -> list[list[int]]:
    """Returns for each round an order of `items` items, [rounds][items], in which a linear drift cancels.

    Rounds come in pairs: the second round reverses the order of the first, so that every item has the same mean
    position over the pair (A B, B A for two items: ABBA). The first orders of pairs are the rows of a Williams square
    (Australian Journal of Scientific Research A 2(2), 1949), in which each item follows each other item equally often,
    with rows and items shuffled by the seed. A last round without a partner is not reversed.
    """
    rng = np.random.default_rng(seed)
    names, rows = rng.permutation(items), rng.permutation(items)
    zigzag = [i // 2 if i % 2 == 0 else items - (i + 1) // 2 for i in range(items)]
    orders: list[list[int]] = []
    for pair in range((rounds + 1) // 2):
        row = int(rows[pair % items]) if items else 0
        order = [int(names[(position + row) % items]) for position in zigzag]
        orders += [order, order[::-1]]
    return orders[:rounds]


def drift_left(sides: Sequence[int]) -> float:
    """Returns the mean position of the runs of side 1 less that of side 0; inf if a side has none.

    A linear drift of the machine adds this number times its change from run to run to the difference of the sides: 0
    for ABBA, 1 for ABABAB, a third for ABBAAB.
    """
    positions: tuple[list[int], list[int]] = ([], [])
    for position, side in enumerate(sides):
        positions[side].append(position)
    if not all(positions):
        return math.inf
    first, second = (sum(each) / len(each) for each in positions)
    return second - first
