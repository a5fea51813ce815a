"""Zeros past the last token, Triton's as plain."""

import pytest
import torch

from dlrm_bench.kernels.dense.zero_tail import plain_zero_tail, triton_zero_tail, zero_tail
from tests.kernels.devices import DEVICE, needs_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end", [0, 1, 36, 37, 40])
@pytest.mark.parametrize("zero", [zero_tail, plain_zero_tail, pytest.param(triton_zero_tail, marks=needs_triton)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_from_the_end_on_are_zero(zero, count: int, end: int, dtype: torch.dtype) -> None:
    """Of columns of matrices of several widths."""
    matrices = [torch.ones(37, columns, dtype=dtype, device=DEVICE) for columns in (60, 49, 90)[:count]]
    outs = [whole[:, 12:48] if len(whole[0]) == 60 else whole[:, 12:-12] for whole in matrices]
    for out in outs:
        out.fill_(torch.nan)
    zero(outs, torch.tensor([end], device=DEVICE))
    for whole, out in zip(matrices, outs, strict=True):
        assert out[:end].isnan().all()
        assert not out[end:].any()
        assert (whole[:, :12] == 1).all()
        assert (whole[:, 12 + out.shape[1] :] == 1).all()


def test_matrices_are_checked() -> None:
    end, of = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.ones(4, 8, device=DEVICE)
    for outs in ([], [of] * 4, [of, of[1:]], [of, of.bfloat16()]):
        with pytest.raises(AssertionError, match="of one N and dtype"):
            zero_tail(outs, end)
