"""Pushing segments to the ranks' buffers: the plain twin element by element, Triton against the plain twin."""

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.input_dist.gather_segments import Segment
from dlrm_bench.kernels.input_dist.push_segments import (
    SegmentPushTable,
    plain_push_segments,
    push_segments,
    triton_push_segments,
)
from dlrm_bench.kernels.peer_tensors import PeerTensors
from tests.kernels.devices import DEVICE, needs_triton

SIZE = 10_004  # of each buffer
UNTOUCHED = -5
# Up to four ranks; one element goes to two of them, and one rank gets nothing.
ODD = [
    [Segment(3, 5001, 4099), Segment(4102, 0, 1)],
    [Segment(5000, 1, 5000), Segment(0, 9200, 0), Segment(4102, 7001, 3)],
    [],
    [Segment(0, 9999, 5), Segment(17, 2, 2049)],
]
ALIGNED = [[Segment(0, 4096, 4100), Segment(4100, 0, 4096)], [Segment(0, 8, 4)], [], [Segment(2048, 2048, 2048)]]


def buffers(ranks: int) -> list[Tensor]:
    """Returns buffers, each its own allocation, as those of several GPUs are."""
    return [torch.full((SIZE + 1,), UNTOUCHED, dtype=torch.int32, device=DEVICE) for _ in range(ranks)]


def ids(size: int = 10_001) -> Tensor:
    """Returns ids, all different, and none a number that buffers are full of."""
    return torch.randperm(size, device=DEVICE).int()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_element_stands_where_its_segment_says(ranks: int) -> None:
    source, outs = ids(), buffers(ranks)
    push_segments(source, SegmentPushTable(ODD[:ranks], DEVICE), PeerTensors(outs, ranks - 1))
    for out, segments in zip(outs, ODD, strict=False):
        expected = [UNTOUCHED] * len(out)
        for segment in segments:
            for i in range(segment.length):
                expected[segment.out_offset + i] = int(source[segment.source_offset + i])
        assert out.tolist() == expected


@needs_triton
@pytest.mark.parametrize(
    ("source_start", "out_start"), [(0, 0), (1, 0), (0, 1)], ids=["aligned", "odd source", "odd buffers"]
)
@pytest.mark.parametrize("segments", [ODD, ALIGNED])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_triton_equals_plain(ranks: int, segments: list[list[Segment]], source_start: int, out_start: int) -> None:
    table = SegmentPushTable(segments[:ranks], DEVICE)
    assert table.alignment == (4 if segments is ALIGNED else 1)
    got, expected = buffers(ranks), buffers(ranks)
    source = ids()[source_start:]
    triton_push_segments(source, table, PeerTensors([out[out_start:] for out in got], ranks - 1))
    plain_push_segments(source, table, PeerTensors([out[out_start:] for out in expected], ranks - 1))
    assert all(map(torch.equal, got, expected))


@needs_triton
def test_no_segments_write_nothing() -> None:
    outs = buffers(2)
    triton_push_segments(ids(), SegmentPushTable([[], []], DEVICE), PeerTensors(outs, 0))
    assert all(bool((out == UNTOUCHED).all()) for out in outs)


def test_short_tensors_are_refused() -> None:
    table, outs = SegmentPushTable([[], [Segment(4, 8, 8)]], DEVICE), buffers(2)
    with pytest.raises(AssertionError, match="source"):
        push_segments(ids(11), table, PeerTensors(outs, 0))
    with pytest.raises(AssertionError, match="buffers need 16"):
        push_segments(ids(), table, PeerTensors([out[:15] for out in outs], 0))
    with pytest.raises(AssertionError, match="a buffer for each rank"):
        push_segments(ids(), table, PeerTensors(outs[:1], 0))
