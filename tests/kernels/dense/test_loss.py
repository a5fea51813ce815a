"""The end of the top MLP: plain twin against autograd, Triton against the plain twin."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.kernels.dense.loss import (
    add_up,
    logit_loss_backward,
    partial_columns,
    partial_rows,
    plain_add_up,
    plain_logit_loss_backward,
    triton_add_up,
    triton_logit_loss_backward,
)
from tests.kernels.devices import DEVICE, needs_triton

RANKS = 8


@dataclass(frozen=True, slots=True)
class Outputs:
    loss: Tensor
    dlogits: Tensor
    dbias: Tensor
    dz: Tensor
    dbias_hidden: Tensor | None

    @classmethod
    def of(cls, h: Tensor, relu: bool, dtype: torch.dtype) -> "Outputs":
        """Returns outputs full of NaN, so that an element that is not written shows. dtype: of the bias gradients."""
        batch, width = h.shape
        loss, dbias = torch.empty(1), torch.empty(1, dtype=dtype)
        tensors = loss, h.new_empty(batch), dbias, torch.empty_like(h), torch.empty(width, dtype=dtype)
        filled = [torch.full_like(t, torch.nan, device=DEVICE) for t in tensors]
        return cls(*filled[:-1], filled[-1] if relu else None)

    def all(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def fill(self, values: tuple[Tensor, ...], global_batch: int, backward: Any, add: Any) -> None:
        """Fills the outputs by these two functions."""
        (batch, width), relu = values[0].shape, self.dbias_hidden is not None
        partials = torch.full((partial_rows(batch), partial_columns(width, relu)), torch.nan, device=DEVICE)
        backward(*values, self.dlogits, self.dz, partials, global_batch, relu)
        losses, step = torch.full((3,), torch.nan, device=DEVICE), torch.tensor(5, device=DEVICE)
        add(partials, losses, step, self.dbias, self.dbias_hidden, batch)
        assert losses[:2].isnan().all()
        assert step == 6
        self.loss.copy_(losses[2])

    def fill_by_triton(self, values: tuple[Tensor, ...], global_batch: int) -> None:
        self.fill(values, global_batch, triton_logit_loss_backward, triton_add_up)

    def fill_plainly(self, values: tuple[Tensor, ...], global_batch: int) -> None:
        self.fill(values, global_batch, plain_logit_loss_backward, plain_add_up)


def inputs(batch: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, weight, bias and labels. Logits are multiples of 1/8 below 32, which bf16 holds without rounding: Triton's
    interpreter cuts digits off where a GPU rounds."""
    h = torch.randint(-2, 3, (batch, width), device=DEVICE).relu() / 4
    weight = torch.randint(2, (1, width), device=DEVICE) - 0.5
    bias, labels = torch.full((1,), 0.75, device=DEVICE), torch.randint(2, (batch,), device=DEVICE).float()
    return h.to(dtype), weight.to(dtype), bias.to(dtype), labels


def assert_close(got: Outputs, expected: Outputs) -> None:
    """dlogits may go to another number of bf16, which moves a row of dz and a part of a sum."""
    bf16 = got.dlogits.dtype == torch.bfloat16
    for field in fields(Outputs):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        if b is None:
            continue
        tolerance = 1e-2 if bf16 and field.name != "loss" else 1e-5
        # The error of a sum is proportional to its largest terms, that of sigmoid - label to sigmoid.
        atol = tolerance * b.float().abs().max().item() + 1e-7
        torch.testing.assert_close(a, b, rtol=tolerance, atol=atol, msg=lambda text, f=field: f"{f.name}: {text}")


@pytest.mark.parametrize("relu", [True, False])
def test_equals_autograd(relu: bool) -> None:
    _, weight, bias, labels = inputs(37, 24, torch.float32)
    z, hidden_bias = torch.randn(37, 24, device=DEVICE), torch.zeros(24, device=DEVICE)
    for leaf in (z, weight, bias, hidden_bias):
        leaf.requires_grad_()
    h = (z + hidden_bias).relu() if relu else z + hidden_bias
    h.retain_grad()
    logits = functional.linear(h, weight, bias).view(-1)
    logits.retain_grad()
    expected = functional.binary_cross_entropy_with_logits(logits, labels)
    (expected / RANKS).backward()
    got = Outputs.of(h, relu, torch.float32)
    with torch.no_grad():
        got.fill((h, weight, bias, labels), RANKS * 37, logit_loss_backward, add_up)
    torch.testing.assert_close(got.loss[0], expected.detach())
    torch.testing.assert_close(got.dlogits, logits.grad)
    torch.testing.assert_close(got.dbias, bias.grad)
    torch.testing.assert_close(got.dz, z.grad)
    if relu:
        torch.testing.assert_close(got.dbias_hidden, hidden_bias.grad)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    ("batch", "width"), [(1, 1), (16, 256), (37, 9), (512, 256), (513, 260), (50, 1000), (33, 1024), (17, 1300)]
)
def test_triton_equals_plain(batch: int, width: int, relu: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(batch)
    values = inputs(batch, width, dtype)
    got, again, expected = (Outputs.of(values[0], relu, dtype) for _ in range(3))
    got.fill_by_triton(values, RANKS * batch)
    expected.fill_plainly(values, RANKS * batch)
    assert_close(got, expected)
    again.fill_by_triton(values, RANKS * batch)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got.all(), again.all(), strict=True)), "equal bits"


