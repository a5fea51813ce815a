"""MLPerf's grid of evaluations of DLRMv4, and the same on data of other sizes."""

import math

import pytest

from dlrm_bench.dlrm.dlrmv4.cadence import cadence
from dlrm_bench.dlrm.dlrmv4.data.mlperf_checksums import TRAIN_SAMPLES


@pytest.mark.parametrize(
    ("batch", "every", "block", "samples"),
    [
        (4096, 560, 23, 52_756_480),
        (8192, 280, 25, 57_344_000),
        (12288, 187, 28, 64_339_968),
        (16384, 140, 31, 71_106_560),
        (24576, 94, 36, 83_165_184),
        (32768, 70, 41, 94_044_160),
    ],
)
def test_mlperfs_grid(batch: int, every: int, block: int, samples: int) -> None:
    """Numbers of the compliance checker, computed by its own words for these batches."""
    found = cadence(TRAIN_SAMPLES, batch, 1000)
    assert (found.every, found.first, found.at_end) == (every, every * block, False)
    assert found.first * batch == samples


@pytest.mark.parametrize("batch", range(8192, 32769, 1024))
def test_it_is_what_the_checker_computes(batch: int) -> None:
    """The formulas of closed_dlrmv4.yaml, in floating point as there."""
    interval = max(1, math.ceil(0.001 * TRAIN_SAMPLES / batch)) * batch
    first = math.ceil(math.floor((4480 * batch + 135331840) / 3) / interval) * interval
    found = cadence(TRAIN_SAMPLES, batch, 1000)
    assert (found.every * batch, found.first * batch) == (interval, first)


def test_other_data_evaluate_from_the_same_share_of_their_epoch_on() -> None:
    found = cadence(60_000, 128, 100)
    assert found.every == 5  # 4.7 iterations are a hundredth of the epoch
    assert found.first == 10  # 45.3 million samples of MLPerf's are 1,186 of these, 9.3 iterations
    assert cadence(1, 8192, 1000).first == 1
