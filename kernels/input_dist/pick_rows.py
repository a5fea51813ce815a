"""Picks the ids of a batch that name a rank's rows: bags of any length, in a list of fixed capacity."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, tl

_PIECE = 2048  # ids per program
_FIELDS = 9


class PickedTable(NamedTuple):
    """A table of which a rank has every `row_parts`-th row from `row_part` on."""

    hot: int
    """Ids per sample."""
    row_part: int
    row_parts: int
    first_row: int
    """Number of rows of the rank's tables before this one's."""


class PickTable:
    """The tables of a rank, with ids laid out as [part][T][samples, hot]; cut into pieces, copied to the device once.

    pieces: int32 [pieces, 9]: start and length, index of the first id in its block [samples, hot], then `hot`,
    `row_part`, `row_parts`, `first_row`, and the first bag's number and its index among the offsets.
    """

    def __init__(self, tables: tuple[PickedTable, ...], samples: int, parts: int, device: torch.device) -> None:
        """samples: number of samples of one part. Bags are numbered (part * samples + sample) * T + table."""
        self.tables, self.samples, self.parts = tables, samples, parts
        pieces, at = [], 0
        for part in range(parts):
            for number, table in enumerate(tables):
                size = samples * table.hot
                first_bag, ordinal = part * samples * len(tables) + number, (part * len(tables) + number) * samples
                for start in range(0, size, _PIECE):
                    pieces.append((at + start, min(_PIECE, size - start), start, *table, first_bag, ordinal))
                at += size
        self.num_ids, self.num_bags = at, parts * len(tables) * samples
        self.pieces = torch.tensor(pieces, dtype=torch.int32).view(-1, _FIELDS).to(device)

    @cached_property
    def of_each_id(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns `row_part`, `row_parts`, `first_row` and bag of each id, int32; and the index of each bag's last id,
        in order."""
        device, tables = self.pieces.device, len(self.tables)
        hot = torch.tensor([table.hot for table in self.tables] * self.parts)

        def each_id(values: list[int]) -> Tensor:
            repeated = torch.tensor(values * self.parts, dtype=torch.int32)
            return repeated.repeat_interleave(hot * self.samples).to(device)

        bag_sizes = hot.repeat_interleave(self.samples)
        part, table, sample = torch.meshgrid(
            torch.arange(self.parts), torch.arange(tables), torch.arange(self.samples), indexing="ij"
        )
        bags = ((part * self.samples + sample) * tables + table).flatten()
        return (
            each_id([table.row_part for table in self.tables]),
            each_id([table.row_parts for table in self.tables]),
            each_id([table.first_row for table in self.tables]),
            bags.repeat_interleave(bag_sizes).to(device=device, dtype=torch.int32),
            (bag_sizes.cumsum(0) - 1).to(device),
        )


class Picks(NamedTuple):
    """The result of `pick_rows`, all int32: a list of fixed capacity, and its number of valid elements."""

    rows: Tensor
    """[capacity]: row number within the rank's rows of its table; 0 after the last."""
    sort_rows: Tensor
    """[capacity]: rows counted one table after another; -1 after the last."""
    bags: Tensor
    """[capacity]: the bag of each; 0 after the last."""
    offsets: Tensor
    """[bags + 1]: start of each bag's ids; the first element must be 0 before the call."""
    num_ids: Tensor
    """[1]: the number of ids, even if it exceeds the capacity."""


def pick_rows(ids: Tensor, table: PickTable, out: Picks) -> None:
    """Picks ids in order; if there are too many, the list holds the first ones.

    ids: int32 [N], in the layout of `table`, negative for padding.
    """
    assert ids.dtype == torch.int32 and ids.shape == (table.num_ids,) and ids.is_contiguous(), "ids: int32 [N]"
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in out), "contiguous int32 only"
    assert len(out.offsets) == table.num_bags + 1 and len(out.rows) == len(out.sort_rows) == len(out.bags)
    pick = triton_pick_rows if ids.is_cuda else plain_pick_rows
    pick(ids, table, out)


