"""Random ids and dense features that look like click logs."""

import math

import numpy as np
from numpy.typing import NDArray


def zipf_ids(rng: np.random.Generator, rows: int, exponent: float, count: int) -> NDArray[np.int32]:
    """`count` ids in [0, rows), id i drawn with a probability close to proportional to (i + 1)^-exponent.

    Inverts the distribution function of the density x^-exponent on [1, rows + 1) and rounds down:
    x = (1 + u * (L^(1-a) - 1))^(1/(1-a)) with L = rows + 1, written with expm1 and log1p so that exponents near 1
    keep their precision; the limit at 1 is L^u. Exponent 0 is uniform.
    """
    log_end = math.log(rows + 1)
    uniform = rng.random(count)
    power = 1.0 - exponent
    if abs(power) * log_end < 1e-9:
        log_x = uniform * log_end
    else:
        log_x = np.log1p(uniform * math.expm1(power * log_end)) / power
    ids = np.exp(log_x).astype(np.int64) - 1
    return np.clip(ids, 0, rows - 1).astype(np.int32)


def log_counts(rng: np.random.Generator, samples: int, features: int) -> NDArray[np.float32]:
    """[samples, features]: log(1 + n) of log-normal counts n, small ones in the first column, larger ones in the last.

    As in Criteo's transformed features, values are not negative, many are zero, and the right tail is long.
    """
    log_median = np.linspace(0, 3, features, dtype=np.float32)
    counts = np.exp(rng.standard_normal((samples, features), dtype=np.float32) * 1.5 + log_median)
    return np.log1p(np.floor(counts))
