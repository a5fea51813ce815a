"""The first layer's input with its gradients: against autograd of gathers and sums, given the same mask."""

import pytest
import torch

from dlrm_bench.dlrm.dense.pick_few import pick_few
from dlrm_bench.dlrm.dlrmv4.fused_input import fused_input
from dlrm_bench.kernels.dense._dropout import Dropout
from dlrm_bench.kernels.dense.token_input import token_input_factors
from tests.kernels.dense.test_token_input import DROPOUTS, EVENTS, by_token, draw
from tests.kernels.devices import DEVICE


@pytest.mark.parametrize("kind", DROPOUTS)
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("case", ["no events", "some"])
def test_gradients_are_those_of_autograd(case: str, padding: int, kind: str) -> None:
    given, places, total = draw(case, padding)
    dropout: Dropout | None = DROPOUTS[kind]
    ours, theirs = ([of.clone().requires_grad_() for of in given] for _ in range(2))
    tokens = fused_input(*ours, places, 3.0, dropout)
    factors = token_input_factors(dropout, total + padding, 16, places)[:total]
    expected = by_token(theirs, places, 3.0)[0] * factors
    torch.testing.assert_close(tokens[:total], expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(len(tokens), 16, device=DEVICE)
    grad[total:] = torch.nan  # of what is no token, whatever it is
    tokens.backward(grad)
    expected.backward(grad[:total])
    for mine, other in zip(ours, theirs, strict=True):
        of_other = torch.zeros_like(other) if other.grad is None else other.grad
        torch.testing.assert_close(mine.grad, of_other, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
def test_equal_bits_run_by_run_on_a_gpu() -> None:
    given, places, _ = draw("some", 4, torch.bfloat16)
    runs = []
    for _ in range(2):
        ours = [of.clone().requires_grad_() for of in given]
        tokens = fused_input(*ours, places, 3.0, DROPOUTS["dropout"])
        tokens.backward(torch.linspace(-1, 1, tokens.numel(), device=DEVICE).view_as(tokens).bfloat16())
        runs.append([tokens.detach(), *(of.grad for of in ours)])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def test_picked_rows_have_the_gradient_of_a_gather() -> None:
    rows = torch.randn(EVENTS, 8, device=DEVICE, requires_grad=True)
    index = torch.tensor([4, 0, 4, 4, 2], device=DEVICE)
    grad = torch.randn(len(index), 8, device=DEVICE)
    picked = pick_few(rows, index)
    assert torch.equal(picked, rows[index])
    picked.backward(grad)
    expected = torch.zeros_like(rows).index_add_(0, index, grad)
    torch.testing.assert_close(rows.grad, expected)