def plain_pick_rows(ids: Tensor, table: PickTable, out: Picks) -> None:
    """Computes `pick_rows` in PyTorch."""
    part, parts, first_row, bags, bag_ends = table.of_each_id
    capacity = len(out.rows)
    mine = (ids >= 0) & (ids.remainder(parts) == part)
    until = mine.cumsum(0, dtype=torch.int32)
    picked = mine.nonzero().flatten()[:capacity]
    rows = torch.div(ids[picked], parts[picked], rounding_mode="floor")
    lists = ((out.rows, rows, 0), (out.sort_rows, rows + first_row[picked], -1), (out.bags, bags[picked], 0))
    for values, of_picked, after in lists:
        values[: len(picked)] = of_picked
        values[len(picked) :] = after
    out.offsets[1:] = until[bag_ends].clamp(max=capacity)
    out.num_ids.copy_(until[-1:])


def triton_pick_rows(ids: Tensor, table: PickTable, out: Picks) -> None:
    """Computes `pick_rows` with a kernel that counts in each piece, a sum, and two kernels that write."""
    pieces, capacity = len(table.pieces), len(out.rows)
    counts = torch.empty(pieces, dtype=torch.int32, device=ids.device)
    _count_picks_kernel[(pieces,)](ids, table.pieces, counts, _FIELDS, _PIECE, num_warps=4)
    ends = counts.cumsum(0, dtype=torch.int32)
    sizes = (capacity, len(table.tables), _FIELDS, _PIECE)
    _write_picks_kernel[(pieces,)](ids, table.pieces, counts, ends, *out[:4], *sizes, num_warps=4)
    last = ends[-1:]
    _rest_of_picks_kernel[(cdiv(capacity, _PIECE),)](last, *out[:3], out.num_ids, capacity, _PIECE, num_warps=4)


@jit
def _mine(ids, piece, at):
    length, row_part, row_parts = tl.load(piece + 1), tl.load(piece + 4), tl.load(piece + 5)
    value = tl.load(ids + tl.load(piece) + at, at < length, other=-1)
    return value, (value >= 0) & (value % row_parts == row_part)


@jit
def _count_picks_kernel(ids, pieces, counts, fields: tl.constexpr, piece_size: tl.constexpr) -> None:
    piece = tl.program_id(0)
    _, mine = _mine(ids, pieces + fields * piece, tl.arange(0, piece_size))
    tl.store(counts + piece, tl.sum(mine.to(tl.int32), 0))


@jit
def _write_picks_kernel(
    ids,
    pieces,
    counts,
    ends,
    rows,
    sort_rows,
    bags,
    offsets,
    capacity,
    tables,
    fields: tl.constexpr,
    piece_size: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    piece, at = pieces + fields * number, tl.arange(0, piece_size)
    value, mine = _mine(ids, piece, at)
    until = tl.load(ends + number) - tl.load(counts + number) + tl.cumsum(mine.to(tl.int32), 0)
    hot, place = tl.load(piece + 3), until - 1
    nth = tl.load(piece + 2) + at
    sample = nth // hot
    kept = mine & (place < capacity)
    row = value // tl.load(piece + 5)
    tl.store(rows + place, row, kept)
    tl.store(sort_rows + place, row + tl.load(piece + 6), kept)
    tl.store(bags + place, tl.load(piece + 7) + sample * tables, kept)
    ends_bag = (at < tl.load(piece + 1)) & (nth % hot == hot - 1)
    tl.store(offsets + 1 + tl.load(piece + 8) + sample, tl.minimum(until, capacity), ends_bag)


@jit
def _rest_of_picks_kernel(last, rows, sort_rows, bags, count, capacity, piece_size: tl.constexpr) -> None:
    """Fills the list after the last id."""
    picked = tl.load(last)
    at = tl.program_id(0) * piece_size + tl.arange(0, piece_size)
    after = (at >= picked) & (at < capacity)
    tl.store(rows + at, tl.zeros_like(at), after)
    tl.store(sort_rows + at, tl.zeros_like(at) - 1, after)
    tl.store(bags + at, tl.zeros_like(at), after)
    tl.store(count, picked, tl.program_id(0) == 0)
