"""Zeros past the last token, Triton's as plain."""

import pytest
import torch

from dlrm_bench.kernels.dense.zero_tail import plain_zero_tail, triton_zero_tail, zero_tail
from tests.kernels.devices import DEVICE, needs_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end", [0, 1, 36, 37, 40])
@pytest.mark.parametrize("zero", [zero_tail, plain_zero_tail, pytest.param(triton_zero_tail, marks=needs_triton)])
def test_rows_from_the_end_on_are_zero(zero, end: int, dtype: torch.dtype) -> None:
    whole = torch.ones(37, 60, dtype=dtype, device=DEVICE)
    whole[:, 12:48] = torch.nan
    zero(whole[:, 12:48], torch.tensor([end], device=DEVICE))
    assert whole[:end, 12:48].isnan().all()
    assert not whole[end:, 12:48].any()
    assert (whole[:, :12] == 1).all()
    assert (whole[:, 48:] == 1).all()
