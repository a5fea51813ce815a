import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_bench.dlrm.data.distributions import hashed_ids, log_counts, raw_ids, zipf_ids


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


def _split_mix_64(counter: int) -> int:
    """SplitMix64's output, in Python's own integers."""
    mask = (1 << 64) - 1
    x = (counter * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@given(
    first=st.integers(0, 2**31 - 2), column=st.integers(0, 99), rows=st.integers(1, 2**31 - 1), salt=st.integers(0, 99)
)
def test_hashed_ids_by_the_formula(first: int, column: int, rows: int, salt: int) -> None:
    found = hashed_ids(np.array([first], dtype=np.int32), 100, rows, salt)[0, column]
    assert found == (_split_mix_64((salt << 48 | first << 16 | column) + 1) >> 32) * rows >> 32
    assert 0 <= found < rows


def test_split_mix_64_is_the_published_one() -> None:
    # The first outputs of the generator with seed 1234567, as its implementations are commonly tested.
    golden = 0x9E3779B97F4A7C15
    inverse = pow(golden, -1, 1 << 64)
    states = [(1234567 + n * golden) % (1 << 64) for n in (1, 2)]
    outputs = [_split_mix_64(state * inverse % (1 << 64)) for state in states]
    assert outputs == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize("salt", [0, 25])
def test_hashed_ids_are_uniform_and_independent(salt: int) -> None:
    first = np.arange(40_000, dtype=np.int32)
    ids = hashed_ids(first, 5, 100, salt)
    for column in range(5):  # Each within six standard deviations of its share.
        assert np.abs(np.bincount(ids[:, column], minlength=100) - 400).max() < 6 * 20
    for left, right in ((0, 1), (0, 4), (3, 4)):
        pairs = np.bincount(ids[:, left] * 100 + ids[:, right], minlength=10_000)
        assert abs(pairs.var() - 4) < 0.4  # Poisson, mean 4
    for shift in (1, 2, 256):  # Neighbours share nothing.
        assert abs((ids[shift:] == ids[:-shift]).mean() - 0.01) < 0.002


def test_the_salt_decides() -> None:
    first = np.arange(1000, dtype=np.int32)
    assert (hashed_ids(first, 9, 1000, 0) == hashed_ids(first, 9, 1000, 1)).mean() < 0.01


@given(row=st.integers(0, 2**31 - 1), salt=st.integers(0, 2**31 - 1))
def test_raw_ids_by_the_formula(row: int, salt: int) -> None:
    found = raw_ids(np.array([[row]], dtype=np.int32), salt)
    assert found.shape == (1, 1)
    assert int(found[0, 0]) % (1 << 64) == _split_mix_64((salt << 32 | row) + 1)


def test_rows_and_salts_have_different_raw_ids_of_all_of_int64() -> None:
    ids = np.concatenate([raw_ids(np.arange(5000, dtype=kind), salt) for salt, kind in enumerate((np.int32, np.int64))])
    assert len(np.unique(ids)) == 10_000
    assert (ids < 0).sum() == pytest.approx(5000, abs=300)
    assert ids.min() < -0.999 * 2**63
    assert ids.max() > 0.999 * 2**63
