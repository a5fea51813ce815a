"""x * sigmoid(norm(x)): against autograd, Triton against plain."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.kernels.dense import norm
from dlrm_bench.kernels.dense.swish_norm import (
    plain_swish_norm_backward,
    plain_swish_norm_forward,
    swish_norm_backward,
    swish_norm_forward,
    triton_swish_norm_backward,
    triton_swish_norm_forward,
)
from tests.kernels.devices import DEVICE, needs_triton

WIDTH, EPS = 32, 1e-5


def draw(rows: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> tuple[Tensor, ...]:
    """Gradient, x, weight and bias."""
    generator = torch.Generator().manual_seed(rows)
    grad, x = (torch.randn(rows, width, generator=generator).to(dtype).to(DEVICE) for _ in range(2))
    weight, bias = (torch.randn(width, generator=generator).to(DEVICE) for _ in range(2))
    return grad, x + 1, weight, bias


@pytest.mark.parametrize("rows", [0, 1, 9, 40])
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (swish_norm_forward, swish_norm_backward),
        (plain_swish_norm_forward, plain_swish_norm_backward),
        pytest.param(triton_swish_norm_forward, triton_swish_norm_backward, marks=needs_triton),
    ],
    ids=["chosen", "plain", "triton"],
)
def test_equals_the_definition_and_its_derivative(forward, backward, rows: int, monkeypatch) -> None:
    monkeypatch.setattr(norm, "PROGRAMS", 2)
    grad, *inputs = draw(rows)
    exact = [of.double().requires_grad_() for of in inputs]
    expected = exact[0] * functional.layer_norm(exact[0], (WIDTH,), *exact[1:], EPS).sigmoid()
    of_inputs = torch.autograd.grad(expected, exact, grad.double())
    out = torch.full_like(grad, torch.nan)
    forward(*inputs, out, EPS)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    dx, dnorm = torch.full_like(grad, torch.nan), torch.full((2, WIDTH), torch.nan, device=DEVICE)
    backward(grad, *inputs, dx, dnorm, EPS)
    torch.testing.assert_close(dx.double(), of_inputs[0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(dnorm.double(), torch.stack(of_inputs[1:]), rtol=1e-5, atol=2e-5)


@needs_triton
def test_equal_inputs_give_equal_bits() -> None:
    grad, *inputs = draw(9)
    runs = [[torch.empty_like(grad), torch.empty(2, WIDTH, device=DEVICE)] for _ in range(2)]
    for results in runs:
        triton_swish_norm_backward(grad, *inputs, *results, EPS)
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_bf16_on_a_gpu() -> None:
    grad, *inputs = draw(5001, torch.bfloat16, 256)
    results = []
    for forward, backward in (
        (plain_swish_norm_forward, plain_swish_norm_backward),
        (triton_swish_norm_forward, triton_swish_norm_backward),
    ):
        results.append([torch.empty_like(grad), torch.empty_like(grad), torch.empty(2, 256, device=DEVICE)])
        forward(*inputs, results[-1][0], EPS)
        backward(grad, *inputs, *results[-1][1:], EPS)
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=5e-2)


def test_shapes_are_checked() -> None:
    _, x, weight, bias = draw(5)
    with pytest.raises(AssertionError, match="one dtype"):
        swish_norm_forward(x, weight, bias, x.double(), EPS)
