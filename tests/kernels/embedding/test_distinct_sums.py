"""Sums of runs: the Triton kernels against their plain twin and against double precision."""

import pytest
import torch

from dlrm_bench.kernels.embedding.distinct_sums import distinct_sums, plain_distinct_sums, triton_distinct_sums
from tests.kernels.devices import DEVICE, needs_triton


def runs(lengths: list[int], unused: int) -> torch.Tensor:
    """Slots, distinct but in no order, after those of unused places; of several runs the first has no slot."""
    slot = torch.randperm(len(lengths) + 3)[: len(lengths)].int()
    if len(lengths) > 1:
        slot[0] = -1
    return torch.cat([torch.full((unused,), -1).int(), slot.repeat_interleave(torch.tensor(lengths))]).to(DEVICE)


LENGTHS = {
    "short": [1, 2, 1, 3, 1] * 5,
    "over chunks": [3, 70, 5, 64, 1],
    "one": [100],
    "one place": [1],
}


@needs_triton
@pytest.mark.parametrize("unused", [0, 37])
@pytest.mark.parametrize(
    "lengths",
    [*LENGTHS.values(), pytest.param([5, 1, 2300, 4], marks=pytest.mark.gpu)],
    ids=[*LENGTHS, "over more chunks than are merged at once"],
)
@pytest.mark.parametrize(
    ("columns", "gradient", "out"),
    [
        (4, torch.float32, torch.float32),  # Triton's interpreter adds up by single elements
        (2, torch.bfloat16, torch.float16),
        pytest.param(512, torch.float32, torch.float32, marks=pytest.mark.gpu),
        pytest.param(512, torch.bfloat16, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_triton_equals_plain(
    columns: int, gradient: torch.dtype, out: torch.dtype, lengths: list[int], unused: int
) -> None:
    torch.manual_seed(len(lengths) + unused)
    slots = runs(lengths, unused)
    places = torch.randperm(len(slots)).int().to(DEVICE)
    gradients = torch.randn(len(slots), columns, device=DEVICE).to(gradient)
    got, expected = (torch.full((len(lengths) + 3, columns), 7.0, device=DEVICE).to(out) for _ in range(2))
    plain_distinct_sums(gradients, slots, places, expected)
    triton_distinct_sums(gradients, slots, places, got, chunk=32)
    close = {"rtol": 2e-5, "atol": 1e-4} if out == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(got, expected, **close)
    assert int((got == 7).all(1).sum()) == len(got) - len(slots[slots >= 0].unique())


@pytest.mark.gpu
def test_a_run_of_a_hundred_thousand() -> None:
    slots = torch.tensor([-1, 0, 1, 2]).repeat_interleave(torch.tensor([999, 50_000, 100_000, 7])).int().to(DEVICE)
    places = torch.randperm(len(slots), device=DEVICE).int()
    gradients = torch.randn(len(slots), 512, device=DEVICE)
    sums = torch.empty(3, 512, device=DEVICE)
    distinct_sums(gradients, slots, places, sums)
    expected = torch.stack([gradients[places[slots == slot].long()].double().sum(0) for slot in range(3)])
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-3)
    again = torch.empty_like(sums)
    distinct_sums(gradients, slots, places, again)
    assert torch.equal(sums, again)
