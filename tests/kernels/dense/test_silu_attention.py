"""SiLU attention over jagged sequences: against a loop over tokens and autograd, Triton against plain."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.dense.silu_attention import (
    Sequences,
    plain_silu_attention_backward,
    plain_silu_attention_forward,
    silu_attention_backward,
    silu_attention_forward,
    triton_silu_attention_backward,
    triton_silu_attention_forward,
)
from tests.kernels.devices import DEVICE, needs_triton

# Lengths and targets of sequences.
CASES = {
    "one token": ([1], [1]),
    "none": ([0, 0], [0, 0]),
    "an empty one between": ([3, 0, 70], [0, 0, 5]),
    "targets over a tile's edge": ([130, 65, 64], [70, 2, 64]),
    "no targets": ([64, 129], [0, 0]),
}
HEADS, DEPTH, WIDTH = 2, 16, 32


def draw(case: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Sequences]:
    """q, k, v as slices of one projection, the output's gradient, and the sequences; two tokens belong to none."""
    lengths, targets = CASES[case]
    generator = torch.Generator().manual_seed(len(lengths))
    tokens = sum(lengths) + 2
    projected = torch.randn(tokens, HEADS * (2 * DEPTH + WIDTH), generator=generator).to(dtype).to(DEVICE)
    q, k, v = projected.split([HEADS * DEPTH, HEADS * DEPTH, HEADS * WIDTH], dim=1)
    grad = torch.randn(tokens, HEADS, WIDTH, generator=generator).to(dtype).to(DEVICE)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    sequences = Sequences(offsets, torch.tensor(targets, device=DEVICE), max(lengths) + 3)
    return q.unflatten(1, (HEADS, -1)), k.unflatten(1, (HEADS, -1)), v.unflatten(1, (HEADS, -1)), grad, sequences


def by_token(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
    """The definition, token by token: sum over the keys that it sees of silu(q k / sqrt(D)) v / max_length."""
    rows = [v[:0]]
    offsets = sequences.offsets.tolist()
    for start, end, targets in zip(offsets, offsets[1:], sequences.targets.tolist(), strict=False):
        for token in range(start, end):
            seen = [*range(start, min(token, end - targets)), token]
            score = torch.einsum("hd,jhd->jh", q[token], k[seen]) * q.shape[2] ** -0.5
            weight = torch.nn.functional.silu(score) / sequences.max_length
            rows.append(torch.einsum("jh,jhv->hv", weight, v[seen])[None])
    return torch.cat(rows)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (silu_attention_forward, silu_attention_backward),
        (plain_silu_attention_forward, plain_silu_attention_backward),
        pytest.param(triton_silu_attention_forward, triton_silu_attention_backward, marks=needs_triton),
    ],
    ids=["chosen", "plain", "triton"],
)
def test_equals_the_definition_and_its_derivative(forward, backward, case: str) -> None:
    *inputs, grad, sequences = draw(case)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = by_token(*exact, sequences)
    of_inputs = torch.autograd.grad(expected, exact, grad[: len(expected)].double(), allow_unused=True)

    out = torch.full_like(grad, torch.nan)
    forward(*inputs, sequences, out)
    torch.testing.assert_close(out[:-2].double(), expected, rtol=1e-5, atol=1e-6)
    assert out[-2:].isnan().all()

    grads = [torch.full_like(tensor, torch.nan).contiguous() for tensor in inputs]
    backward(grad, *inputs, sequences, *grads)
    for ours, theirs in zip(grads, of_inputs, strict=True):
        assert ours[-2:].isnan().all()
        if theirs is not None:
            torch.testing.assert_close(ours[:-2].double(), theirs[:-2], rtol=1e-5, atol=1e-6)


@needs_triton
def test_equal_inputs_give_equal_bits() -> None:
    *inputs, grad, sequences = draw("targets over a tile's edge")
    runs = []
    for _ in range(2):
        grads = [torch.zeros_like(tensor) for tensor in inputs]
        triton_silu_attention_backward(grad, *inputs, sequences, *grads)
        runs.append(torch.cat([tensor.flatten() for tensor in grads]))
    assert torch.equal(*runs)


@pytest.mark.gpu
def test_bf16_on_a_gpu() -> None:
    *inputs, grad, sequences = draw("targets over a tile's edge", torch.bfloat16)
    outs = torch.zeros_like(grad), torch.zeros_like(grad)
    triton_silu_attention_forward(*inputs, sequences, outs[0])
    plain_silu_attention_forward(*inputs, sequences, outs[1])
    torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-3)
    grads = [[torch.zeros_like(tensor) for tensor in inputs] for _ in range(2)]
    triton_silu_attention_backward(grad, *inputs, sequences, *grads[0])
    plain_silu_attention_backward(grad, *inputs, sequences, *grads[1])
    for ours, plain in zip(*grads, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-3)


def test_shapes_are_checked() -> None:
    q, k, v, grad, sequences = draw("one token")
    with pytest.raises(AssertionError, match="powers of two"):
        silu_attention_forward(q[:, :, :8], k[:, :, :8], v, sequences, grad)
    with pytest.raises(AssertionError, match="next to each other"):
        silu_attention_forward(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, sequences, grad)
