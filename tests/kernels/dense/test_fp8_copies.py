"""Copies in eight bits: the plain function against a bf16 computation, the kernel against the plain one."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.dense import mlp
from dlrm_bench.kernels.dense.fp8 import E4M3, E5M2, empty_pair
from dlrm_bench.kernels.dense.fp8_copies import cuda_fp8_copies, fp8_copies, partial_rows, plain_fp8_copies
from tests.kernels.dense.test_fp8 import BF16, empty_part, equal, needs_hopper, pair_of, spoil

# A part of one tile and many, with edges inside of one.
SHAPES = [(16, 16), (64, 64), (48, 272), (528, 144), (3456, 1024)]


def partials_of(x: Tensor) -> Tensor:
    return torch.full((partial_rows(len(x)), x.shape[1]), torch.nan, device=x.device)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_relu_backward_is_that_in_bf16(place: str) -> None:
    g, out = (torch.randn(80, 48, device=place).to(BF16) for _ in range(2))
    got, expected = empty_part(80, 48, E5M2, 16.0, g.device), torch.empty_like(g)
    partials, expected_partials = partials_of(g), torch.empty(mlp.partial_rows(80), 48, device=place)
    fp8_copies(g, got, out, partials)
    mlp.bias_relu_backward(g, out, expected, expected_partials)
    for a, b in zip(got, pair_of(expected, E5M2), strict=True):
        assert torch.equal(a.float(), b.float())
    torch.testing.assert_close(partials.sum(0), expected_partials.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nan_is_open_and_stays(place: str) -> None:
    g, out = torch.ones(16, 16, device=place).to(BF16), torch.ones(16, 16, device=place).to(BF16)
    out[3, 5], out[4, 6], g[7, 8] = torch.nan, -1, torch.nan
    got, partials = empty_part(16, 16, E5M2, 16.0, g.device), partials_of(g)
    fp8_copies(g, got, out, partials)
    expected = torch.ones(16, 16, device=place)
    expected[4, 6], expected[7, 8] = 0, torch.nan
    assert torch.equal(got.plain.float().nan_to_num(99), expected.nan_to_num(99))
    assert partials.sum(0).isnan().nonzero().tolist() == [[8]]


@needs_hopper
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_equals_plain(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, mask = (torch.randn(*shape, device="cuda") for _ in range(2))
    x[::3] *= 1e4  # out of the formats' range
    x[1::3] *= 1e-3
    x, mask = x.to(BF16), mask.to(BF16)
    got, expected = (empty_part(*shape, dtype, 16.0, x.device) for _ in range(2))
    cuda_fp8_copies(x, got)
    plain_fp8_copies(x, expected)
    assert equal(got, expected)
    sums, expected_sums = (partials_of(x) for _ in range(2))
    cuda_fp8_copies(x, got, mask, sums)
    plain_fp8_copies(x, expected, mask, expected_sums)
    assert equal(got, expected)
    largest = x.abs().max().item() * len(x)
    torch.testing.assert_close(sums.sum(0), expected_sums.sum(0), rtol=1e-4, atol=1e-5 * largest)


def test_refuses_what_the_kernel_does_not_take() -> None:
    x, out = torch.zeros(24, 32), empty_part(16, 32, E5M2, 1.0, torch.device("cpu"))
    with pytest.raises(AssertionError, match="multiples of 16"):
        fp8_copies(x, empty_part(24, 32, E4M3, 1.0, x.device))
    with pytest.raises(AssertionError, match="width"):
        fp8_copies(torch.zeros(32, 16).t(), out)
    with pytest.raises(AssertionError, match="both or neither"):
        fp8_copies(x[:16], out, x[:16])
    with pytest.raises(AssertionError, match="partial_rows"):
        fp8_copies(x[:16], out, x[:16], torch.empty(2, 32))
    with pytest.raises(AssertionError, match="partials: fp32"):
        fp8_copies(x[:16], out, x[:16], torch.empty(1, 32, dtype=BF16))
    unaligned = torch.zeros(16 * 32 + 4, dtype=BF16)[4:].view(16, 32)
    for wrong in ((x[:16], out), (x[:16].to(BF16), out, x[:16], torch.empty(1, 32)), (unaligned, out)):
        with pytest.raises(AssertionError, match="bf16, 16-byte aligned"):
            cuda_fp8_copies(*wrong)


@needs_hopper
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_counts_as_plain(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, mask = spoil(torch.randn(*shape, device="cuda").to(BF16), torch.finfo(dtype).max / 4), torch.randn(*shape).cuda()
    tallies = torch.zeros(2, 2, 2, dtype=torch.int64, device="cuda")
    for copies, (plain, masked) in zip((cuda_fp8_copies, plain_fp8_copies), tallies, strict=True):
        copies(x, empty_pair(*shape, dtype, 4.0, x.device, plain))
        copies(x, empty_pair(*shape, dtype, 4.0, x.device, masked), mask.to(BF16), partials_of(x))
    assert tallies[0].tolist() == tallies[1].tolist()
    assert tallies[0, 0].tolist() == [4 if shape == (16, 16) else 5, 2]  # there two places are one
