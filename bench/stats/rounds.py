"""Estimates of a ladder: things compared round by round, less the part that a steady drift of the machine explains.

Each round runs every thing once, in an order that the next round reverses. A difference within a round is free of
everything that the round shares, but not of the drift between the two runs: among 16 things with a drift of 2 % per
run, a pair differs by up to 30 % one way and then the other. The mean over two rounds is free of drift, but the spread
between rounds is not, so that no difference is found. One slope, estimated from all runs together, removes the drift
from every difference.
"""

import math
from collections.abc import Sequence

import numpy as np

from .statistics import Estimate

FEWEST_THINGS, FEWEST_ROUNDS = 3, 4
"""Minimum numbers for estimating a drift. Two things are neighbours in each round, where a drift does little, and with
fewer rounds the degrees of freedom of the slope cost more than the drift."""


def estimates_of_rounds(
    logs: np.ndarray, positions: np.ndarray, pairs: Sequence[tuple[int, int]]
) -> list[Estimate | None]:
    """Returns for each pair (i, j) the estimate of the logarithm of thing j's metric over thing i's.

    logs: logarithm of the metric, [things, rounds]. positions: position of the run in the order of all runs, [things,
    rounds]; least squares separate parts that are additive in the round, in the thing and linear in the position. The
    spread is that of the pair's own differences, so that a noisy thing does not widen the intervals of others. None for
    each pair after one round, which does not show the spread of runs.
    """
    rounds = logs.shape[1]
    assert positions.shape == logs.shape, "every run has a place"
    if rounds < 2:
        return [None] * len(pairs)
    slope, variance, freedom = _drift(logs, positions)
    estimates: list[Estimate | None] = []
    for i, j in pairs:
        apart = positions[j] - positions[i]
        differences = logs[j] - logs[i] - slope * apart
        squares = float(((differences - differences.mean()) ** 2).sum())
        error = math.sqrt(squares / freedom / rounds + variance * float(apart.mean()) ** 2)
        estimates.append(Estimate(float(differences.mean()), error, freedom))
    return estimates


def _drift(logs: np.ndarray, positions: np.ndarray) -> tuple[float, float, float]:
    """Returns the change of the logarithm from run to run, its variance, and the degrees of freedom left to a pair.

    The slope is one parameter that the things - 1 independent sets of differences share; for two things this is the
    regression of their differences on the distance of their runs.
    """
    things, rounds = logs.shape
    if things < FEWEST_THINGS or rounds < FEWEST_ROUNDS:
        return 0.0, 0.0, rounds - 1.0
    left, places = _centred(logs), _centred(positions.astype(np.float64))
    squares = float((places**2).sum())
    if squares == 0:  # the same order in all rounds: a drift and the things cannot be told apart
        return 0.0, 0.0, rounds - 1.0
    slope = float((places * left).sum()) / squares
    residual = float(((left - slope * places) ** 2).sum()) / ((things - 1) * (rounds - 1) - 1)
    return slope, residual / squares, rounds - 1 - 1 / (things - 1)


def _centred(values: np.ndarray) -> np.ndarray:
    """Returns values [things, rounds] less the means of their thing and of their round."""
    by_thing, by_round = values.mean(axis=1, keepdims=True), values.mean(axis=0, keepdims=True)
    return np.asarray(values - by_thing - by_round + values.mean())
