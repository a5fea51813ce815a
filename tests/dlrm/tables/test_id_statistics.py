import numpy as np
import pytest

from dlrm_bench.dlrm.config import DataConfig
from dlrm_bench.dlrm.data.distributions import hashed_ids, zipf_ids
from dlrm_bench.dlrm.tables.id_statistics import UNIFORM, IdStatistics

SAMPLES = 20_000


def drawn(rows: int, hot: int, statistics: IdStatistics) -> int:
    """Distinct rows that a draw as of random batches names."""
    rng = np.random.default_rng(0)
    first = zipf_ids(rng, rows, statistics.skew, SAMPLES)
    if statistics.expanded:
        others = hashed_ids(first, hot - 1, rows, salt=3)
    else:
        others = rng.integers(0, rows, size=(SAMPLES, hot - 1), dtype=np.int32)
    return len(np.unique(np.concatenate([first[:, None], others], axis=1)))


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 1.05, 1.6])
@pytest.mark.parametrize(
    ("rows", "hot"), [(3, 1), (900, 2), (40_000, 1), (40_000, 8), (3_000_000, 1), (40_000_000, 20)]
)
def test_counts_the_rows_that_batches_name(rows: int, hot: int, skew: float, expanded: bool) -> None:
    statistics = IdStatistics(skew=skew, expanded=expanded)
    assert statistics.distinct_rows(rows, hot, SAMPLES) == pytest.approx(drawn(rows, hot, statistics), rel=0.02)


def test_uniform_is_the_closed_form() -> None:
    for rows, hot in ((10, 3), (5000, 7), (40_000_000, 100)):
        expected = -rows * np.expm1(-SAMPLES * hot / rows)
        assert UNIFORM.distinct_rows(rows, hot, SAMPLES) == pytest.approx(expected, rel=1e-3)


def test_those_of_a_run() -> None:
    random, uniform = DataConfig(), DataConfig(random_ids="uniform", random_skew=0.5)
    files = DataConfig(source="multi_hot", path="data")  # type: ignore[arg-type]
    assert IdStatistics.of(random) == IdStatistics.of(files) == IdStatistics(skew=1.05, expanded=True)
    assert IdStatistics.of(uniform) == IdStatistics(skew=0.5, expanded=False)
