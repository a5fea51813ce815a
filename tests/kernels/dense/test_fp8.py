"""Products in eight bits: the plain functions against fp32, the kernels against the plain functions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import available
from dlrm_bench.kernels.dense import fused_cross
from dlrm_bench.kernels.dense.fp8 import (
    E4M3,
    E5M2,
    Fp8,
    Fp8Pair,
    applies,
    check_pair,
    cuda_fp8_product,
    empty,
    empty_pair,
    fp8_product,
    plain_fp8_product,
    rounded,
)

BF16 = torch.bfloat16
CPU = torch.device("cpu")
# Rows and columns of one tile and of many, with edges inside of tiles; depths of one step, of six that fill the stages,
# and of many; sums that are moved to fp32 at the last step and before. Outputs in eight bits have multiples of 16 rows.
SHAPES = [(1, 16, 16), (16, 16, 16), (128, 128, 128), (48, 272, 80), (304, 512, 768), (528, 144, 1040)]
SHAPES += [(515, 144, 1040), (3456, 512, 3456)]


def randn(*shape: int, device: str | torch.device = "cuda", scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(BF16)


def in_eight_bits(x: Tensor, dtype: torch.dtype = E4M3, scale: float = 16.0) -> Fp8:
    rounded = empty(*x.shape, dtype, scale, x.device)
    rounded.take(x)
    return rounded


def pair_of(x: Tensor, dtype: torch.dtype = E4M3, scale: float = 16.0) -> Fp8Pair:
    rounded = empty_pair(*x.shape, dtype, scale, x.device)
    rounded.take(x)
    return rounded


def empty_part(rows: int, columns: int, dtype: torch.dtype, scale: float, device: torch.device) -> Fp8Pair:
    """The second of three parts of a batch."""
    return empty_pair(3 * rows, columns, dtype, scale, device).rows(slice(rows, 2 * rows))


def equal(got: Fp8Pair, expected: Fp8Pair) -> bool:
    parts = zip(got, expected, strict=True)
    return all(torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) for a, b in parts)


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


def test_pairs_have_the_order_of_fragments() -> None:
    x = torch.arange(32.0)[:, None] * torch.ones(16)
    pair = pair_of(x, E5M2, 1.0)
    assert torch.equal(pair.plain.float(), in_eight_bits(x, E5M2, 1.0).float())
    rows = [first + row for first in (0, 16) for low in range(8) for row in (low, low + 8)]
    assert torch.equal(pair.transposed.float(), pair.plain.float()[rows].t())
    part = pair.rows(slice(16, 32))
    assert torch.equal(part.transposed.float(), pair.transposed.float()[:, 16:])


def test_equals_products_of_the_rounded_factors() -> None:
    a, b = in_eight_bits(torch.randn(32, 48), E5M2, 2.0), in_eight_bits(torch.randn(16, 48), E4M3, 8.0)
    bias, out, out8 = torch.randn(16), torch.empty(32, 16), empty_pair(32, 16, E4M3, 0.5, CPU)
    fp8_product(a, b, out, bias)
    expected = (a.values.float() / 2 @ (b.values.float() / 8).t() + bias).relu()
    torch.testing.assert_close(out, expected)
    fp8_product(a, b, out8, bias)
    assert equal(out8, pair_of(expected.to(BF16), E4M3, 0.5))
    fp8_product(a, b, out, bias=bias)
    torch.testing.assert_close(out, a.values.float() / 2 @ (b.values.float() / 8).t() + bias)


def test_rounds_any_strides_to_contiguous_e4m3() -> None:
    x, tally = torch.randn(16, 48), tally_on(CPU)
    x[3, 4] = 449.0 / 64
    of_transposed = rounded(x.t(), 64.0, tally)
    assert of_transposed.values.is_contiguous()
    assert torch.equal(of_transposed.values.float(), (x.t() * 64).clamp(-448, 448).to(E4M3).float())
    assert tally.tolist() == [1, 0]


def test_sums_over_the_batch_need_one_order_only() -> None:
    x, y = torch.randn(48, 32), torch.randn(48, 16)
    out = torch.empty(32, 16)
    fp8_product(pair_of(x, E5M2).transposed, pair_of(y).transposed, out, exact=True)
    torch.testing.assert_close(out, in_eight_bits(x, E5M2).float().t() @ in_eight_bits(y).float())


def test_y_in_tiles_is_y() -> None:
    y, tiles = torch.randn(70, 144), fused_cross.empty_y(70, 144, 16.0, CPU)
    fused_cross.take_y(tiles, y)
    assert torch.equal(fused_cross.read_y(tiles, *y.shape), in_eight_bits(y).float())


def test_refuses_what_the_kernels_do_not_take() -> None:
    a, b = empty(8, 16, E4M3, 1.0, CPU), empty(16, 16, E5M2, 1.0, CPU)
    with pytest.raises(AssertionError, match="e4m3"):
        fp8_product(a, b, torch.empty(8, 16))
    with pytest.raises(AssertionError, match="multiples of 16"):
        fp8_product(a, empty(16, 16, E4M3, 1.0, CPU), empty_pair(8, 16, E4M3, 1.0, CPU))
    for wrong in ({"relu_bias": torch.zeros(16)}, {"out": empty_pair(16, 16, E4M3, 1.0, CPU)}):
        given = {"out": torch.empty(8, 16), **wrong}
        with pytest.raises(AssertionError, match="bias: for bf16 outputs without a ReLU"):
            fp8_product(a, empty(16, 16, E4M3, 1.0, CPU), bias=torch.zeros(16), **given)
    for name in ("bias", "relu_bias"):  # PyTorch would use the one number for all columns
        with pytest.raises(AssertionError, match=r"bias: \[columns\]"):
            fp8_product(a, empty(16, 16, E4M3, 1.0, CPU), torch.empty(8, 16), **{name: torch.zeros(1)})
    for out, relu_bias in (
        (torch.empty(8, 16), torch.zeros(16).bfloat16()),
        (torch.empty(8, 16).bfloat16(), a.float()),
    ):
        with pytest.raises(AssertionError, match="bf16 outputs and biases"):
            cuda_fp8_product(a, empty(16, 16, E4M3, 1.0, CPU), out, relu_bias)
    values = torch.zeros(16 * 16 + 8, dtype=E4M3)[8:].view(16, 16)
    with pytest.raises(AssertionError, match="16-byte aligned"):
        check_pair(Fp8Pair(Fp8(values, 1.0), empty(16, 16, E4M3, 1.0, CPU)), 16, 16)
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
    expected = torch.full((rows, columns), torch.nan, device="cuda", dtype=BF16)
    plain_fp8_product(a, b, expected, bias)
    # The latter by cuBLAS where there is no bias, which adds up any depth with 14 bits, not 512.
    for product, error in ((cuda_fp8_product, 2e-3), (fp8_product, 1e-2)):
        got = torch.full_like(expected, torch.nan)
        product(a, b, got, bias)
        close(got, expected, error)
    if not relu:
        got.fill_(torch.nan)
        fp8_product(a, b, got, exact=True)
        close(got, expected, 2e-3)
    if rows % 16 == 0:
        cuda_fp8_product(a, b, got, bias)
        got8 = empty_part(rows, columns, dtype, 2.0, got.device)
        fp8_product(a, b, got8, bias)
        assert equal(got8, pair_of(got, dtype, 2.0))


@needs_hopper
@pytest.mark.parametrize("shape", [(1, 16, 16), (5000, 2048, 512), (4999, 1024, 512), (4999, 512, 1536)])
def test_products_with_a_bias_equal_plain_ones(shape: tuple[int, int, int]) -> None:
    """By cuBLAS, any number of rows; sums over the whole depth have some 14 bits."""
    rows, columns, depth = shape
    a, b = in_eight_bits(randn(rows, depth), E4M3, 8.0), in_eight_bits(randn(columns, depth, scale=0.05), E4M3, 64.0)
    for bias in (randn(columns), None):
        expected, got = (torch.full((rows, columns), torch.nan, device="cuda", dtype=BF16) for _ in range(2))
        plain_fp8_product(a, b, expected, bias=bias)
        fp8_product(a, b, got, bias=bias)
        close(got, expected, 1e-2)


@needs_hopper
@pytest.mark.parametrize(
    "shape", [(16, 16, 16), (48, 272, 48), (528, 3472, 512), (2064, 144, 80), (3456, 3456, 512), (528, 3456, 1024)]
)
def test_fused_cross_kernels_equal_plain_ones(shape: tuple[int, int, int]) -> None:
    batch, width, depth = shape
    x0, x, g = (randn(batch, width) for _ in range(3))
    u, du = in_eight_bits(randn(batch, depth)), in_eight_bits(randn(batch, depth), E5M2)
    w, v = (in_eight_bits(randn(width, depth, scale=0.05), E4M3, 64.0) for _ in range(2))
    bias = randn(width)
    partials = torch.empty(fused_cross.partial_rows(batch, width, x.device), width, device="cuda")
    x_tiles = fused_cross.empty_y(batch, width, 16.0, x.device)
    fused_cross.take_y(x_tiles, x)
    results, rounded = [], []
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
        y, out, dx, dx0, from_tiles = (torch.full_like(x, torch.nan) for _ in range(5))
        tiles = fused_cross.empty_y(batch, width, 16.0, x.device)
        out8, alone8 = (empty_part(batch, width, E4M3, 16.0, x.device) for _ in range(2))
        dy8, last8 = (empty_part(batch, width, E5M2, 16.0, x.device) for _ in range(2))
        forward(x0, x, u, w, bias, y, out, out8)
        forward(x0, x, u, w, bias, tiles, None, alone8)
        backward(None, du, v, x0, dx, last8, partials.fill_(torch.nan))
        of_last = dx.clone(), partials.sum(0)
        backward(g, du, v, x0, dx, dy8, partials.fill_(torch.nan))
        by_input([dx, g, x], [y, x0, out], du, v, dx0)
        by_input([dx, g, x], [x_tiles] * 3, du, v, from_tiles)
        assert equal(out8, pair_of(out))
        assert equal(alone8, out8)
        results.append((y, out, dx, partials.sum(0), dx0, *of_last, from_tiles))
        assert all(equal(pair, pair_of(pair.plain.float(), E5M2)) for pair in (dy8, last8))
        rounded.append([fused_cross.read_y(tiles, batch, width), dy8.plain.float(), last8.plain.float()])
    for got, expected in zip(*results, strict=True):
        close(got, expected, 2e-3 if depth <= 512 else 4e-3)
    # Here and there the adjacent number, where the value before rounding differs in the last bit.
    for got, expected in zip(*rounded, strict=True):
        assert (got - expected).norm() <= 2e-2 * expected.norm()
        assert ((got - expected).abs() <= expected.abs() / 4 + expected.abs().max() / 100).all()


def tally_on(device: str | torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def spoil(x: Tensor, beyond: float) -> Tensor:
    """Makes five numbers too large for a format whose largest is `beyond`, one just not, and two not finite."""
    places = {(0, 0): 2, (1, 5): -2, (9, 7): 1e3, (15, 15): -4, (-1, -1): 1.25, (2, 2): -1}
    for place, factor in places.items():
        x[place] = factor * beyond
    x[3, 3], x[12, 1] = torch.inf, torch.nan
    return x


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448), (E5M2, 57344)])
def test_counts_what_eight_bits_do_not_hold(dtype: torch.dtype, largest: float) -> None:
    tally, x = tally_on(CPU), torch.randn(32, 16)
    pair = empty_pair(32, 16, dtype, 4.0, CPU, tally)
    pair.take(x)
    assert tally.tolist() == [0, 0]
    pair.rows(slice(16, 32)).take(spoil(x, largest / 4)[:16])
    pair.take(x)
    assert tally.tolist() == [4 + 5, 4]
    assert pair.plain.tallied() == (tally.data_ptr(), (torch.tensor(largest / 4).view(torch.int32) >> 16).item())
    assert pair.transposed.tallied() == (None, 0xFFFF)
    y = fused_cross.empty_y(32, 16, 4.0, CPU, tally.zero_())
    fused_cross.take_y(y, spoil(x, 112))
    assert tally.tolist() == [5, 2]


@needs_hopper
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(16, 16, 16), (48, 272, 80), (528, 3472, 512)])
def test_cuda_products_count_as_plain_ones(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Factors of small whole numbers, whose sums are exact in any order; scales that some sums exceed."""
    batch, width, depth = shape
    largest = torch.finfo(dtype).max

    def whole(rows: int) -> Tensor:
        return torch.randint(-2, 3, (rows, depth), device="cuda").to(BF16)

    scale = 2.0 ** round(torch.tensor(largest / (2.5 * depth**0.5)).log2().item())
    a, b = in_eight_bits(whole(batch), E4M3, 1.0), in_eight_bits(whole(width), E4M3, 1.0)
    tallies = [tally_on("cuda") for _ in range(2)]
    for product, tally in zip((cuda_fp8_product, plain_fp8_product), tallies, strict=True):
        product(a, b, empty_pair(batch, width, dtype, scale, tally.device, tally))
    assert tallies[0].tolist() == tallies[1].tolist()
    assert batch == 16 or 0 < tallies[1][0] < batch * width / 2


