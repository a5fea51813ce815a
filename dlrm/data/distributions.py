"""Random ids and dense features that look like click logs."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def zipf_ids(rng: np.random.Generator, rows: int, exponent: float, count: int) -> NDArray[np.int32]:
    """Returns `count` ids in [0, rows); the probability of id i is nearly proportional to (i + 1)^-exponent.

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


def hashed_ids(first: NDArray[np.int32], count: int, rows: int, salt: int) -> NDArray[np.int32]:
    """Returns ids [len(first), count] in [0, rows): a fixed, uniform-looking function of (salt, first id, column).

    `split_mix` hashes a counter formed from all three; the upper half of its product with `rows` is the id (D. Lemire,
    "Fast Random Integer Generation in an Interval", 2019, without the rejection: an id's share is off by at most rows /
    2^32).
    """
    assert 0 < rows < 1 << 31
    assert 0 <= count < 1 << 16
    assert 0 <= salt < 1 << 16
    x = (first.astype(np.uint64) << np.uint64(16))[:, None] | np.arange(count, dtype=np.uint64)
    x |= np.uint64(salt << 48)
    x = split_mix(x)
    x >>= np.uint64(32)
    x *= np.uint64(rows)
    return (x >> np.uint64(32)).astype(np.int32)


def raw_ids(rows: NDArray[Any], salt: int) -> NDArray[np.int64]:
    """Returns an id for each row number in [0, 2^31), of its shape: any int64, as a hash of a string is.

    SplitMix64's output function of salt * 2^32 + row, a bijection of 64 bits: rows, and salts, have different ids.
    """
    assert 0 <= salt < 1 << 31
    return split_mix((np.uint64(salt) << np.uint64(32)) | rows.astype(np.uint64)).view(np.int64)


def split_mix(counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns SplitMix64's output function (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014) of each counter."""
    x = counters + np.uint64(1)  # Zero would stay zero.
    x *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def log_counts(rng: np.random.Generator, samples: int, features: int) -> NDArray[np.float32]:
    """Returns [samples, features]: log(1 + n) of log-normal counts n, small in the first column and larger towards the
    last.

    As in Criteo's transformed features, values are non-negative, many are zero, and the right tail is long.
    """
    log_median = np.linspace(0, 3, features, dtype=np.float32)
    counts = np.exp(rng.standard_normal((samples, features), dtype=np.float32) * 1.5 + log_median)
    return np.log1p(np.floor(counts))
