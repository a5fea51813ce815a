"""SiLU attention of last tokens: against autograd and whole attention's last rows, Triton against plain."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.dense.last_query_attention import (
    Jagged,
    LastQueryAttention,
    last_query_attention_backward,
    last_query_attention_forward,
    plain_last_query_attention_backward,
    plain_last_query_attention_forward,
    triton_last_query_attention_backward,
    triton_last_query_attention_forward,
)
from dlrm_bench.kernels.dense.silu_attention import Sequences, plain_silu_attention_forward
from tests.kernels.devices import DEVICE, needs_triton

CASES = {
    "one token": [1],
    "none": [0, 0],
    "an empty one between": [3, 0, 70],
    "around a tile": [15, 16, 17, 33],
    "around a run": [255, 256, 257, 515],
}
HEADS, DEPTH, WIDTH = 2, 16, 32


def draw(case: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Jagged]:
    """q, k and v as slices of one projection, the output's gradient, and the sequences; two tokens belong to none."""
    lengths = CASES[case]
    generator = torch.Generator().manual_seed(len(lengths))
    tokens = sum(lengths) + 2
    projected = torch.randn(tokens, HEADS * (DEPTH + WIDTH), generator=generator).to(dtype).to(DEVICE)
    k, v = projected.split([HEADS * DEPTH, HEADS * WIDTH], dim=1)
    q = torch.randn(len(lengths), HEADS, DEPTH, generator=generator).to(dtype).to(DEVICE)
    grad = torch.randn(len(lengths), HEADS, WIDTH, generator=generator).to(dtype).to(DEVICE)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)
    return q, k.unflatten(1, (HEADS, -1)), v.unflatten(1, (HEADS, -1)), grad, Jagged(offsets, max(lengths) + 3)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, sequences: Jagged) -> Tensor:
    """The definition: sum over a sequence's keys of silu(q k / sqrt(D)) v / max_length."""
    rows = []
    offsets = sequences.offsets.tolist()
    for sequence, (start, end) in enumerate(pairwise(offsets)):
        score = torch.einsum("hd,jhd->jh", q[sequence], k[start:end]) * q.shape[2] ** -0.5
        weight = torch.nn.functional.silu(score) / sequences.max_length
        rows.append(torch.einsum("jh,jhv->hv", weight, v[start:end]))
    return torch.stack(rows)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (last_query_attention_forward, last_query_attention_backward),
        (plain_last_query_attention_forward, plain_last_query_attention_backward),
        pytest.param(triton_last_query_attention_forward, triton_last_query_attention_backward, marks=needs_triton),
    ],
    ids=["chosen", "plain", "triton"],
)
def test_equals_the_definition_and_its_derivative(forward, backward, case: str) -> None:
    *inputs, grad, sequences = draw(case)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = by_sequence(*exact, sequences)
    of_inputs = torch.autograd.grad(expected, exact, grad.double())

    out = torch.full_like(grad, torch.nan)
    forward(*inputs, sequences, out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)

    grads = [torch.full_like(tensor, torch.nan).contiguous() for tensor in inputs]
    backward(grad, *inputs, sequences, *grads)
    torch.testing.assert_close(grads[0].double(), of_inputs[0], rtol=1e-5, atol=1e-6)
    chosen = backward is last_query_attention_backward  # which fills what lies past the last sequence
    for ours, theirs in zip(grads[1:], of_inputs[1:], strict=True):
        assert not ours[-2:].any() if chosen else ours[-2:].isnan().all()
        torch.testing.assert_close(ours[:-2].double(), theirs[:-2], rtol=1e-5, atol=1e-6)


def test_is_the_last_row_of_whole_attention() -> None:
    _, k, v, _, sequences = draw("around a tile")
    queries = torch.randn_like(k).contiguous()
    whole, last = torch.empty_like(v).contiguous(), sequences.offsets[1:] - 1
    targets = torch.ones_like(last)
    plain_silu_attention_forward(queries, k, v, Sequences(sequences.offsets, targets, sequences.max_length), whole)
    out = torch.empty_like(whole[last])
    last_query_attention_forward(queries[last], k, v, sequences, out)
    torch.testing.assert_close(out, whole[last])


def test_autograd_equals_the_definition() -> None:
    *inputs, grad, sequences = draw("an empty one between")
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    theirs = [tensor.clone().requires_grad_() for tensor in inputs]
    got = LastQueryAttention.apply(*ours, *sequences)
    torch.testing.assert_close(got, by_sequence(*theirs, sequences))
    got.backward(grad)
    by_sequence(*theirs, sequences).backward(grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@needs_triton
def test_equal_inputs_give_equal_bits() -> None:
    *inputs, grad, sequences = draw("around a run")
    runs = []
    for _ in range(2):
        grads = [torch.zeros_like(tensor) for tensor in inputs]
        triton_last_query_attention_backward(grad, *inputs, sequences, *grads)
        runs.append(torch.cat([tensor.flatten() for tensor in grads]))
    assert torch.equal(*runs)


@pytest.mark.gpu
def test_bf16_on_a_gpu() -> None:
    *inputs, grad, sequences = draw("around a run", torch.bfloat16)
    outs = torch.zeros_like(grad), torch.zeros_like(grad)
    triton_last_query_attention_forward(*inputs, sequences, outs[0])
    plain_last_query_attention_forward(*inputs, sequences, outs[1])
    torch.testing.assert_close(*outs, rtol=1e-2, atol=1e-4)
    grads = [[torch.zeros_like(tensor) for tensor in inputs] for _ in range(2)]
    triton_last_query_attention_backward(grad, *inputs, sequences, *grads[0])
    plain_last_query_attention_backward(grad, *inputs, sequences, *grads[1])
    for ours, plain in zip(*grads, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-2, atol=1e-4)


def test_shapes_are_checked() -> None:
    q, k, v, grad, sequences = draw("around a tile")
    with pytest.raises(AssertionError, match="one row for each sequence"):
        last_query_attention_forward(q[1:], k, v, sequences, grad)
    with pytest.raises(AssertionError, match="power of two"):
        last_query_attention_forward(q[:, :, :8], k[:, :, :8], v, sequences, grad)
