"""Bias and ReLU: plain twins against autograd, Triton against the plain twins."""

import pytest
import torch

from kernels.mlp import (
    bias_relu_backward,
    plain_bias_relu_backward,
    triton_bias_relu_backward,
)
from tests.kernels.devices import DEVICE, needs_triton


def test_equals_autograd() -> None:
    z, g = torch.randn(2, 11, 24, device=DEVICE).unbind()
    bias = torch.randn(24, device=DEVICE, requires_grad=True)
    leaf = z.clone().requires_grad_()
    (leaf + bias).relu().backward(g)
    dz, dbias = torch.empty_like(g), torch.empty(24, device=DEVICE)
    bias_relu_backward(g, (leaf + bias).relu().detach(), dz, dbias)
    torch.testing.assert_close(dz, leaf.grad)
    torch.testing.assert_close(dbias, bias.grad)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 4), (37, 260), (2051, 13)])
def test_triton_equals_plain(shape: tuple[int, int], dtype: torch.dtype) -> None:
    out, g = torch.randn(2, *shape, device=DEVICE).to(dtype).unbind()
    out = out.relu()
    dz, dbias = g.clone(), torch.empty(shape[1], device=DEVICE)
    expected_dz, expected_dbias = torch.empty_like(g), torch.empty_like(dbias)
    triton_bias_relu_backward(dz, out, dz, dbias)  # in place
    plain_bias_relu_backward(g, out, expected_dz, expected_dbias)
    assert torch.equal(dz, expected_dz)
    torch.testing.assert_close(dbias, expected_dbias, rtol=1e-4, atol=1e-4)
