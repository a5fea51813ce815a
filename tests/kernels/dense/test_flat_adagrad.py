"""Adagrad over a flat buffer: plain twin against torch.optim.Adagrad, Triton against the plain twin."""

import pytest
import torch

from dlrm_bench.kernels.dense.flat_adagrad import flat_adagrad, plain_flat_adagrad, triton_flat_adagrad
from tests.kernels.devices import DEVICE, needs_triton


def test_equals_torch_adagrad() -> None:
    master, state = torch.randn(37, device=DEVICE), torch.zeros(37, device=DEVICE)
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.Adagrad([parameter], lr=0.1, eps=1e-8)
    rate = torch.tensor(0.1, device=DEVICE)
    for _ in range(3):
        parameter.grad = torch.randn(37, device=DEVICE)
        optimizer.step()
        flat_adagrad(master, state, parameter.grad, rate, 1e-8)
    torch.testing.assert_close(master, parameter.detach())


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 2048, 5003])
def test_triton_equals_plain(count: int, dtype: torch.dtype) -> None:
    master, expected = torch.randn(1, count, device=DEVICE).repeat(2, 1)
    state, expected_state = torch.rand(1, count, device=DEVICE).repeat(2, 1)
    working, expected_working = torch.empty(2, count, device=DEVICE, dtype=torch.bfloat16)
    grad, rate = torch.randn(count, device=DEVICE).to(dtype), torch.tensor([0.05], device=DEVICE)
    triton_flat_adagrad(master, state, grad, rate, 1e-8, working)
    plain_flat_adagrad(expected, expected_state, grad, rate, 1e-8, expected_working)
    torch.testing.assert_close(state, expected_state)
    torch.testing.assert_close(master, expected)
    torch.testing.assert_close(working, expected_working)
    before = working.clone()
    triton_flat_adagrad(master, state, grad, rate, 1e-8)
    assert torch.equal(working, before)
