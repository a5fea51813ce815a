"""Sums of gradient rows by table row: against index_add, Triton against plain, on rows of all lengths."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.embedding.row_sums import plain_row_sums, row_starts, row_sums, triton_row_sums
from tests.kernels.devices import DEVICE, needs_triton

# Rows of the table, columns, and of each id its row: long rows take several tiles and all programs.
CASES = {
    "one id": (1, 16, [0]),
    "no ids": (5, 16, []),
    "empty rows": (9, 32, [1, 1, 4, 7]),
    "one row has everything": (5, 64, [2] * 1037),
    "rows of 0 to 600 ids": (7, 128, [row for row in range(7) for _ in range(100 * row)]),
    "one tile and one more": (3, 16, [0] * 32 + [1] * 33 + [2] * (8 * 32 + 1)),
    "padding": (4, 16, [-1] * 40 + [1, 1, 3]),
}


def draw(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient, sorted ids, the bag of each (some bags never, some several times), memory for the sums."""
    rows, columns, ids = CASES[case]
    generator = torch.Generator().manual_seed(0)
    bags = 1 + len(ids) * 2 // 3
    grad = torch.randn(bags, columns, generator=generator).to(dtype)
    sorted_bags = torch.randint(bags, (len(ids),), generator=generator, dtype=torch.int32)
    sorted_ids = torch.tensor(ids, dtype=torch.int32)
    tensors = grad, sorted_ids, sorted_bags, torch.full((rows, columns), torch.nan)
    return tuple(tensor.to(DEVICE) for tensor in tensors)  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "sums", [row_sums, plain_row_sums, pytest.param(triton_row_sums, marks=needs_triton)], ids=lambda f: f.__name__
)
def test_equals_index_add(sums, dtype: torch.dtype, case: str) -> None:
    grad, sorted_ids, sorted_bags, out = draw(case, dtype)
    sums(grad, sorted_bags, row_starts(sorted_ids, len(out)), out)
    exact = torch.zeros(out.shape, dtype=torch.float64, device=DEVICE)
    named = sorted_ids >= 0
    exact.index_add_(0, sorted_ids[named], grad[sorted_bags[named].long()].double())
    # The gradient is converted before it is added, so bf16 costs no accuracy.
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("case", ["one row has everything", "rows of 0 to 600 ids"])
def test_equal_inputs_give_equal_bits(case: str) -> None:
    grad, sorted_ids, sorted_bags, out = draw(case, torch.float32)
    starts, again = row_starts(sorted_ids, len(out)), torch.zeros_like(out)
    triton_row_sums(grad, sorted_bags, starts, out)
    triton_row_sums(grad, sorted_bags, starts, again)
    assert torch.equal(out, again)


def test_row_starts() -> None:
    ids = torch.tensor([1, 1, 4, 7], dtype=torch.int32, device=DEVICE)
    starts = row_starts(ids, 9)
    assert starts.dtype == torch.int32
    assert starts.tolist() == [0, 0, 2, 2, 2, 3, 3, 3, 4, 4]
    assert row_starts(ids[:0], 2).tolist() == [0, 0, 0]


def test_shapes_are_checked() -> None:
    grad, sorted_ids, sorted_bags, out = draw("empty rows", torch.float32)
    starts = row_starts(sorted_ids, len(out))
    with pytest.raises(AssertionError, match="power of two"):
        row_sums(grad[:, :24].contiguous(), sorted_bags, starts, out[:, :24].contiguous())
    with pytest.raises(AssertionError, match=r"\[R, C\]"):
        row_sums(grad, sorted_bags, starts, out[1:])
