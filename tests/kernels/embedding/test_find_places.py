"""Places of rows, Triton against the plain function."""

import pytest
import torch

from dlrm_bench.kernels.embedding.find_places import find_places, plain_find_places, triton_find_places
from tests.kernels.devices import DEVICE, needs_triton


@needs_triton
@pytest.mark.parametrize("count", [0, 1, 256, 1000])
def test_triton_equals_plain(count: int) -> None:
    place = torch.randperm(500, device=DEVICE).int()
    rows = torch.randint(-100, 500, (count,), dtype=torch.int32, device=DEVICE)
    found, expected = torch.full((2, count + 1), 7, dtype=torch.int32, device=DEVICE).unbind()
    triton_find_places(place, rows, found[:count])
    plain_find_places(place, rows, expected[:count])
    assert torch.equal(found, expected)
    assert found[count] == 7


def test_negative_rows_have_no_place() -> None:
    place = torch.tensor([5, 6, 7], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    find_places(place, torch.tensor([2, -1, 0, -7], dtype=torch.int32, device=DEVICE), out)
    assert out.tolist() == [7, -1, 5, -1]
