"""Copying segments: the public function on this device, and the Triton kernel, against slices."""

import pytest
import torch

from dlrm_bench.kernels.input_dist.gather_segments import (
    Segment,
    SegmentTable,
    gather_segments,
    plain_gather_segments,
    triton_gather_segments,
)
from tests.kernels.devices import DEVICE, needs_triton

ODD = [Segment(3, 5001, 4099), Segment(4102, 0, 1), Segment(5000, 1, 5000), Segment(0, 9200, 0)]
ALIGNED = [Segment(0, 4096, 4100), Segment(4100, 0, 4096)]


@needs_triton
@pytest.mark.parametrize("segments", [ODD, ALIGNED, []])
def test_triton_equals_plain(segments: list[Segment]) -> None:
    table = SegmentTable(segments, DEVICE)
    source = torch.randint(1000, (10_000,), dtype=torch.int32, device=DEVICE)
    got, expected = torch.full((2, 10_004), -5, dtype=torch.int32, device=DEVICE)
    triton_gather_segments(source, table, got)
    plain_gather_segments(source, table, expected)
    assert torch.equal(got, expected)


def test_received_ids_become_features_of_the_global_batch() -> None:
    ranks, hot, batch = 2, [3, 1], 4
    per_rank = [[torch.randint(9, (batch, h), dtype=torch.int32, device=DEVICE) for h in hot] for _ in range(ranks)]
    source = torch.cat([ids.flatten() for rank in per_rank for ids in rank])
    segments, out_offset = [], 0
    for feature in range(2):
        for rank in range(ranks):
            length = batch * hot[feature]
            source_offset = rank * batch * sum(hot) + batch * sum(hot[:feature])
            segments.append(Segment(source_offset, out_offset, length))
            out_offset += length
    out = torch.empty(len(source), dtype=torch.int32, device=DEVICE)
    gather_segments(source, SegmentTable(segments, DEVICE), out)
    features = [torch.cat([rank[feature] for rank in per_rank]) for feature in range(2)]
    assert torch.equal(out, torch.cat([ids.flatten() for ids in features]))


def test_a_short_buffer_is_refused() -> None:
    ids = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(AssertionError, match="source"):
        gather_segments(ids, SegmentTable([Segment(4, 0, 8)], ids.device), ids.clone())
