"""Gathering rows: the Triton kernel against its plain twin."""

import pytest
import torch

from dlrm_bench.kernels.embedding.gather_rows import gather_rows, plain_gather_rows, triton_gather_rows
from tests.kernels.devices import DEVICE, needs_triton


@needs_triton
@pytest.mark.parametrize(
    ("source", "out"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)]
)
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize(("columns", "count"), [(16, 1000), (512, 21), (16, 1), (16, 0)])
def test_triton_equals_plain(columns: int, count: int, placed: bool, source: torch.dtype, out: torch.dtype) -> None:
    table = torch.randn(50, columns, device=DEVICE).to(source)
    rows = torch.randint(-3, 50, (count,), dtype=torch.int32, device=DEVICE)
    places = torch.randperm(count, device=DEVICE).int() if placed else None
    got, expected = (torch.full((count, columns), 7.0, device=DEVICE).to(out) for _ in range(2))
    triton_gather_rows(table, rows, got, places)
    plain_gather_rows(table, rows, expected, places)
    # Triton's interpreter cuts bf16 off where a GPU rounds.
    exact = {"rtol": 0.01, "atol": 0.0} if out == torch.bfloat16 else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(got, expected, **exact)
    by_place = rows if places is None else torch.empty_like(rows).scatter_(0, places.long(), rows)
    named = by_place >= 0
    assert torch.equal(expected[named], table[by_place[named].long()].to(out))
    assert not got[~named].any()


@pytest.mark.gpu
def test_rows_past_two_billion_elements() -> None:
    table = torch.zeros(2**23 // 2 + 9, 512, dtype=torch.bfloat16, device=DEVICE)
    table[-1] = 3
    rows = torch.tensor([-1, len(table) - 1, 0], dtype=torch.int32, device=DEVICE)
    out = torch.empty(3, 512, device=DEVICE)
    gather_rows(table, rows, out)
    assert out.mean(1).tolist() == [0, 3, 0]


def test_columns_that_no_block_covers_are_refused() -> None:
    with pytest.raises(AssertionError, match="power of two"):
        gather_rows(torch.zeros(2, 12), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 12))
