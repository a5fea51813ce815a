"""Column sums: the plain twin adds up rows, Triton does the same in one order, so that equal inputs give equal bits."""

import pytest
import torch

from dlrm_bench.kernels.dense.column_sums import column_sums, plain_column_sums, triton_column_sums
from tests.kernels.devices import DEVICE, needs_triton


def test_rows_are_added_up() -> None:
    out = torch.empty(3, device=DEVICE)
    column_sums(torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], device=DEVICE), out)
    assert out.tolist() == [11, 22, 33]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (8, 33), (64, 32), (217, 100)])
def test_triton_equals_plain(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    partials = torch.randn(shape, device=DEVICE)
    out, again, expected = torch.full((3, shape[1]), torch.nan, dtype=dtype, device=DEVICE)
    triton_column_sums(partials, out)
    triton_column_sums(partials, again)
    plain_column_sums(partials, expected)
    assert torch.equal(out, again)
    torch.testing.assert_close(out, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_shapes_are_checked() -> None:
    with pytest.raises(AssertionError, match="partials"):
        column_sums(torch.zeros(2, 3), torch.zeros(2))
