"""Batches are fetched in the order in which the host named them, and nothing around them changes: plain and Triton."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.input_dist.fetch import fetch_next, plain_fetch_next, triton_fetch_next
from tests.kernels.devices import DEVICE, needs_triton

PINNED = DEVICE.type == "cuda"
WAYS = [
    pytest.param(plain_fetch_next, marks=pytest.mark.skipif(PINNED, reason="the plain one is for the CPU")),
    pytest.param(triton_fetch_next, marks=needs_triton),
    fetch_next,
]


def sources(count: int, size: int) -> list[Tensor]:
    """Returns sources that start on 16 bytes."""
    return [torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32, pin_memory=PINNED) for _ in range(count)]


@pytest.mark.parametrize("fetch", WAYS)
@pytest.mark.parametrize("size", [1, 4095, 4096, 8 * 4096, 8 * 4096 + 7, 70001])
def test_goes_round_the_ring(fetch: Callable[..., None], size: int) -> None:
    ring = torch.zeros(3, dtype=torch.int64, pin_memory=PINNED)
    taken = torch.zeros((), dtype=torch.int64, device=DEVICE)
    around = torch.full((size + 8,), 7, dtype=torch.int32, device=DEVICE)
    out = around[4:-4]
    for number, source in enumerate(sources(7, size)):
        ring[number % 3] = source.data_ptr()
        fetch(ring, taken, out)
        assert torch.equal(out.cpu(), source)
        assert taken.item() == number + 1
    assert (around[:4] == 7).all()
    assert (around[-4:] == 7).all()


@pytest.mark.parametrize("fetch", WAYS)
def test_nothing_named_leaves_what_is_there(fetch: Callable[..., None]) -> None:
    ring = torch.zeros(2, dtype=torch.int64, pin_memory=PINNED)
    (source,), out = sources(1, 100), torch.full((100,), 5, dtype=torch.int32, device=DEVICE)
    ring[1], taken = source.data_ptr(), torch.zeros((), dtype=torch.int64, device=DEVICE)
    is_new = torch.full((1,), 9, dtype=torch.int32, device=DEVICE)
    fetch(ring, taken, out, is_new)
    assert (out == 5).all()
    assert is_new.item() == 0
    fetch(ring, taken, out, is_new)
    assert torch.equal(out.cpu(), source)
    assert is_new.item() == 1
