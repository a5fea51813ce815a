"""The logistic model that labels planted data: the function that a recommender has to learn."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

INTERACTIONS = 4
SHARES = (0.25, 0.6, 0.15)
"""Shares of the logit's variance: dense features, ids, products of a dense feature and an id."""


class Teacher:
    """P(label = 1) = sigmoid(intercept + signal * score), where score has mean 0 and variance about 1.

    The score adds three parts, each scaled to its share of the variance on an initial set of samples:
    - a linear function of the standardised dense features;
    - one fixed weight for each id of each feature, summed over the feature's multi-hot ids and divided by the square
      root of their number, as sum pooling with a one-column table could learn;
    - for a few features, a second weight of the first id times one dense feature, as a cross layer could learn.
    Weights of ids are hashes of (seed, feature, id), so they take no memory at any table size.
    """

    def __init__(self, num_features: int, dense_in_features: int, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        self._salts = rng.integers(0, 1 << 32, size=(2, num_features), dtype=np.uint32)
        self._dense_weights = rng.standard_normal(dense_in_features, dtype=np.float32)
        # Pairs (feature, dense feature).
        self._pairs = list(
            zip(
                rng.choice(num_features, min(INTERACTIONS, num_features), replace=False).tolist(),
                rng.integers(0, dense_in_features, INTERACTIONS).tolist(),
                strict=False,
            )
        )
        self._dense_mean = np.zeros(dense_in_features, dtype=np.float32)
        self._dense_std = np.ones(dense_in_features, dtype=np.float32)
        self._part_mean = np.zeros(len(SHARES))
        self._part_factor = np.ones(len(SHARES))
        self._intercept = 0.0

    def calibrate(self, dense: Floats, ids: Sequence[NDArray[np.int32]], *, signal: float, base_rate: float) -> None:
        """Fits scales and intercept to samples: signal is the logit's standard deviation, base_rate the click rate.

        dense: [n, dense_in_features]; ids: one [n, hot] for each feature.
        """
        self._dense_mean, self._dense_std = dense.mean(axis=0), dense.std(axis=0) + np.float32(1e-6)
        parts = self._parts(dense, ids)
        self._part_mean = parts.mean(axis=1, dtype=np.float64)
        self._part_factor = signal * np.sqrt(SHARES) / (parts.std(axis=1, dtype=np.float64) + 1e-6)
        logits = self._scaled(parts)
        low, high = -50.0, 50.0
        for _ in range(60):  # The mean probability grows with the intercept: bisect.
            self._intercept = (low + high) / 2
            if _sigmoid(logits + self._intercept).mean() < base_rate:
                low = self._intercept
            else:
                high = self._intercept

    def probabilities(self, dense: Floats, ids: Sequence[NDArray[np.int32]]) -> Floats:
        """Returns P(label = 1) of each sample, float32 [n]; arguments as for `calibrate`, which must be called
        first."""
        return _sigmoid(self._scaled(self._parts(dense, ids)) + self._intercept).astype(np.float32)

    def _scaled(self, parts: Floats) -> NDArray[np.float64]:
        """Returns the logit without its intercept, [n], from the parts [3, n]."""
        scaled: NDArray[np.float64] = self._part_factor @ (parts - self._part_mean[:, None])
        return scaled

    def _parts(self, dense: Floats, ids: Sequence[NDArray[np.int32]]) -> Floats:
        """Returns the three parts of the score before scaling, [3, n]."""
        standard = (dense - self._dense_mean) / self._dense_std
        parts = np.zeros((len(SHARES), len(dense)), dtype=np.float32)
        parts[0] = standard @ self._dense_weights
        for feature, block in enumerate(ids):
            weights = id_weights(block, self._salts[0, feature])
            parts[1] += weights.sum(axis=1) / np.float32(math.sqrt(block.shape[1]))
        for feature, column in self._pairs:
            parts[2] += id_weights(ids[feature][:, 0], self._salts[1, feature]) * standard[:, column]
        return parts


def id_weights(ids: NDArray[np.int32], salt: np.uint32) -> Floats:
    """Returns one weight for each id: uniform with mean 0 and variance 1 over the ids, by the 32-bit hash "lowbias32"
    of C. Wellons (github.com/skeeto/hash-prospector)."""
    x = ids.astype(np.uint32)
    x += salt
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return (x.astype(np.float32) / np.float32(2**31) - np.float32(1)) * np.float32(math.sqrt(3))


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x))
