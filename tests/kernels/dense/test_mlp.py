"""Bias and ReLU: plain twins against autograd, Triton against the plain twins."""

from collections.abc import Callable

import pytest
import torch

from dlrm_bench.kernels.dense.column_sums import column_sums
from dlrm_bench.kernels.dense.mlp import (
    bias_relu_backward,
    partial_rows,
    plain_bias_relu_backward,
    triton_bias_relu_backward,
)
from tests.kernels.devices import DEVICE, needs_triton


def test_equals_autograd() -> None:
    z, g = torch.randn(2, 11, 24, device=DEVICE).unbind()
    bias = torch.randn(24, device=DEVICE, requires_grad=True)
    leaf = z.clone().requires_grad_()
    (leaf + bias).relu().backward(g)
    dz, dbias, partials = (
        torch.empty_like(g),
        torch.empty(24, device=DEVICE),
        torch.full((1, 24), torch.nan, device=DEVICE),
    )
    bias_relu_backward(g, (leaf + bias).relu().detach(), dz, partials)
    column_sums(partials, dbias)
    torch.testing.assert_close(dz, leaf.grad)
    torch.testing.assert_close(dbias, bias.grad)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 4), (37, 260), (2051, 13)])
@pytest.mark.parametrize("columns_apart", [0, 3])
def test_triton_equals_plain(shape: tuple[int, int], dtype: torch.dtype, columns_apart: int) -> None:
    """Outputs are in place, and inputs the first columns of a wider matrix."""
    batch, width = shape
    out = torch.randn(shape, device=DEVICE).to(dtype).relu()
    g = torch.randn(batch, width + columns_apart, device=DEVICE).to(dtype)[:, :width]
    expected_dz = torch.empty_like(out)
    got, expected = torch.full((2, partial_rows(batch), width), torch.nan, device=DEVICE)
    plain_bias_relu_backward(g, out, expected_dz, expected)
    dz = torch.full_like(out, torch.nan) if columns_apart else g
    triton_bias_relu_backward(g, out, dz, got)
    assert torch.equal(dz, expected_dz)
    torch.testing.assert_close(got.sum(0), expected.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "backward", [plain_bias_relu_backward, pytest.param(triton_bias_relu_backward, marks=needs_triton)]
)
def test_nan_is_open_and_what_is_closed_gives_zero_as_in_autograd(backward: Callable[..., None]) -> None:
    z, g = torch.randn(2, 20, 24, device=DEVICE).unbind()
    z[3, 5], z[4, 6], g[4, 6], z[7, 7], g[7, 7] = torch.nan, -1, torch.inf, 1, torch.nan
    leaf = z.clone().requires_grad_()
    leaf.relu().backward(g)
    dz, partials = torch.empty_like(g), torch.empty(partial_rows(20), 24, device=DEVICE)
    backward(g, z.relu(), dz, partials)
    torch.testing.assert_close(dz, leaf.grad, equal_nan=True, rtol=0, atol=0)
    assert dz[3, 5] == g[3, 5]
    assert partials.sum(0).isnan().nonzero().tolist() == [[7]]
