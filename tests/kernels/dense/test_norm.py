"""Layer norm of tokens: against PyTorch's and autograd, Triton against plain."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.kernels.dense import norm
from dlrm_bench.kernels.dense.norm import (
    norm_backward,
    norm_forward,
    plain_norm_backward,
    plain_norm_forward,
    triton_norm_backward,
    triton_norm_forward,
)
from tests.kernels.devices import DEVICE, assert_rounds, needs_triton, unfilled_e4m3

WIDTH, EPS = 32, 1e-6
SIZES = [(0, 0), (1, 1), (5, 4), (9, 9), (40, 0)]
"""Rows, and how many of them are tokens."""
WAYS = pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (norm_forward, norm_backward),
        (plain_norm_forward, plain_norm_backward),
        pytest.param(triton_norm_forward, triton_norm_backward, marks=needs_triton),
    ],
    ids=["chosen", "plain", "triton"],
)


def draw(rows: int, end: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> tuple[Tensor, ...]:
    """Gradient, x, weight, bias, end and residual; what lies past the end is no number."""
    generator = torch.Generator().manual_seed(rows)
    drawn = [torch.randn(rows, width, generator=generator).to(dtype).to(DEVICE) for _ in range(3)]
    for of in drawn:
        of[end:] = torch.nan
    weight, bias = (torch.randn(width, generator=generator).to(dtype).to(DEVICE) for _ in range(2))
    return drawn[0], drawn[1] + 3, weight, bias, torch.tensor([end], device=DEVICE), drawn[2]


def results_like(x: Tensor) -> list[Tensor]:
    """Memory for two matrices, and for the gradients of weight and bias."""
    return [torch.empty_like(x), torch.empty_like(x), torch.empty(2, x.shape[1], device=DEVICE)]


@WAYS
@pytest.mark.parametrize(("rows", "end"), SIZES)
def test_equals_pytorchs_and_its_derivative(forward, backward, rows: int, end: int, monkeypatch) -> None:
    monkeypatch.setattr(norm, "PROGRAMS", 2)  # each of several tiles
    grad, x, weight, bias, at, residual = draw(rows, end)
    exact = [of.double().requires_grad_() for of in (x[:end], weight, bias)]
    expected = functional.layer_norm(exact[0], (WIDTH,), exact[1], exact[2], EPS)
    of_inputs = torch.autograd.grad(expected, exact, grad[:end].double())

    out = torch.full_like(x, torch.nan)
    forward(x, weight, bias, at, out, EPS)
    torch.testing.assert_close(out[:end].double(), expected, rtol=1e-5, atol=1e-5)
    assert not out[end:].any()

    for add in (False, True):
        dx, again = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        dnorm = torch.full((2, WIDTH), torch.nan, device=DEVICE)
        backward(grad, x, weight, bias, at, residual if add else None, dx, again, dnorm, EPS)
        of_x = of_inputs[0] + (residual[:end].double() if add else 0)
        torch.testing.assert_close(dx[:end].double(), of_x, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(dnorm.double(), torch.stack(of_inputs[1:]), rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(again, out, rtol=1e-5, atol=1e-5)
        assert not dx[end:].any()


@WAYS
def test_gradients_may_take_their_inputs_memory(forward, backward) -> None:
    grad, x, weight, bias, at, residual = draw(9, 7)
    expected = results_like(x)
    plain_norm_backward(grad, x, weight, bias, at, residual, *expected, EPS)
    dnorm = torch.empty_like(expected[2])
    backward(grad, x, weight, bias, at, residual, residual, grad, dnorm, EPS)
    for got, value in zip((residual, grad, dnorm), expected, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)


@WAYS
def test_without_an_end_all_rows_count(forward, backward) -> None:
    grad, x, weight, bias, at, _ = draw(9, 9)
    results = []
    for end in (at, None):
        results.append(results_like(x))
        forward(x, weight, bias, end, results[-1][0], EPS)
        backward(grad, x, weight, bias, end, None, results[-1][1], None, results[-1][2], EPS)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@WAYS
def test_rounds_weights_to_the_rows_format_if_told(forward, backward) -> None:
    """With the bits of weights that were rounded before; fp32 weights of bf16 rows are used as they are otherwise."""
    grad, x, _, _, at, _ = draw(9, 7, torch.bfloat16)
    weight, bias = draw(9, 7)[2:4]
    found = []
    for given, rounds in (
        ((weight, bias), True),
        ((weight.bfloat16(), bias.bfloat16()), False),
        ((weight, bias), False),
    ):
        out, *others = torch.empty_like(x), *results_like(x)
        forward(x, *given, at, out, EPS, rounds)
        backward(grad, x, *given, at, None, *others, EPS, rounds)
        found.append([out, *others])
    for ours, before, exact in zip(*found, strict=True):
        assert torch.equal(ours, before)
        assert ours is found[0][3] or not torch.equal(ours, exact)


@WAYS
@pytest.mark.parametrize("scale", [8.0, 256.0])
@pytest.mark.parametrize(("rows", "end"), SIZES)
def test_output_in_eight_bits(forward, backward, rows: int, end: int, scale: float, monkeypatch) -> None:
    """Numbers are up to 10: with the larger scale some are too large."""
    monkeypatch.setattr(norm, "PROGRAMS", 2)
    _, x, weight, bias, at, _ = draw(rows, end)
    x[1:2, 3] = torch.nan  # of a token, or of no matter past the end
    exact, out = torch.empty_like(x), unfilled_e4m3(rows, WIDTH, scale)
    plain_norm_forward(x, weight, bias, at, exact, EPS)
    forward(x, weight, bias, at, out, EPS)
    assert_rounds(out, exact)
    assert not out.float()[end:].any()
    assert out.tally.tolist()[1] == (WIDTH if end > 1 else 0)
    assert end < 4 or (out.tally.tolist()[0] > 0) == (scale > 8)
    uncounted = unfilled_e4m3(rows, WIDTH, scale)._replace(tally=None)
    forward(x, weight, bias, at, uncounted, EPS)
    assert torch.equal(*(of.values.view(torch.uint8) for of in (out, uncounted)))


@needs_triton
def test_equal_inputs_give_equal_bits() -> None:
    grad, x, weight, bias, at, _ = draw(10, 9)
    runs = []
    for _ in range(2):
        results = results_like(x)[1:]
        triton_norm_backward(grad, x, weight, bias, at, None, results[0], None, results[1], EPS)
        runs.append(torch.cat([of.flatten() for of in results]))
    assert torch.equal(*runs)


@pytest.mark.gpu
def test_bf16_on_a_gpu() -> None:
    grad, x, weight, bias, at, residual = draw(10_001, 9_990, torch.bfloat16, 512)
    outs, results = [], []
    for forward, backward in (
        (plain_norm_forward, plain_norm_backward),
        (triton_norm_forward, triton_norm_backward),
    ):
        outs.append(torch.empty_like(x))
        forward(x, weight, bias, at, outs[-1], EPS)
        results.append(results_like(x))
        backward(grad, x, weight, bias, at, residual, *results[-1], EPS)
    torch.testing.assert_close(*outs, rtol=1e-2, atol=1e-2)
    exact, out = torch.empty_like(x, dtype=torch.float32), unfilled_e4m3(*x.shape, 256.0)
    plain_norm_forward(x.float(), weight, bias, at, exact, EPS)
    triton_norm_forward(x, weight, bias, at, out, EPS)
    assert_rounds(out, exact)
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=2e-2)


def test_shapes_are_checked() -> None:
    _, x, weight, bias, at, _ = draw(5, 5)
    with pytest.raises(AssertionError, match="a power of two"):
        norm_forward(x[:, :31].contiguous(), weight[:31], bias[:31], at, x[:, :31].contiguous(), EPS)
    with pytest.raises(AssertionError, match="one dtype"):
        norm_forward(x, weight, bias, at, x.double(), EPS)
    with pytest.raises(AssertionError, match=r"out: \[N, W\]"):
        norm_forward(x, weight, bias, at, unfilled_e4m3(4, WIDTH, 1.0), EPS)
