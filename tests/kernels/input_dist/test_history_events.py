"""The events of fixed-size histories: against a loop over samples and events, Triton against the plain search."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.input_dist.history_events import (
    POOLS,
    history_events,
    plain_history_events,
    triton_history_events,
)
from tests.kernels.devices import DEVICE, needs_triton

CASES = {"odd": (7, 0, 40, 1, 19, 0), "none": (0, 0), "one": (1,), "ends empty": (5, 0, 0), "long": (300, 300)}


def made(spans: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """Returns first, end and pools of samples whose segments have `spans` events, and, looked for one by one, the
    event and the sample of each place."""
    random = torch.Generator().manual_seed(seed)
    size = max(1, sum(spans))
    pools = torch.randint(0, POOLS, (size,), generator=random, dtype=torch.int32)
    first, end, start = torch.zeros(POOLS, len(spans), dtype=torch.int32), [], 0
    events, samples = [], []
    for sample, span in enumerate(spans):
        end.append(start + span)
        for pool in range(POOLS):
            first[pool, sample] = start + int(torch.randint(0, span + 1, (), generator=random))
        kept = [e for e in range(start, start + span) if e >= first[pools[e], sample]]
        events += kept
        samples += [sample] * len(kept)
        start += span
    return first, torch.tensor(end, dtype=torch.int32), pools, events, samples


@pytest.mark.parametrize("padding", [0, 1, 700])
@pytest.mark.parametrize("name", CASES)
def test_finds_what_a_loop_finds(name: str, padding: int) -> None:
    first, end, pools, events, samples = made(CASES[name], padding)
    counts = torch.tensor(samples, dtype=torch.int64).bincount(minlength=len(end))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    found = torch.full((len(events) + padding,), -7, dtype=torch.int32, device=DEVICE)
    history_events(*(t.to(DEVICE) for t in (first, end, offsets, pools)), found)
    assert found[: len(events)].tolist() == events
    assert found[len(events) :].tolist() == [(len(events) + i) % len(pools) for i in range(padding)]


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_triton_equals_plain(name: str) -> None:
    first, end, pools, events, samples = made(CASES[name], 5)
    offsets = torch.tensor([0, *torch.tensor(samples, dtype=torch.int64).bincount(minlength=len(end)).cumsum(0)])
    count = torch.zeros(POOLS, len(pools) + 1, dtype=torch.int32)
    count[:, 1:] = (pools == torch.arange(POOLS)[:, None]).cumsum(1)
    inputs = [t.to(DEVICE) for t in (first, end, offsets, count)]
    found = []
    for find in (triton_history_events, plain_history_events):
        found.append(torch.full((len(events) + 9,), -7, dtype=torch.int32, device=DEVICE))
        find(*inputs, found[-1])
    assert torch.equal(*found)
