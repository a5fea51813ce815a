"""Parts of a batch cover its samples, equally."""

import pytest
import torch

from dlrm_bench.dlrm.batch_shape import BatchShape


def test_parts_cover_the_samples() -> None:
    shape = BatchShape(samples=6, dtype=torch.float32, parts=3)
    assert (shape.part_samples, shape.rows) == (2, (slice(0, 2), slice(2, 4), slice(4, 6)))
    assert BatchShape(samples=5, dtype=torch.float32).rows == (slice(0, 5),)


def test_parts_of_different_sizes_are_refused() -> None:
    with pytest.raises(AssertionError, match="5 samples cannot be split into 2 equal parts"):
        BatchShape(samples=5, dtype=torch.float32, parts=2)
