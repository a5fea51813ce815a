"""Counts on the host, beside torch's own addition."""

import pytest
import torch

from dlrm_bench.pipeline.five_stage.host_counts import HostCounts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("first", [0, 255, 2**24 - 1, 2**24])
def test_counts_as_torch_does(dtype: torch.dtype, first: int) -> None:
    """Up to where fp32 and bf16 no longer tell one from the next."""
    counts = [torch.tensor(first + i, dtype=dtype) for i in range(3)]
    expected = [count.clone() for count in counts]
    host = HostCounts(counts)
    for _ in range(3):
        host.add_one()
        torch._foreach_add_(expected, 1)
    assert counts == expected


def test_what_is_written_in_place_is_counted_on() -> None:
    count = torch.zeros(())
    host = HostCounts([count])
    host.add_one()
    count.fill_(7)
    host.add_one()
    assert count == 8
    assert HostCounts([]).add_one() is None
