"""The loss: plain twin against autograd, Triton against the plain twin."""

import pytest
import torch
from torch.nn import functional

from kernels.loss import bce_with_logits, plain_bce_with_logits, triton_bce_with_logits
from tests.kernels.devices import DEVICE, needs_triton


def test_equals_autograd() -> None:
    logits = torch.randn(37, device=DEVICE, requires_grad=True)
    labels = torch.randint(2, (37,), device=DEVICE).float()
    expected = functional.binary_cross_entropy_with_logits(logits, labels)
    expected.backward()
    loss, dlogits = torch.empty(1, device=DEVICE), torch.empty(37, device=DEVICE)
    bce_with_logits(logits.detach(), labels, loss, dlogits, global_batch=4 * 37, scale=4.0)
    torch.testing.assert_close(loss[0], expected.detach())
    torch.testing.assert_close(dlogits, logits.grad)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [1, 513, 8192, 8195])
def test_triton_equals_plain(batch: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(batch, device=DEVICE) * 20).to(dtype)
    labels = torch.randint(2, (batch,), device=DEVICE).float()
    loss, expected_loss = torch.empty(2, 1, device=DEVICE)
    dlogits, expected = torch.empty(2, batch, device=DEVICE, dtype=dtype)
    triton_bce_with_logits(logits, labels, loss, dlogits, batch * 8)
    plain_bce_with_logits(logits, labels, expected_loss, expected, batch * 8)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(dlogits, expected, atol=1e-8, rtol=1e-5 if dtype == torch.float32 else 0.01)


@needs_triton
def test_confident_logits_keep_a_loss() -> None:
    logits, labels = torch.full((4,), 18.0, device=DEVICE), torch.ones(4, device=DEVICE)
    loss, expected = torch.empty(2, 1, device=DEVICE)
    triton_bce_with_logits(logits, labels, loss, torch.empty_like(logits), 4)
    plain_bce_with_logits(logits, labels, expected, torch.empty_like(logits), 4)
    assert expected > 0
    torch.testing.assert_close(loss, expected)