@needs_hopper
@pytest.mark.parametrize("shape", [(16, 16, 16), (48, 272, 80), (528, 3472, 512)])
def test_fused_cross_kernels_count_as_plain_ones(shape: tuple[int, int, int]) -> None:
    """Shapes as above; x0 of one, and of Infinity and NaN in places."""
    batch, width, depth = shape
    a, b = (
        in_eight_bits(torch.randint(-2, 3, (rows, depth), device="cuda").to(BF16), E4M3, 1.0) for rows in (batch, width)
    )
    x0, x, bias = (torch.ones(*size, device="cuda").to(BF16) for size in ((batch, width), (batch, width), (width,)))
    x0[0, 0], x0[batch - 1, width - 1], x0[batch // 2, 3] = torch.inf, torch.nan, -torch.inf
    bias[5] = torch.inf
    scale = 2.0 ** round(torch.tensor(448 / (2.5 * depth**0.5)).log2().item())
    partials = torch.empty(fused_cross.partial_rows(batch, width, x.device), width, device="cuda")
    counts = []
    for forward, backward in (
        (fused_cross.cuda_fused_cross_forward, fused_cross.cuda_fused_cross_backward),
        (fused_cross.plain_fused_cross_forward, fused_cross.plain_fused_cross_backward),
    ):
        tallies = torch.zeros(4, 2, dtype=torch.int64, device="cuda")
        y = fused_cross.empty_y(batch, width, scale, x.device, tallies[0])
        out8 = empty_pair(batch, width, E4M3, scale, x.device, tallies[1])
        dy8, last8 = (empty_pair(batch, width, E5M2, 128 * scale, x.device, tally) for tally in tallies[2:])
        forward(x0, x, a, b, bias, y, torch.empty_like(x), out8)
        backward(x, a, b, x0, torch.empty_like(x), dy8, partials)
        backward(None, a, b, x0, torch.empty_like(x), last8, partials)
        counts.append(tallies.tolist())
    assert counts[0] == counts[1]
    assert counts[1][0][1] == batch
    assert all(not_finite > 0 for _, not_finite in counts[1])
    assert batch == 16 or all(large > 0 for large, _ in counts[1])
