"""The cross layer's element-wise parts: plain twins against autograd, Triton against the plain twins."""

import pytest
import torch

from dlrm_bench.kernels.dense.cross import (
    cross_backward,
    cross_forward,
    cross_output_backward,
    partial_rows,
    plain_cross_backward,
    plain_cross_forward,
    triton_cross_backward,
    triton_cross_forward,
    triton_cross_output_backward,
)
from tests.kernels.devices import DEVICE, needs_triton


@pytest.mark.parametrize("accumulate", [False, True])
def test_equals_autograd(accumulate: bool) -> None:
    x0, x, y, g, before = torch.randn(5, 13, 40, device=DEVICE).unbind()
    bias = torch.randn(40, device=DEVICE)
    for tensor in (x0, y, bias):
        tensor.requires_grad_()
    expected = x0 * (y + bias) + x
    expected.backward(g)
    x0_, y_, bias_ = x0.detach(), y.detach(), bias.detach()
    out, dy, dx0, partials = torch.empty_like(g), torch.empty_like(g), before.clone(), g.new_empty(1, 40)
    cross_forward(x0_, x, y_, bias_, out)
    cross_backward(g, x0_, y_, bias_, dy, dx0, partials, accumulate)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(dy, y.grad)
    torch.testing.assert_close(partials.sum(0), bias.grad)
    torch.testing.assert_close(dx0, x0.grad + before if accumulate else x0.grad)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (37, 264), (2051, 16)])
def test_triton_equals_plain(shape: tuple[int, int], dtype: torch.dtype, accumulate: bool) -> None:
    x0, x, y, g = torch.randn(4, *shape, device=DEVICE).to(dtype).unbind()
    bias = torch.randn(shape[1], device=DEVICE)
    got, expected = torch.empty(2, *shape, device=DEVICE, dtype=dtype)
    triton_cross_forward(x0, x, y, bias, got)
    plain_cross_forward(x0, x, y, bias, expected)
    torch.testing.assert_close(got, expected)
    results = []
    for backward in (triton_cross_backward, plain_cross_backward):
        dy, dx0 = torch.empty_like(g), torch.ones(shape, device=DEVICE)
        partials = torch.full((partial_rows(shape[0]), shape[1]), torch.nan, device=DEVICE)
        backward(g, x0, y, bias, dy, dx0, partials, accumulate)
        results.append((dy, dx0, partials.sum(0)))
    torch.testing.assert_close(results[0][:2], results[1][:2])
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 8), (37, 264), (2051, 16)])
def test_output_backward_is_cross_backwards(shape: tuple[int, int], dtype: torch.dtype) -> None:
    g, x0, y, dx0 = torch.randn(4, *shape, device=DEVICE).to(dtype).unbind()
    bias = torch.randn(shape[1], device=DEVICE)
    results = []
    for backward in (triton_cross_output_backward, cross_output_backward, plain_cross_backward):
        dy = torch.full_like(g, torch.nan)
        partials = torch.full((partial_rows(shape[0]), shape[1]), torch.nan, device=DEVICE)
        if backward is plain_cross_backward:
            plain_cross_backward(g, x0, y, bias, dy, dx0, partials, False)
        else:
            backward(g, x0, dy, partials)
        results.append((dy, partials.sum(0)))
    for got in results[:2]:
        torch.testing.assert_close(got[0], results[2][0])
        torch.testing.assert_close(got[1], results[2][1], rtol=1e-4, atol=1e-4)
