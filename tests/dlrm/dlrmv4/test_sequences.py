"""Where tokens stand, and their positions and times, on a case that is small enough to read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlrm_bench.dlrm.dlrmv4.config import OWN_TOKENS
from dlrm_bench.dlrm.dlrmv4.reference import open_checkout
from dlrm_bench.dlrm.dlrmv4.sequences import (
    join,
    offsets_of,
    pick,
    position_buckets,
    sequences_of,
    time_buckets,
    token_times,
)
from tests.data.dlrmv4.make_model_reference import kernel_buckets
from tests.dlrm.dlrmv4.cases import CHECKOUT, SMALL, make_samples, needs_checkout
from tests.dlrm.dlrmv4.cases import LENGTHS as LENGTHS_OF_CASES

LENGTHS = torch.tensor([2, 0, 3], dtype=torch.int32)
QUERY = torch.tensor([7200, 60, 26_000_000], dtype=torch.int32)
TIMESTAMP = torch.tensor([3600, 7200, 0, 25_999_940, 26_000_000], dtype=torch.int32)
SEQUENCES = sequences_of(offsets_of(LENGTHS), 5)
CONTEXT = range(8)


def test_a_sequence_is_context_history_candidate() -> None:
    assert SEQUENCES.offsets.tolist() == [0, 11, 20, 32]
    assert SEQUENCES.sample.tolist() == [0] * 11 + [1] * 9 + [2] * 12
    assert SEQUENCES.place.tolist() == [*range(11), *range(9), *range(12)]
    assert SEQUENCES.candidates.tolist() == [10, 19, 31]
    context = torch.arange(24.0).view(3, 8, 1)
    events = torch.tensor([100.0, 101, 102, 103, 104, 200, 201, 202])[:, None]  # those of candidates last
    joined = join(context, events, SEQUENCES)[:, 0].tolist()
    assert joined[:11] == [*range(8), 100, 101, 200]
    assert joined[11:20] == [*range(8, 16), 201]
    assert joined[20:] == [*range(16, 24), 102, 103, 104, 202]


def test_padded_events_are_tokens_past_the_last_sequence() -> None:
    padded = sequences_of(offsets_of(LENGTHS), 7)
    for name in ("sample", "place", "source"):
        was = getattr(SEQUENCES, name)
        now = getattr(padded, name)[:32]
        assert torch.equal(now - 2 * (now >= 31) if name == "source" else now, was), name  # candidates come later
    assert padded.source.sort().values.tolist() == list(range(34))
    assert padded.source[32:].tolist() == [29, 30]
    assert torch.equal(padded.target[padded.source], torch.arange(34))
    assert position_buckets(padded, SMALL).min() == 0


def test_the_gradient_of_a_join_goes_back_to_each_row() -> None:
    context, events = torch.zeros(3, 8, 2, requires_grad=True), torch.zeros(8, 2, requires_grad=True)
    weight = torch.arange(64.0).view(32, 2)
    (join(context, events, SEQUENCES) * weight).sum().backward()
    assert context.grad is not None
    assert events.grad is not None
    assert torch.equal(join(context.grad, events.grad, SEQUENCES), weight)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_event_that_comes_thousands_of_times_sums_its_gradient_in_fp32(device: str) -> None:
    """In bf16, 256 + 1 is 256, which shows on GPUs alone: the host's index_add_ sums in fp32 by itself."""
    # Two events, one candidate.
    rows = torch.tensor([[1.0], [2], [3]], dtype=torch.bfloat16, device=device, requires_grad=True)
    event = torch.ones(5000, dtype=torch.int32).index_fill(0, torch.tensor([7]), 0)
    picked = pick(rows, event.to(device), 1)
    assert picked[:9].flatten().tolist() == [2] * 7 + [1, 2]
    assert picked[-1] == 3
    picked.sum().backward()
    assert rows.grad is not None
    assert rows.grad.flatten().tolist() == [1, pytest.approx(4999, rel=0.004), 1]


def test_positions_count_from_the_end_of_the_history() -> None:
    positions = position_buckets(SEQUENCES, SMALL).tolist()
    assert positions[:11] == [*CONTEXT, 10, 9, 8]
    assert positions[11:20] == [*CONTEXT, 8]
    assert positions[20:] == [*CONTEXT, 11, 10, 9, 8]


def test_positions_beyond_the_last_bucket_share_it() -> None:
    few = replace(SMALL, max_history=1, position_buckets=10)
    assert position_buckets(SEQUENCES, few).tolist()[20:] == [*CONTEXT, 9, 9, 9, 8]


def test_times_are_roots_of_minutes_before_the_query() -> None:
    times = token_times(TIMESTAMP, QUERY, SEQUENCES)
    buckets = time_buckets(times, QUERY, SEQUENCES, SMALL).tolist()
    assert buckets[:11] == [10] * 8 + [7, 0, 0]  # context: sqrt(120 minutes) since second 0
    assert buckets[11:20] == [1] * 8 + [0]
    assert buckets[20:] == [658] * 8 + [658, 1, 0, 0]
    few = time_buckets(times, QUERY, SEQUENCES, replace(SMALL, time_buckets=9)).tolist()
    assert few == [min(9, of) for of in buckets]


def test_an_event_after_the_query_has_the_first_bucket() -> None:
    times = token_times(TIMESTAMP + 30, QUERY, SEQUENCES)
    assert time_buckets(times, QUERY, SEQUENCES, SMALL).tolist()[9] == 0


@pytest.mark.gpu
def test_a_gpu_has_the_hosts_time_buckets_at_every_second_of_yambda() -> None:
    timestamp, query = (of.int() for of in (torch.arange(0, 26_000_001, 5), torch.tensor([26_000_000])))
    lengths = torch.tensor([len(timestamp)], dtype=torch.int32)
    buckets = []
    for device in ("cpu", "cuda"):
        at, asked = timestamp.to(device), query.to(device)
        sequences = sequences_of(offsets_of(lengths.to(device)), len(timestamp))
        buckets.append(time_buckets(token_times(at, asked, sequences), asked, sequences, SMALL).cpu())
    assert torch.equal(*buckets)
    assert buckets[0].max() == 658


@needs_checkout
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only where there is no GPU")
def test_positions_and_times_are_those_of_the_references_kernel() -> None:
    """Of the Triton kernel that it trains with, which differs from its PyTorch operator beyond 512^2 minutes."""
    open_checkout(Path(str(CHECKOUT)))
    samples = make_samples(SMALL, LENGTHS_OF_CASES, seed=6)
    sequences = sequences_of(offsets_of(samples.lengths), len(samples.timestamp))
    times = token_times(samples.timestamp, samples.query_timestamp, sequences)
    time, position = kernel_buckets(times, samples.lengths + OWN_TOKENS)
    assert torch.equal(time, time_buckets(times, samples.query_timestamp, sequences, SMALL).int())
    assert torch.equal(position, position_buckets(sequences, SMALL).int())
    assert time.max() > 512
