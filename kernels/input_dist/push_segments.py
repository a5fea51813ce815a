"""Pushes segments of ids into buffers of their tables' owner ranks: the input dist without an intermediate copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import jit, tl
from dlrm_bench.kernels.input_dist.gather_segments import PIECE, Segment, alignment_of, cut
from dlrm_bench.kernels.peer_tensors import PeerTensors


class SegmentPushTable:
    """Segments for each rank's buffer, cut into pieces, copied to the device once.

    segments: segments[r] go to rank r's buffer, where their ranges must not overlap. pieces: int32 [pieces, 4]: rank,
    then the fields of `Segment`.
    """

    def __init__(self, segments: Sequence[Sequence[Segment]], device: torch.device) -> None:
        self.segments = tuple(tuple(of_rank) for of_rank in segments)
        every = [segment for of_rank in self.segments for segment in of_rank]
        self.alignment = alignment_of(cut(every))
        pieces = [(rank, *piece) for rank, of_rank in enumerate(self.segments) for piece in cut(of_rank)]
        self.pieces = torch.tensor(pieces, dtype=torch.int32).view(-1, 4).to(device)
        self.source_size = max((s.source_offset + s.length for s in every), default=0)
        self.out_size = max((s.out_offset + s.length for s in every), default=0)


def push_segments(source: Tensor, table: SegmentPushTable, outs: PeerTensors) -> None:
    """Copies each segment of `table` from `source` into its rank's buffer.

    source: int32 [n]; outs: int32 [m], both contiguous, not overlapping; ideally 16-byte aligned. Elements outside all
    segments stay unchanged. The caller puts a barrier of all ranks before this call, after the last read of the
    buffers, and one after it, before the next read.
    """
    tensors = (source, outs.own)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors), "contiguous int32 only"
    assert len(outs) == len(table.segments), "a buffer for each rank of the table"
    assert source.numel() >= table.source_size, f"source has {source.numel()} elements, not {table.source_size}"
    assert outs.own.numel() >= table.out_size, f"the buffers need {table.out_size} elements"
    push = triton_push_segments if source.is_cuda else plain_push_segments
    push(source, table, outs)


def plain_push_segments(source: Tensor, table: SegmentPushTable, outs: PeerTensors) -> None:
    """Computes `push_segments` in PyTorch."""
    for out, of_rank in zip(outs.tensors, table.segments, strict=True):
        for source_offset, out_offset, length in of_rank:
            out[out_offset : out_offset + length] = source[source_offset : source_offset + length]


def triton_push_segments(source: Tensor, table: SegmentPushTable, outs: PeerTensors) -> None:
    """Computes `push_segments` in one kernel."""
    if len(table.pieces):
        aligned = all(t.data_ptr() % 16 == 0 for t in (source, *outs.tensors))
        alignment = table.alignment if aligned else 1
        _push_segments_kernel[(len(table.pieces),)](
            source, outs.own, outs.addresses, table.pieces, alignment, PIECE, num_warps=4
        )


@jit
def _push_segments_kernel(source, own_out, outs, pieces, alignment: tl.constexpr, piece_size: tl.constexpr) -> None:
    piece = pieces + 4 * tl.program_id(0)
    # The own tensor gives the address its pointer type; alignment, in bytes, is a hint on the pointer, as the cast
    # loses the integer's.
    out = tl.multiple_of(tl.load(outs + tl.load(piece)).to(own_out.dtype), 4 * alignment)
    source_offset = tl.multiple_of(tl.load(piece + 1), alignment)
    out_offset = tl.multiple_of(tl.load(piece + 2), alignment)
    length = tl.multiple_of(tl.load(piece + 3), alignment)
    at = tl.arange(0, piece_size)
    tl.store(out + out_offset + at, tl.load(source + source_offset + at, at < length), at < length)
