"""Products in eight bits: the plain functions against fp32, the kernels against the plain functions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.dense import cross, fused_cross, mlp
from dlrm_bench.kernels.dense.fp8 import (
    E4M3,
    E5M2,
    Fp8,
    applies,
    cuda_fp8_product,
    empty,
    fp8_product,
    plain_fp8_product,
    quantise,
)

BF16 = torch.bfloat16
CPU = torch.device("cpu")
# Rows and columns of one tile and of many, with edges inside of tiles; depths of one step, of six that fill the stages,
# and of many; sums that are moved to fp32 at the last step and before.
SHAPES = [(1, 16, 16), (128, 128, 128), (37, 272, 80), (300, 512, 768), (515, 144, 1040), (3456, 512, 3456)]


def randn(*shape: int, device: str | torch.device = "cuda", scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(BF16)


def in_eight_bits(x: Tensor, dtype: torch.dtype = E4M3, scale: float = 16.0) -> Fp8:
    rounded = empty(*x.shape, dtype, scale, x.device)
    rounded.take(x)
    return rounded


def equal(got: Fp8, expected: Fp8) -> bool:
    return torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "largest", "error"), [(E4M3, 448, 2**-4), (E5M2, 57344, 2**-3)])
def test_rounds_to_the_nearest_and_keeps_what_is_too_large_finite(
    dtype: torch.dtype, largest: float, error: float
) -> None:
    x = torch.randn(40, 32)
    rounded = in_eight_bits(x, dtype, 64.0).float()
    assert ((rounded - x).abs() <= error * x.abs() + 2**-9 / 64).all()
    assert not torch.equal(rounded, x)
    beyond = torch.tensor([[1e9, -1e9, torch.inf, torch.nan]])
    rounded = in_eight_bits(beyond, dtype, 4.0).float()
    assert rounded[0, :3].tolist() == [largest / 4, -largest / 4, largest / 4]
    assert rounded[0, 3].isnan()


def test_equals_products_of_the_rounded_factors() -> None:
    a, b = in_eight_bits(torch.randn(33, 48), E5M2, 2.0), in_eight_bits(torch.randn(16, 48), E4M3, 8.0)
    bias, out, out8 = torch.randn(16), torch.empty(33, 16), empty(33, 16, E4M3, 0.5, CPU)
    fp8_product(a, b, out, out8, bias)
    expected = (a.values.float() / 2 @ (b.values.float() / 8).t() + bias).relu()
    torch.testing.assert_close(out, expected)
    assert equal(out8, in_eight_bits(out, E4M3, 0.5))


def test_refuses_what_the_kernels_do_not_take() -> None:
    a, b = empty(8, 16, E4M3, 1.0, CPU), empty(16, 16, E5M2, 1.0, CPU)
    with pytest.raises(AssertionError, match="e4m3"):
        fp8_product(a, b, torch.empty(8, 16))
    assert not applies(CPU)


def needs_hopper(test: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(not available(), reason="needs a Hopper GPU (sm_90a) and cuda-bindings")
    return pytest.mark.gpu(skip(test))


def close(got: Tensor, expected: Tensor, error: float = 3e-4) -> None:
    """Equal but for the last bit here and there: bf16 of sums that were added up in another order."""
    difference = (got.float() - expected.float()).norm()
    assert difference <= error * expected.float().norm() + 1e-6, (difference / expected.float().norm()).item()
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * expected.float().abs().max().item())


@needs_hopper
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_product_equals_plain(shape: tuple[int, int, int], relu: bool, dtype: torch.dtype) -> None:
    rows, columns, depth = shape
    a, b = in_eight_bits(randn(rows, depth), dtype, 4.0), in_eight_bits(randn(columns, depth, scale=0.05), E4M3, 64.0)
    bias = randn(columns) if relu else None
    got, expected = (torch.full((rows, columns), torch.nan, device="cuda", dtype=BF16) for _ in range(2))
    got8 = empty(rows, columns, dtype, 2.0, got.device)
    cuda_fp8_product(a, b, got, got8, bias)
    plain_fp8_product(a, b, expected, None, bias)
    close(got, expected, 2e-3)  # 14 bits over a depth of 512
    assert equal(got8, in_eight_bits(got, dtype, 2.0))
    # The latter by cuBLAS where there is no bias, which adds up any depth with so many bits.
    for product, error in ((cuda_fp8_product, 2e-3), (fp8_product, 1e-2)):
        alone = torch.full_like(got, torch.nan)
        product(a, b, alone, None, bias)
        close(alone, expected, error)


@needs_hopper
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_kernels_round_as_pytorch_does(dtype: torch.dtype) -> None:
    x = torch.cat([randn(100, 3456), randn(100, 3456, scale=1e4), randn(100, 3456, scale=1e-3)])
    out = empty(*x.shape, dtype, 16.0, x.device)
    quantise(x, out)
    assert equal(out, in_eight_bits(x, dtype, 16.0))


@needs_hopper
def test_element_wise_kernels_write_eight_bits_too() -> None:
    g, out, x0 = (randn(3000, 1024) for _ in range(3))
    dz, dz8 = torch.empty_like(g), empty(*g.shape, E5M2, 16.0, g.device)
    mlp.bias_relu_backward(g, out, dz, torch.empty(mlp.partial_rows(len(g)), g.shape[1], device="cuda"), dz8)
    assert torch.equal(dz, g * (out > 0))
    assert equal(dz8, in_eight_bits(dz, E5M2))
    cross.cross_output_backward(g, x0, dz, torch.empty(cross.partial_rows(len(g)), g.shape[1], device="cuda"), dz8)
    assert torch.equal(dz, (g.float() * x0.float()).to(BF16))
    assert equal(dz8, in_eight_bits(g.float() * x0.float(), E5M2))


@needs_hopper
@pytest.mark.parametrize("shape", [(1, 16, 16), (37, 272, 48), (515, 3472, 512), (2051, 144, 80), (3456, 3456, 512)])
def test_fused_cross_kernels_equal_plain_ones(shape: tuple[int, int, int]) -> None:
    batch, width, depth = shape
    x0, x, g = (randn(batch, width) for _ in range(3))
    u, du = in_eight_bits(randn(batch, depth)), in_eight_bits(randn(batch, depth), E5M2)
    w, v = (in_eight_bits(randn(width, depth, scale=0.05), E4M3, 64.0) for _ in range(2))
    bias = randn(width)
    partials = torch.empty(fused_cross.partial_rows(batch, width, x.device), width, device="cuda")
    results = []
    for forward, backward, by_input in (
        (
            fused_cross.cuda_fused_cross_forward,
            fused_cross.cuda_fused_cross_backward,
            fused_cross.cuda_fused_cross_input_backward,
        ),
        (
            fused_cross.plain_fused_cross_forward,
            fused_cross.plain_fused_cross_backward,
            fused_cross.plain_fused_cross_input_backward,
        ),
    ):
        y, out, dx, dy, dx0 = (torch.full_like(x, torch.nan) for _ in range(5))
        out8, dy8 = empty(batch, width, E4M3, 16.0, x.device), empty(batch, width, E5M2, 16.0, x.device)
        forward(x0, x, u, w, bias, y, out, out8)
        backward(g, du, v, x0, dx, dy, partials.fill_(torch.nan), dy8)
        by_input([dx, g, x], [y, x0, out], du, v, dx0)
        assert equal(out8, in_eight_bits(out))
        assert equal(dy8, in_eight_bits(dy, E5M2))
        results.append((y, out, dx, dy, partials.sum(0), dx0))
    for got, expected in zip(*results, strict=True):
        close(got, expected, 2e-3)
