"""Sums of rows by sorted keys: against index_add, Triton against plain; keys of no row, of few and of most."""

import pytest
import torch

from dlrm_bench.kernels.dense.sorted_sums import plain_sorted_sums, sort_keys, sorted_sums, triton_sorted_sums
from tests.kernels.devices import DEVICE, needs_triton

KEYS = {
    "none": [],
    "one": [3],
    "of no sum": [7, 9, 7],
    "one has all": [2] * 600,
    "of whole runs": [1] * 128 + [2] * 256 + [5] * 128 + [7] * 50,
    "every one": [0, 1, 2, 3, 4, 5, 6] * 3,
    "mixed": [4] * 100 + [0] * 5 + [7] * 90 + [4] * 200 + [6] + [1] * 129 + [3] * 30,
}
COUNT, WIDTH = 7, 16
SUMS = pytest.mark.parametrize(
    "sums", [sorted_sums, plain_sorted_sums, pytest.param(triton_sorted_sums, marks=needs_triton)]
)


@SUMS
@pytest.mark.parametrize("case", KEYS)
def test_sums_are_those_of_each_keys_rows(sums, case: str) -> None:
    keys = torch.tensor(KEYS[case], dtype=torch.int32, device=DEVICE)
    rows = torch.randn(len(keys), WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows[keys >= COUNT] = torch.nan
    expected = torch.zeros(COUNT, WIDTH, dtype=torch.float64, device=DEVICE)
    named = keys < COUNT
    expected.index_add_(0, keys[named].long(), rows[named].double())
    out = torch.full((COUNT, WIDTH), torch.nan, device=DEVICE)
    sums(rows, sort_keys(keys, COUNT), 2.5, out)
    torch.testing.assert_close(out.double(), 2.5 * expected, rtol=1e-5, atol=1e-4)


@SUMS
def test_bf16_rows_are_summed_in_fp32(sums) -> None:
    keys = torch.zeros(700, dtype=torch.int32, device=DEVICE)
    rows = torch.full((700, WIDTH), 1.0, device=DEVICE).bfloat16()
    out = torch.empty(1, WIDTH, device=DEVICE)
    sums(rows, sort_keys(keys, 1), 1.0, out)
    assert (out == 700).all()


@needs_triton
def test_equal_inputs_give_equal_bits() -> None:
    keys = torch.tensor(KEYS["mixed"], dtype=torch.int32, device=DEVICE)
    rows = torch.randn(len(keys), WIDTH, device=DEVICE)
    outs = torch.empty(2, COUNT, WIDTH, device=DEVICE).unbind()
    for out in outs:
        triton_sorted_sums(rows, sort_keys(keys, COUNT), 1.0, out)
    assert torch.equal(*outs)


@pytest.mark.gpu
def test_many_keys_on_a_gpu() -> None:
    keys = (torch.rand(200_000, device=DEVICE) ** 8 * 5000).int()
    rows = torch.randn(len(keys), 512, device=DEVICE).bfloat16()
    outs = torch.empty(2, 5000, 512, device=DEVICE).unbind()
    for sums, out in zip((plain_sorted_sums, triton_sorted_sums), outs, strict=True):
        sums(rows, sort_keys(keys, 5000), 1.0, out)
    torch.testing.assert_close(*outs, rtol=1e-4, atol=2e-2)
