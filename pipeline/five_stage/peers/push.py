"""Kernels of exchanges through peer memory, each beside the plain function that it equals: a copy of blocks to all
ranks, and the sum of what all ranks have sent.

A block is rows of equal length at equal distances, which is enough for every exchange of an iteration: of ids, of
pooled vectors and of gradients, each way, with no reordering before or after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from .._triton import jit, tl

WIDEST = 16
"""Bytes that a thread loads or stores at once, at most."""
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
_UNITS, _UNITS_OF_FEW = 256, 1024
_FEW = 24
"""Programs that copy a rank's block beside other work. As many as its size asks for would fill all multiprocessors: on
two H200s a sum over a batch then took 80 us instead of 23 beside the copy of 21 MB, which took 66."""
_PROGRAMS = 1 << 14
"""Programs of all blocks together, at most: those of a small block beside large ones have nothing to copy, and come and
go."""
_SUMS = 1024
_MOST = 2**31 - 2**16
SUMMED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that `sum_of_ranks` takes."""


class Block(NamedTuple):
    """Elements that one rank is sent: `columns` of each of the rows."""

    source: int
    """Place of the first element in the source."""
    source_stride: int
    target: int
    """Place of the first element in that rank's buffer."""
    target_stride: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


class Layout(NamedTuple):
    """The form of an exchange, in elements."""

    blocks: list[tuple[int, Block]]
    """Elements that this rank sends, each block with the rank that is sent it; any number for a rank."""
    size: int
    """Size of a buffer: the largest number that any rank receives."""


class RankBuffers:
    """A buffer of each rank, uint8 [bytes], contiguous, of equal size, in rank order, aligned to 16 bytes. This rank
    may write all of them."""

    def __init__(self, tensors: Sequence[Tensor], rank: int) -> None:
        assert all(of.data_ptr() % WIDEST == 0 for of in tensors), "buffers are aligned"
        self.tensors, self.own = tuple(tensors), tensors[rank]
        self.addresses = torch.tensor([of.data_ptr() for of in tensors], device=self.own.device)
        """int64 [ranks], on the device."""


