"""An MLP of three layers in one launch: the plain one against torch.nn, Triton against the plain one."""

import pytest
import torch
from torch import Tensor, nn

from dlrm_bench.kernels.dense.small_mlp import applies, plain_small_mlp, triton_small_mlp
from tests.kernels.devices import DEVICE, needs_triton

BF16 = torch.bfloat16


def make_case(batch: int, features: int, widths: tuple[int, ...]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    sizes = zip((16, *widths), widths, strict=False)
    weights = [(torch.randn(rows, columns, device=DEVICE) / columns**0.5).to(BF16) for columns, rows in sizes]
    weights[0][:, features:] = 0
    biases = [torch.randn(width, device=DEVICE).to(BF16) for width in widths]
    return torch.randn(batch, features, device=DEVICE), weights, biases


def outputs(batch: int, widths: tuple[int, ...]) -> tuple[Tensor, list[Tensor], Tensor]:
    inputs = torch.full((batch, 16), torch.nan, device=DEVICE, dtype=BF16)
    hidden = [torch.full((batch, width), torch.nan, device=DEVICE, dtype=BF16) for width in widths]
    return inputs, hidden, torch.zeros(batch, widths[-1] + 24, device=DEVICE, dtype=BF16)[:, : widths[-1]]


def test_plain_equals_torch() -> None:
    features, weights, biases = make_case(7, 13, (128, 64, 64))
    inputs, hidden, out = outputs(7, (128, 64, 64))
    plain_small_mlp(features, weights, biases, inputs, hidden, out)
    x: Tensor = features.to(BF16).float()
    for weight, bias in zip(weights, biases, strict=True):
        x = nn.functional.linear(x, weight[:, : x.shape[1]].float(), bias.float()).relu().to(BF16).float()
    torch.testing.assert_close(out.float(), x, rtol=2e-2, atol=2e-2)
    assert not inputs[:, 13:].any()
    assert torch.equal(out, hidden[-1])


@pytest.mark.gpu  # Triton's interpreter multiplies the bits of bf16 numbers
@pytest.mark.parametrize(
    ("batch", "widths"), [(21, (64, 64, 64)), (512, (512, 256, 128)), (6911, (512, 256, 128)), (2500, (128, 512, 64))]
)
def test_triton_equals_plain(batch: int, widths: tuple[int, ...]) -> None:
    features, weights, biases = make_case(batch, 13, widths)
    got, expected = outputs(batch, widths), outputs(batch, widths)
    triton_small_mlp(features, weights, biases, *got)
    plain_small_mlp(features, weights, biases, *expected)
    for mine, wanted in zip((got[0], *got[1], got[2]), (expected[0], *expected[1], expected[2]), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=2e-2, atol=2e-2)
        # Nearly all are rounded alike, whatever order products are added up in.
        assert (mine != wanted).float().mean() < 0.05


@needs_triton
@pytest.mark.parametrize("widths", [(64, 64, 64), pytest.param((512, 256, 128), marks=pytest.mark.gpu)])
def test_nan_stays_nan(widths: tuple[int, ...]) -> None:
    """Kernels that are interpreted compute in fp32: see above."""
    dtype = BF16 if DEVICE.type == "cuda" else torch.float32
    features, weights, biases = make_case(21, 13, widths)
    features[4, 2] = torch.nan
    weights, biases = ([tensor.to(dtype) for tensor in tensors] for tensors in (weights, biases))
    for mlp in (plain_small_mlp, triton_small_mlp):
        inputs, hidden, out = (
            [t.to(dtype) for t in part] if isinstance(part, list) else part.to(dtype) for part in outputs(21, widths)
        )
        mlp(features, weights, biases, inputs, hidden, out)
        for tensor in (*hidden, out):
            assert tensor[4].isnan().all(), mlp.__name__
            assert tensor[:4].isfinite().all(), mlp.__name__
            assert tensor[5:].isfinite().all(), mlp.__name__


def test_takes_what_it_can_only() -> None:
    assert applies((512, 256, 128), 16, BF16)
    assert not applies((512, 256), 16, BF16)
    assert not applies((512, 256, 128), 16, torch.float32)
    assert not applies((512, 250, 128), 16, BF16)
    assert not applies((1024, 256, 128), 16, BF16)
    assert applies((512, 512, 128), 16, BF16)
    assert not applies((512, 256, 512), 16, BF16), "more shared memory than a Hopper has"
    assert not applies((512, 256, 128), 32, BF16)
