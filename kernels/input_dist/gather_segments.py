"""Copies many contiguous segments of ids in one launch: the layouts of the input dist."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import jit, tl

PIECE = 2048  # elements per program


class Segment(NamedTuple):
    """`length` ids from source[source_offset:] to out[out_offset:]."""

    source_offset: int
    out_offset: int
    length: int


def cut(segments: Iterable[Segment]) -> list[Segment]:
    """Returns the same elements as segments of at most one program's size."""
    return [
        Segment(segment.source_offset + start, segment.out_offset + start, min(PIECE, segment.length - start))
        for segment in segments
        for start in range(0, segment.length, PIECE)
    ]


def alignment_of(pieces: Iterable[Segment]) -> int:
    """Returns the number of elements per access: 4 (16 bytes) if every piece starts and ends on a multiple of 4, else
    1."""
    return 4 if all(value % 4 == 0 for piece in pieces for value in piece) else 1


class SegmentTable:
    """Segments, cut into pieces, copied to the device once.

    pieces: int32 [pieces, 3] with the fields of `Segment`. The segments' ranges of the output must not overlap.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.segments = tuple(segments)
        pieces = cut(segments)
        self.pieces = torch.tensor(pieces, dtype=torch.int32).view(-1, 3).to(device)
        self.alignment = alignment_of(pieces)
        self.source_size = max((s.source_offset + s.length for s in self.segments), default=0)
        self.out_size = max((s.out_offset + s.length for s in self.segments), default=0)


def gather_segments(source: Tensor, table: SegmentTable, out: Tensor) -> None:
    """Copies each segment of `table` from `source` to `out`.

    source: int32 [n]; out: int32 [m], contiguous, not overlapping. Elements outside all segments stay unchanged.
    """
    tensors = (source, out)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors), "contiguous int32 only"
    assert source.numel() >= table.source_size, f"source has {source.numel()} elements, not {table.source_size}"
    assert out.numel() >= table.out_size, f"the output needs {table.out_size} elements"
    gather = triton_gather_segments if source.is_cuda else plain_gather_segments
    gather(source, table, out)


def plain_gather_segments(source: Tensor, table: SegmentTable, out: Tensor) -> None:
    """Computes `gather_segments` in PyTorch."""
    for source_offset, out_offset, length in table.segments:
        out[out_offset : out_offset + length] = source[source_offset : source_offset + length]


def triton_gather_segments(source: Tensor, table: SegmentTable, out: Tensor) -> None:
    """Computes `gather_segments` in one kernel."""
    if len(table.pieces):
        aligned = all(t.data_ptr() % 16 == 0 for t in (source, out))
        alignment = table.alignment if aligned else 1
        _gather_segments_kernel[(len(table.pieces),)](source, table.pieces, out, alignment, PIECE, num_warps=4)


@jit
def _gather_segments_kernel(source, pieces, out, alignment: tl.constexpr, piece_size: tl.constexpr) -> None:
    piece = pieces + 3 * tl.program_id(0)
    source_offset = tl.multiple_of(tl.load(piece), alignment)
    out_offset = tl.multiple_of(tl.load(piece + 1), alignment)
    length = tl.multiple_of(tl.load(piece + 2), alignment)
    at = tl.arange(0, piece_size)
    tl.store(out + out_offset + at, tl.load(source + source_offset + at, at < length), at < length)