class PushTable:
    """The blocks of an exchange in the units that a kernel copies; on the device, int64 [blocks, 7]: the fields of
    Block, and the rank."""

    def __init__(
        self, blocks: Sequence[tuple[int, Block]], itemsize: int, alignment: int, device: torch.device
    ) -> None:
        """blocks: see Layout. itemsize: bytes of an element. alignment: bytes that the source's address is a multiple
        of."""
        self.blocks = [(rank, _in_one_piece(block)) for rank, block in blocks if block.elements]
        sent = [block for _, block in self.blocks]
        numbers = [n * itemsize for of in sent for n in (of.source, of.target, of.columns, *_strides(of))]
        self.unit = gcd(WIDEST, alignment, *numbers)
        """Bytes, a power of two."""
        self.end = max((of.source + (of.rows - 1) * of.source_stride + of.columns for of in sent), default=0)
        """Elements of the source up to the last one that is sent."""
        in_units = [self._in_units(of, itemsize) for of in sent]
        self.most = max((of.elements for of in in_units), default=0)
        """Units of the largest block."""
        assert self.most < _MOST, "the kernel counts units in int32"
        ranked = [(*of, rank) for (rank, _), of in zip(self.blocks, in_units, strict=True)]
        self.units = torch.tensor(ranked, dtype=torch.int64, device=device)

    def _in_units(self, of: Block, itemsize: int) -> Block:
        *places, columns = (n * itemsize // self.unit for n in (*of[:4], of.columns))
        return Block._make((*places, of.rows, columns))


def _in_one_piece(of: Block) -> Block:
    """Returns the same elements as a single row, if rows follow one another on both sides."""
    if of.source_stride == of.target_stride == of.columns:
        return Block(of.source, 0, of.target, 0, 1, of.elements)
    return of


def _strides(of: Block) -> tuple[int, int]:
    return (of.source_stride, of.target_stride) if of.rows > 1 else (0, 0)


def push(source: Tensor, table: PushTable, outs: RankBuffers, beside: bool = False, divisor: int = 1) -> None:
    """Copies the table's blocks from `source` into the buffers of their ranks, whose other bytes stay unchanged.

    source: of any dtype; its elements are counted in memory, from its first one on. beside: leave multiprocessors to
    other work, which matters more. divisor: of the elements on their way, if their dtype is in SUMMED; the result is
    Tensor.div_'s, bit by bit. The caller puts a barrier of all ranks before this call, after the last read of the
    buffers, and one after it, before the next read.
    """
    assert divisor == 1 or source.dtype in SUMMED, "only numbers of a dtype of SUMMED are divided"
    if source.is_cuda:
        triton_push(source, table, outs, beside, divisor)
    else:
        plain_push(source, table, outs, divisor)


def plain_push(source: Tensor, table: PushTable, outs: RankBuffers, divisor: int = 1) -> None:
    """Computes `push` in PyTorch."""
    for rank, of in table.blocks:
        shape, start = (of.rows, of.columns), source.storage_offset() + of.source
        into = outs.tensors[rank].view(source.dtype)
        into = into.as_strided(shape, (of.target_stride, 1), into.storage_offset() + of.target)
        block = source.as_strided(shape, (of.source_stride, 1), start)
        into.copy_(block if divisor == 1 else block / divisor)


def triton_push(source: Tensor, table: PushTable, outs: RankBuffers, beside: bool = False, divisor: int = 1) -> None:
    """Computes `push` in one kernel."""
    word, units = min(table.unit, 4), _UNITS_OF_FEW if beside else _UNITS
    if table.most:
        flat = source.as_strided((table.end,), (1,), source.storage_offset())
        if divisor == 1:
            flat = flat.view(_WORDS[word])
        parts = -(-table.most // units)
        programs = min(parts, _FEW if beside else max(1, _PROGRAMS // len(table.blocks)))
        sizes = (-(-parts // programs), table.unit // flat.itemsize, units, 1 / divisor)
        _push_to_ranks_kernel[(programs, len(table.blocks))](flat, outs.addresses, table.units, *sizes, num_warps=4)


def sum_of_ranks(terms: Tensor, out: Tensor, scale: float = 1.0, own: int | None = None) -> None:
    """Computes out = the sum of scale * terms[rank], in fp32, in rank order, rounded once. Of two ranks, and for a
    scale that is a power of two, that is what NCCL's sum or average gives, bit by bit, unless a product is subnormal.

    terms: [ranks, n] contiguous, of a dtype in SUMMED; out: [n] contiguous, of the same. own: rank whose term is in
    `out` instead.
    """
    assert terms.dtype == out.dtype in SUMMED, "a dtype of SUMMED"
    assert terms.shape[1:] == out.shape, f"terms: [ranks, {len(out)}]"
    (triton_sum_of_ranks if out.is_cuda else plain_sum_of_ranks)(terms, out, scale, own)


def plain_sum_of_ranks(terms: Tensor, out: Tensor, scale: float, own: int | None = None) -> None:
    """Computes `sum_of_ranks` in PyTorch."""
    first, *others = (out if rank == own else term for rank, term in enumerate(terms))
    total = first.float() * scale
    for other in others:
        total = total + other.float() * scale
    out.copy_(total)


def triton_sum_of_ranks(terms: Tensor, out: Tensor, scale: float, own: int | None = None) -> None:
    """Computes `sum_of_ranks` in one kernel."""
    ranks, count = terms.shape
    if count:
        sizes = (count, float(scale), ranks, -1 if own is None else own, _SUMS)
        _sum_of_ranks_kernel[(-(-count // _SUMS),)](terms, out, *sizes, num_warps=4)


@jit
def _push_to_ranks_kernel(
    source, addresses, blocks, turns: tl.constexpr, vector: tl.constexpr, units: tl.constexpr, scale: tl.constexpr
) -> None:
    block = blocks + 7 * tl.program_id(1)
    rank = tl.load(block + 6)
    columns = tl.load(block + 5).to(tl.int32)
    count = tl.load(block + 4).to(tl.int32) * columns
    # Alignment is a hint on the pointer, as the cast loses the integer's.
    out = tl.multiple_of(tl.load(addresses + rank).to(source.dtype), 16)
    within = tl.arange(0, vector)[None, :]
    for turn in range(turns):
        unit = (turn * tl.num_programs(0) + tl.program_id(0)) * units + tl.arange(0, units)
        row = (unit // columns).to(tl.int64)
        column = unit % columns
        read = tl.load(block) + row * tl.load(block + 1) + column
        write = tl.load(block + 2) + row * tl.load(block + 3) + column
        mask = (unit < count)[:, None]
        value = tl.load(source + read[:, None] * vector + within, mask)
        if scale != 1.0:  # the reciprocal, as PyTorch divides by a number
            value = (value.to(tl.float32) * scale).to(source.dtype.element_ty)
        tl.store(out + write[:, None] * vector + within, value, mask)


@jit
def _sum_of_ranks_kernel(terms, out, count, scale, ranks: tl.constexpr, own: tl.constexpr, block: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < count
    if own == 0:
        total = tl.load(out + at, mask).to(tl.float32) * scale  # a sum that begins with zero would lose the sign of -0
    else:
        total = tl.load(terms + at, mask).to(tl.float32) * scale
    for rank in tl.static_range(1, ranks):
        terms += count
        if rank == own:
            total += tl.load(out + at, mask).to(tl.float32) * scale
        else:
            total += tl.load(terms + at, mask).to(tl.float32) * scale
    tl.store(out + at, total, mask)
