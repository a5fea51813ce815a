"""Sorted row-wise Adagrad against TorchRec's optimizer through autograd, and the Triton kernels against their twin."""

import pytest
import torch
from torch.nn import functional
from torchrec.optim import RowWiseAdagrad as TorchRecRowWiseAdagrad

from dlrm_bench.kernels.embedding.row_wise_adagrad import (
    RowWiseAdagrad,
    plain_row_wise_adagrad,
    row_wise_adagrad,
    triton_row_wise_adagrad,
)
from dlrm_bench.kernels.non_finite import Watch
from tests.kernels.devices import DEVICE, needs_triton

EPS = 1e-8


def in_order(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ordered, places = rows.sort(stable=True)
    return ordered, places.int()


def test_plain_twin_equals_torchrecs_optimizer() -> None:
    torch.manual_seed(1)
    weights, state = torch.randn(20, 16), torch.zeros(20, 1)
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = TorchRecRowWiseAdagrad([parameter], lr=0.1, eps=EPS)
    for _ in range(4):
        ids, gradients = torch.randint(20, (50,)), torch.randn(50, 16)
        optimizer.zero_grad()
        functional.embedding(ids, parameter).backward(gradients / 4)
        optimizer.step()
        row_wise_adagrad(weights, state, gradients, *in_order(ids.int()), torch.tensor([0.1]), EPS, scale=0.25)
        torch.testing.assert_close(weights, parameter.detach(), rtol=1e-6, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [4, pytest.param(512, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("rows", "places"),
    [
        (500, 71),  # runs of one or two
        (3, 100),  # over several chunks
        (1, 70),  # one run over everything
        pytest.param(1, 2300, marks=pytest.mark.gpu),  # and over more chunks than are merged at once
        (20, 33),
        (2, 1),
    ],
)
def test_triton_equals_plain(rows: int, places: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + places)
    named = torch.randint(rows, (places,), dtype=torch.int32, device=DEVICE)
    named[2::17] = -1  # padding
    ordered = in_order(named)
    weights, state = torch.randn(rows, columns, device=DEVICE), torch.rand(rows, 1, device=DEVICE)
    gradients = torch.randn(places, columns, device=DEVICE).to(dtype)
    rate = torch.tensor([0.05], device=DEVICE)
    expected, expected_state = weights.double(), state.double()  # long runs show what fp32 sums round off
    first, first_state = weights.clone(), state.clone()
    plain_row_wise_adagrad(expected, expected_state, gradients, *ordered, rate, EPS, 0.5)
    RowWiseAdagrad(weights, state, gradients, *ordered, rate, EPS, 0.5).triton(chunk=32)
    torch.testing.assert_close(state.double(), expected_state, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-5, atol=2e-5)
    if DEVICE.type == "cuda":
        RowWiseAdagrad(first, first_state, gradients, *ordered, rate, EPS, 0.5).triton(chunk=32)
        assert torch.equal(weights, first)
        assert torch.equal(state, first_state)


@needs_triton
@pytest.mark.parametrize("update", [plain_row_wise_adagrad, triton_row_wise_adagrad])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30], ids=str)
def test_a_row_that_would_not_be_finite_keeps_its_numbers_and_a_flag_stops_all(update, bad) -> None:
    rows = torch.tensor([0, 1, 1, 3] + [5] * 60, dtype=torch.int32, device=DEVICE)
    weights, state = torch.randn(6, 4, device=DEVICE), torch.rand(6, 1, device=DEVICE)
    gradients = torch.ones(len(rows), 4, device=DEVICE)
    gradients[2, 3] = gradients[40, 1] = bad
    places = torch.arange(len(rows), dtype=torch.int32, device=DEVICE)
    watch = Watch(torch.zeros(2, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE))
    before, before_state = weights.clone(), state.clone()
    arguments = (weights, state, gradients, rows, places, torch.ones(1, device=DEVICE), EPS, 1.0, watch)
    update(*arguments)
    assert watch.bad.item() == 1
    changed = (weights != before).all(1)
    assert changed.tolist() == [True, False, False, True, False, False]
    assert torch.equal((state != before_state).view(-1), changed)
    watch.bad.zero_()
    watch.stopped[1] = 1
    before, before_state = weights.clone(), state.clone()
    update(*arguments)
    assert torch.equal(weights, before)
    assert torch.equal(state, before_state)
    assert watch.bad.item() == 0


def test_columns_that_no_block_covers_are_refused() -> None:
    weights, ids = torch.zeros(4, 12), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(AssertionError, match="power of two"):
        row_wise_adagrad(weights, torch.zeros(4, 1), torch.zeros(2, 12), ids, ids, torch.ones(1), EPS)