@needs_triton
def test_rows_of_a_larger_batch() -> None:
    """Elements around the rows stay unchanged; bias gradients in fp32 of a bf16 network."""
    whole, weight, bias, labels = inputs(96, 24, torch.bfloat16)
    rows, got = slice(32, 71), Outputs.of(whole, True, torch.float32)
    expected = Outputs.of(whole[rows], True, torch.float32)
    values = whole[rows], weight, bias, labels[rows]
    of_rows = Outputs(got.loss, got.dlogits[rows], got.dbias, got.dz[rows], got.dbias_hidden)
    of_rows.fill_by_triton(values, 96)
    expected.fill_plainly(values, 96)
    assert_close(of_rows, expected)
    for t in (got.dlogits, got.dz):
        assert torch.cat((t[:32], t[71:])).isnan().all()


@needs_triton
def test_logits_are_those_of_the_evaluation() -> None:
    """Rounded as a GEMM's output; so little that cutting off and rounding agree."""
    h, weight = (torch.tensor([values], device=DEVICE).bfloat16() for values in ([2.0, 2**-9], [1.0, 1.0]))
    bias, labels, got = h.new_zeros(1), torch.zeros(1, device=DEVICE), Outputs.of(h, True, torch.float32)
    got.fill_by_triton((h, weight, bias, labels), 1)
    logits = torch.addmm(bias, h, weight.t()).view(-1)
    assert logits.item() == 2.0
    expected = functional.binary_cross_entropy_with_logits(logits.float(), labels)
    torch.testing.assert_close(got.loss[0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "backward", [plain_logit_loss_backward, pytest.param(triton_logit_loss_backward, marks=needs_triton)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "width", "relu"), [(37, 24, True), (16, 300, False)])
def test_predictions_are_the_sigmoids_of_the_logits(
    batch: int, width: int, relu: bool, dtype: torch.dtype, backward: Any
) -> None:
    """And nothing else differs in any bit from what is computed without them."""
    values = inputs(batch, width, dtype)
    alone, beside = (Outputs.of(values[0], relu, dtype) for _ in range(2))
    alone.fill(values, batch, backward, plain_add_up)
    memory = torch.full((batch + 20,), torch.nan, device=DEVICE)
    beside.fill(values, batch, partial(backward, predictions=memory[:batch]), plain_add_up)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(alone.all(), beside.all(), strict=True))
    h, weight, bias, _ = (value.float() for value in values)
    expected = torch.sigmoid(torch.mv(h, weight[0]) + bias)
    assert len(expected.unique()) > 5
    torch.testing.assert_close(memory[:batch], expected, rtol=1e-6, atol=1e-9)
    assert memory[batch:].isnan().all()


@needs_triton
@pytest.mark.parametrize("logit", [18.0, -18.0, 100.0, -100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extreme_logits(logit: float, dtype: torch.dtype) -> None:
    """Confident and right keeps a loss where fp32 can tell it from zero; confident and wrong has no infinity."""
    h, weight = torch.ones(2, 4, device=DEVICE, dtype=dtype), torch.full((1, 4), logit / 4, device=DEVICE, dtype=dtype)
    bias = torch.zeros(1, device=DEVICE, dtype=dtype)
    right = torch.full((2,), float(logit > 0), device=DEVICE)
    for labels in (right, 1 - right):
        got, expected = (Outputs.of(h, True, dtype) for _ in range(2))
        got.fill_by_triton((h, weight, bias, labels), 2)
        expected.fill_plainly((h, weight, bias, labels), 2)
        assert_close(got, expected)
        if logit == 18:  # below zero torch's own loss has no digits left
            assert expected.loss > 0
            torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "backward", [plain_logit_loss_backward, pytest.param(triton_logit_loss_backward, marks=needs_triton)]
)
def test_nan_of_one_sample_is_in_its_loss_and_gradients(backward: Any) -> None:
    h, weight, bias = (
        torch.rand(20, 24, device=DEVICE),
        torch.randn(1, 24, device=DEVICE),
        torch.randn(1, device=DEVICE),
    )
    h[17, 3] = torch.nan
    labels, dlogits, dz = torch.ones(20, device=DEVICE), h.new_empty(20), torch.empty_like(h)
    partials = torch.empty(partial_rows(20), partial_columns(24, relu=True), device=DEVICE)
    backward(h, weight, bias, labels, dlogits, dz, partials, 20, relu=True)
    assert partials.sum(0).isnan().all()
    assert dlogits.isnan().nonzero().tolist() == [[17]]
    assert dz[17].isnan().all()
    assert dz[:17].isfinite().all()
