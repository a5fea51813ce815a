"""Gate, attention and their product, dropped out: against autograd given the same mask, Triton against plain."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.kernels.dense import norm
from dlrm_bench.kernels.dense._dropout import Dropout
from dlrm_bench.kernels.dense.gated_norm import (
    gated_norm_backward,
    gated_norm_factors,
    gated_norm_forward,
    plain_gated_norm_backward,
    plain_gated_norm_forward,
    triton_gated_norm_backward,
    triton_gated_norm_forward,
)
from tests.kernels.devices import DEVICE, assert_rounds, needs_triton, unfilled_e4m3

WIDTH, EPS = 32, 1e-6
SEED = torch.tensor([1234567890123456789], device=DEVICE)
DROPOUTS = {"still": None, "dropout": Dropout(0.3, SEED, 2)}
WAYS = pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (gated_norm_forward, gated_norm_backward),
        (plain_gated_norm_forward, plain_gated_norm_backward),
        pytest.param(triton_gated_norm_forward, triton_gated_norm_backward, marks=needs_triton),
    ],
    ids=["chosen", "plain", "triton"],
)


def draw(rows: int, end: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> tuple[Tensor, ...]:
    """Gradient, u as a slice of a projection, a, weight, bias and end; what lies past the end is no number."""
    generator = torch.Generator().manual_seed(rows)
    grad, projected, a = (torch.randn(rows, of * width, generator=generator).to(dtype).to(DEVICE) for of in (3, 2, 1))
    for of in (grad, projected, a):
        of[end:] = torch.nan
    weight, bias = (torch.randn(width, generator=generator).to(dtype).to(DEVICE) for _ in range(2))
    return grad, projected[:, :width], a, weight, bias, torch.tensor([end], device=DEVICE)


@WAYS
@pytest.mark.parametrize("kind", DROPOUTS)
@pytest.mark.parametrize(("rows", "end"), [(0, 0), (1, 1), (5, 4), (9, 9), (7, 0)])
def test_equals_the_definition_and_its_derivative(forward, backward, kind: str, rows, end, monkeypatch) -> None:
    monkeypatch.setattr(norm, "PROGRAMS", 2)
    dropout = DROPOUTS[kind]
    grad, u, a, weight, bias, at = draw(rows, end)
    exact = [of.double().requires_grad_() for of in (u[:end], a[:end], weight, bias)]
    s = functional.silu(exact[0])
    gated = s * functional.layer_norm(exact[1], (WIDTH,), exact[2], exact[3], EPS)
    factors = gated_norm_factors(dropout, u)[:end]
    expected = torch.cat([s, exact[1], gated], dim=1) * factors
    of_inputs = torch.autograd.grad(expected, exact, grad[:end].double())

    out = torch.full_like(grad, torch.nan)
    forward(u, a, weight, bias, at, dropout, out, EPS)
    torch.testing.assert_close(out[:end].double(), expected, rtol=1e-5, atol=1e-5)
    assert not out[end:].any()

    of_projected = torch.full((rows, 4 * WIDTH), torch.nan, device=DEVICE)
    dnorm = torch.full((2, WIDTH), torch.nan, device=DEVICE)
    results = [of_projected[:, WIDTH : 2 * WIDTH], torch.full_like(a, torch.nan), dnorm]
    backward(grad, u, a, weight, bias, at, dropout, *results, EPS)
    for got, value in zip(results[:2], of_inputs[:2], strict=True):
        torch.testing.assert_close(got[:end].double(), value, rtol=1e-5, atol=2e-5)
        assert not got[end:].any()
    torch.testing.assert_close(dnorm.double(), torch.stack(of_inputs[2:]), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(grad, out, rtol=1e-5, atol=1e-5)
    assert of_projected[:, :WIDTH].isnan().all()
    assert of_projected[:, 2 * WIDTH :].isnan().all()


@WAYS
@pytest.mark.parametrize("kind", DROPOUTS)
def test_rounds_weights_and_may_count_all_rows(forward, backward, kind: str) -> None:
    """fp32 weights of bf16 rows give the bits of weights that were rounded before; without an end, those of an end at
    the last row."""
    grad, u, a, _, _, end = draw(9, 9, torch.bfloat16)
    weight, bias = draw(9, 9)[3:5]
    found = []
    for *given, at in ((weight, bias, end), (weight.bfloat16(), bias.bfloat16(), end), (weight, bias, None)):
        out, of_u, of_a, again = torch.empty_like(grad), torch.empty_like(u), torch.empty_like(a), grad.clone()
        dnorm = torch.empty(2, WIDTH, device=DEVICE)
        forward(u, a, *given, at, DROPOUTS[kind], out, EPS)
        backward(again, u, a, *given, at, DROPOUTS[kind], of_u, of_a, dnorm, EPS)
        found.append([out, of_u, of_a, again, dnorm])
    for results in zip(*found, strict=True):
        assert all(torch.equal(results[0], of) for of in results[1:])


@WAYS
@pytest.mark.parametrize("kind", DROPOUTS)
@pytest.mark.parametrize("scale", [8.0, 256.0])
@pytest.mark.parametrize(("rows", "end"), [(0, 0), (1, 1), (5, 4), (9, 9), (7, 0)])
def test_output_in_eight_bits(forward, backward, kind: str, scale: float, rows, end, monkeypatch) -> None:
    """Numbers are up to 20: with the larger scale some are too large."""
    monkeypatch.setattr(norm, "PROGRAMS", 2)
    _, u, a, weight, bias, at = draw(rows, end)
    if kind == "still":  # else kernels make 0 of a number that is dropped, and plain ones NaN
        u[1:2, 3], a[3:4, 2] = torch.inf, torch.nan  # of tokens, or of no matter past the end
    exact, out = torch.empty(rows, 3 * WIDTH, device=DEVICE), unfilled_e4m3(rows, 3 * WIDTH, scale)
    plain_gated_norm_forward(u, a, weight, bias, at, DROPOUTS[kind], exact, EPS)
    forward(u, a, weight, bias, at, DROPOUTS[kind], out, EPS)
    assert_rounds(out, exact)
    assert not out.float()[end:].any()
    large, lost = out.tally.tolist()
    assert (lost > 0) == (end > 1 and kind == "still")
    assert end < 4 or (large > 0) == (scale > 8)


def test_factors_keep_the_share_and_the_mean() -> None:
    factors = gated_norm_factors(Dropout(0.3, SEED, 2), torch.empty(2000, WIDTH, device=DEVICE))
    assert float((factors == 0).float().mean()) == pytest.approx(0.3, abs=0.005)
    assert float(factors.mean()) == pytest.approx(1, abs=0.007)
    torch.testing.assert_close(
        (factors == 0).float().mean(0), torch.full((3 * WIDTH,), 0.3, device=DEVICE), rtol=0, atol=0.05
    )
    halves = factors[0::2] == 0, factors[1::2] == 0
    assert float((halves[0] & halves[1]).float().mean()) == pytest.approx(0.09, abs=0.005)


@needs_triton
def test_equal_inputs_give_equal_bits() -> None:
    grad, *inputs = draw(10, 9)
    runs = []
    for _ in range(2):
        again = grad.clone()
        results = [torch.empty_like(inputs[0]), torch.empty_like(inputs[1]), torch.empty(2, WIDTH, device=DEVICE)]
        triton_gated_norm_backward(again, *inputs, DROPOUTS["dropout"], *results, EPS)
        runs.append(torch.cat([of.flatten() for of in (*results, again[:9])]))
    assert torch.equal(*runs)


@pytest.mark.gpu
def test_bf16_on_a_gpu() -> None:
    dropout, rows = DROPOUTS["dropout"], 10_001
    grad, *inputs = draw(rows, rows - 9, torch.bfloat16, 512)
    outs, results = [], []
    for forward, backward in (
        (plain_gated_norm_forward, plain_gated_norm_backward),
        (triton_gated_norm_forward, triton_gated_norm_backward),
    ):
        outs.append(torch.empty_like(grad))
        forward(*inputs, dropout, outs[-1], EPS)
        results.append([*torch.empty(2, rows, 512, device=DEVICE).bfloat16(), torch.empty(2, 512, device=DEVICE)])
        outs.append(grad.clone())
        backward(outs[-1], *inputs, dropout, *results[-1], EPS)
    for of in outs[1:]:
        torch.testing.assert_close(of, outs[0], rtol=1e-2, atol=2e-2)
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=5e-2)
    u, a, *others = inputs
    exact, out = torch.empty_like(grad, dtype=torch.float32), unfilled_e4m3(*grad.shape, 256.0)
    plain_gated_norm_forward(u.float(), a.float(), *others, dropout, exact, EPS)
    triton_gated_norm_forward(*inputs, dropout, out, EPS)
    assert_rounds(out, exact)


def test_shapes_are_checked() -> None:
    grad, u, a, weight, bias, at = draw(5, 5)
    with pytest.raises(AssertionError, match=r"joined: \[N, 3 \* W\]"):
        gated_norm_forward(u, a, weight, bias, at, None, grad[:, :WIDTH], EPS)
    with pytest.raises(AssertionError, match="one dtype"):
        gated_norm_forward(u, a.double(), weight, bias, at, None, grad, EPS)
