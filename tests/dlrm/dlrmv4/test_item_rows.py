"""Rows of distinct items: against a gather of content and of actions."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.dlrm.dlrmv4.item_rows import item_rows
from tests.kernels.devices import DEVICE

ACTIONS = 3


def draw(items: int, candidates: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns content, actions, and a gradient of the rows."""
    torch.manual_seed(items)
    counts = items + candidates, ACTIONS + 1, ACTIONS * items + candidates
    content, actions, grad = (torch.randn(count, 16, device=DEVICE).to(dtype) for count in counts)
    return content.requires_grad_(), actions.requires_grad_(), grad


@pytest.mark.parametrize(("items", "candidates"), [(5, 3), (1, 1), (0, 2), (4, 0)])
def test_rows_and_gradients_are_those_of_gathers(items: int, candidates: int) -> None:
    content, actions, grad = draw(items, candidates)
    item = torch.arange(items, device=DEVICE).repeat_interleave(ACTIONS)
    own = torch.arange(items, items + candidates, device=DEVICE)
    action = torch.arange(ACTIONS, device=DEVICE).repeat(items)
    kinds = torch.cat([action, torch.full_like(own, ACTIONS)])
    found, expected = item_rows(content, actions, candidates), content[torch.cat([item, own])] + actions[kinds]
    assert torch.equal(found, expected)
    ours, theirs = (torch.autograd.grad(of, (content, actions), grad) for of in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_equal_bits_run_by_run_on_a_gpu() -> None:
    content, actions, grad = draw(30_000, 1024, torch.bfloat16)
    one, other = (torch.autograd.grad(item_rows(content, actions, 1024), (content, actions), grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
