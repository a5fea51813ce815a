"""Sums over all ranks' tensors: the plain twin against PyTorch's sum, Triton against the plain twin."""

import pytest
import torch

from dlrm_bench.kernels.dense.peer_sums import peer_sums, plain_peer_sums, triton_peer_sums
from dlrm_bench.kernels.peer_tensors import PeerTensors
from tests.kernels.devices import DEVICE, needs_triton

DTYPES = [torch.bfloat16, torch.float32]


def peers(ranks: int, size: int, dtype: torch.dtype) -> PeerTensors:
    """Returns tensors, each its own allocation, as those of several GPUs are."""
    return PeerTensors([torch.randn(size, device=DEVICE).to(dtype) for _ in range(ranks)], ranks - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_equals_the_sum_rounded_once(ranks: int, dtype: torch.dtype) -> None:
    summands = peers(ranks, 1001, dtype)
    before = [tensor.clone() for tensor in summands.tensors]
    out = torch.empty(1001, dtype=dtype, device=DEVICE)
    peer_sums(summands, out)
    torch.testing.assert_close(out, torch.stack(before).float().sum(0).to(dtype))
    assert all(map(torch.equal, summands.tensors, before)), "what is summed stays"


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 2048, 5003])
def test_triton_equals_plain(size: int, ranks: int, dtype: torch.dtype) -> None:
    summands = peers(ranks, size, dtype)
    got, expected = (torch.full((size,), 7, dtype=dtype, device=DEVICE) for _ in range(2))
    triton_peer_sums(summands, got)
    plain_peer_sums(summands, expected)
    torch.testing.assert_close(got, expected)  # Triton's interpreter rounds to bf16 in its own way
