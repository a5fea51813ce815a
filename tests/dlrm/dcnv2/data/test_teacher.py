import numpy as np
import pytest

from dlrm_bench.dlrm.data.distributions import log_counts
from dlrm_bench.dlrm.dcnv2.data.teacher import Teacher, id_weights


def samples(seed: int, n: int = 20_000) -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return log_counts(rng, n, 5), [rng.integers(0, 500, (n, hot)).astype(np.int32) for hot in (1, 3, 2, 1, 1)]


def test_id_weights_are_uniform_and_depend_on_the_salt() -> None:
    ids = np.arange(200_000, dtype=np.int32)
    weights = id_weights(ids, np.uint32(5))
    assert abs(weights.mean()) < 0.01
    assert abs(weights.std() - 1) < 0.01
    assert abs(np.corrcoef(weights[:-1], weights[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(weights, id_weights(ids, np.uint32(6)))[0, 1]) < 0.01


@pytest.mark.parametrize(("signal", "base_rate"), [(0.5, 0.5), (2.0, 0.25), (3.0, 0.1)])
def test_calibration_holds_on_fresh_samples(signal: float, base_rate: float) -> None:
    teacher = Teacher(5, 5, seed=0)
    teacher.calibrate(*samples(1), signal=signal, base_rate=base_rate)
    probabilities = teacher.probabilities(*samples(2))
    assert probabilities.dtype == np.float32
    assert abs(probabilities.mean() - base_rate) < 0.02
    logits = np.log(probabilities / (1 - probabilities))
    assert abs(logits.std() / signal - 1) < 0.1


def test_every_part_matters() -> None:
    teacher = Teacher(5, 5, seed=0)
    teacher.calibrate(*samples(1), signal=2.0, base_rate=0.25)
    dense, ids = samples(2)
    before = teacher.probabilities(dense, ids)
    assert not np.allclose(before, teacher.probabilities(dense + 1, ids))
    for feature in range(5):
        changed = [(block + 1 if f == feature else block) for f, block in enumerate(ids)]
        assert not np.allclose(before, teacher.probabilities(dense, changed))
