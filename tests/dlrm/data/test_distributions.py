import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_bench.dlrm.data.distributions import log_counts, zipf_ids


@given(rows=st.integers(1, 2**31 - 2), exponent=st.floats(0, 5), seed=st.integers(0, 99))
def test_ids_stay_in_the_table(rows: int, exponent: float, seed: int) -> None:
    ids = zipf_ids(np.random.default_rng(seed), rows, exponent, 1000)
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert ids.max() < rows


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0])
def test_frequencies_follow_the_density(exponent: float) -> None:
    rows, n = 20, 400_000
    counts = np.bincount(zipf_ids(np.random.default_rng(0), rows, exponent, n), minlength=rows)
    edges = np.arange(1, rows + 2, dtype=np.float64)
    integral = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(integral) / (integral[-1] - integral[0]) * n
    assert np.abs(counts - expected).max() < 5 * np.sqrt(n / 4)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 5).all()


def test_exponents_near_one_are_continuous() -> None:
    near = [zipf_ids(np.random.default_rng(1), 40_000_000, e, 10_000) for e in (1 - 1e-12, 1.0, 1 + 1e-12, 1 + 1e-8)]
    for other in near[1:]:
        np.testing.assert_allclose(near[0], other, rtol=1e-5, atol=1)


def test_log_counts_look_like_clicks() -> None:
    dense = log_counts(np.random.default_rng(0), 50_000, 13)
    assert dense.shape == (50_000, 13)
    assert dense.dtype == np.float32
    assert np.isfinite(dense).all()
    assert dense.min() == 0
    counts = np.expm1(dense)
    np.testing.assert_allclose(counts, np.round(counts), rtol=1e-4)
    assert (counts.mean(axis=0) > 1.5 * np.median(counts, axis=0)).all()
