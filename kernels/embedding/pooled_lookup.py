"""Embedding-bag sum lookup of fixed multi-hot sizes that writes pooled vectors straight into other GPUs' memory.

One kernel replaces FBGEMM's lookup, the pooled all-to-all and the regrouping of columns: the owner of a table's rows
writes the pooled vector of each sample to its columns in the memory of the sample's rank.

Rows are at random addresses, so speed depends on the bytes in flight. A program takes a few bags of one table and has a
tile of rows in flight at once: `step` ids of each bag, added up in registers, step by step until the bags end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_bench.kernels._triton import cdiv, jit, next_power_of_2, tl
from dlrm_bench.kernels.embedding.tiered_rows import check_host, host_offset, rows_at
from dlrm_bench.kernels.peer_tensors import PeerTensors

# By columns: rows that one program loads at a time; then the maximum ids per bag among them, and warps per program. The
# fastest on 4 x H200 for seven shapes at 64 columns, 512 to 3456 samples a GPU; other widths load as many elements.
_TILES = {16: 64, 32: 32, 64: 16, 128: 8}
_WIDEST_STEP = 8
_NUM_WARPS = 1


class PooledTable(NamedTuple):
    """A table or shard: `hot` ids per bag, rows from `first_row` on; pooled vectors begin at `out_column`."""

    hot: int
    first_row: int
    out_column: int


class LookupTable:
    """The positions of each table's ids, rows and pooled vectors; copied to the device once.

    local_batch: samples of each of the `ranks` ranks. Output columns are multiples of 8. fields: int64 [tables, 5]:
    offset of the first id, first row, output column, hot, hot rounded up to a power of two; the largest hot first,
    because its programs take longest and must not start last.
    """

    def __init__(self, tables: Sequence[PooledTable], local_batch: int, ranks: int, device: torch.device) -> None:
        assert all(table.hot > 0 for table in tables), "every bag must have an id"
        assert all(table.out_column % 8 == 0 for table in tables), "output columns must be multiples of 8"
        self.tables, self.local_batch, self.ranks = tuple(tables), local_batch, ranks
        self.global_batch = ranks * local_batch
        self.first_ids, self.num_ids = [], 0
        for table in tables:
            self.first_ids.append(self.num_ids)
            self.num_ids += self.global_batch * table.hot
        fields = [
            (first_id, table.first_row, table.out_column, table.hot, next_power_of_2(table.hot))
            for first_id, table in zip(self.first_ids, self.tables, strict=True)
        ]
        fields.sort(key=lambda row: -row[3])
        self.fields = torch.tensor(fields, dtype=torch.int64).view(-1, 5).to(device)


def pooled_lookup(
    weights: Tensor,
    ids: Tensor,
    table: LookupTable,
    outs: PeerTensors,
    first_out_row: int = 0,
    host: Tensor | None = None,
) -> None:
    """Sums the rows of every bag and stores the sum on the rank of the bag's sample.

    weights: fp32 [R, C], C a power of two from 16 to 128: all tables, one after another; columns adjacent, row stride a
    multiple of 4. ids: int32, flat, [table][sample of the global batch][hot of the table], rows of their table (not
    checked). The sum of sample r * local_batch + s of a table, in fp32, rounded to the dtype of `outs`, goes to row
    first_out_row + s of outs.tensors[r], columns [out_column, out_column + C). outs: bf16 or fp32 [rows, width],
    16-byte aligned, columns adjacent, row stride a multiple of 8. Equal inputs give equal bits.

    host: fp32 [H, 2, C], the rows from number R on, see tiered_rows.py; all tables' first rows are then 0.
    """
    columns, own = weights.shape[1], outs.own
    assert weights.dtype == torch.float32, "weights: fp32"
    assert weights.stride(1) == 1 and weights.stride(0) % 4 == 0, "weights: row-major, row stride a multiple of 4"
    assert columns in _TILES, f"16, 32, 64 or 128 columns, not {columns}"
    assert ids.dtype == torch.int32 and ids.is_contiguous(), "ids: int32, contiguous"
    assert ids.numel() >= table.num_ids, f"{ids.numel()} ids, not {table.num_ids}"
    assert len(outs) == table.ranks, f"outputs of {len(outs)} ranks, not {table.ranks}"
    assert own.dtype in (torch.bfloat16, torch.float32), f"outputs in bf16 or fp32, not {own.dtype}"
    assert own.stride(1) == 1 and own.stride(0) % 8 == 0, "outputs: row-major, row stride a multiple of 8"
    assert all(out.data_ptr() % 16 == 0 for out in outs.tensors), "outputs must start on 16 bytes"
    assert first_out_row + table.local_batch <= own.shape[0], f"outputs have only {own.shape[0]} rows"
    width = max((t.out_column + columns for t in table.tables), default=0)
    assert width <= own.shape[1], f"outputs have {own.shape[1]} columns, not {width}"
    if host is not None:
        check_host(weights, host)
    lookup = triton_pooled_lookup if weights.is_cuda else plain_pooled_lookup
    lookup(weights, ids, table, outs, first_out_row, host)


def plain_pooled_lookup(
    weights: Tensor,
    ids: Tensor,
    table: LookupTable,
    outs: PeerTensors,
    first_out_row: int = 0,
    host: Tensor | None = None,
) -> None:
    """Computes `pooled_lookup` in PyTorch."""
    in_host = None if host is None else host[:, 0]
    for first_id, (hot, first_row, out_column) in zip(table.first_ids, table.tables, strict=True):
        bags = ids[first_id : first_id + table.global_batch * hot].view(table.ranks, table.local_batch, hot)
        for rank_bags, out in zip(bags, outs.tensors, strict=True):
            rows = out.narrow(0, first_out_row, table.local_batch).narrow(1, out_column, weights.shape[1])
            rows.copy_(rows_at(weights, in_host, first_row + rank_bags.long()).sum(1))


def triton_pooled_lookup(
    weights: Tensor,
    ids: Tensor,
    table: LookupTable,
    outs: PeerTensors,
    first_out_row: int = 0,
    host: Tensor | None = None,
    tile: int = 0,
    widest_step: int = 0,
    num_warps: int = 0,
) -> None:
    """Computes `pooled_lookup` in one kernel."""
    columns = weights.shape[1]
    tile, widest_step = tile or _TILES[columns], widest_step or _WIDEST_STEP
    steps = [min(next_power_of_2(t.hot), widest_step) for t in table.tables]
    programs = sum(cdiv(table.global_batch, tile // step) for step in steps)
    if programs == 0:
        return
    _pooled_lookup_kernel[(programs,)](
        weights,
        ids,
        outs.addresses,
        outs.own,
        table.fields,
        len(table.tables),
        table.global_batch,
        table.local_batch,
        first_out_row,
        outs.own.stride(0),
        len(weights),
        host_offset(weights, host),
        host is not None and len(host) > 0,
        weights.stride(0),
        columns,
        next_power_of_2(len(table.tables)),
        tile,
        widest_step,
        num_warps=num_warps or _NUM_WARPS,
    )


@jit
def _pooled_lookup_kernel(
    weights,
    ids,
    addresses,
    own_out,
    fields,
    num_tables,
    global_batch,
    local_batch,
    first_out_row,
    out_stride,
    device_rows,
    in_host,
    tiered: tl.constexpr,
    stride: tl.constexpr,
    columns: tl.constexpr,
    table_slots: tl.constexpr,
    tile: tl.constexpr,
    widest_step: tl.constexpr,
) -> None:
    # Find this program's table, and its number within the table.
    slot = tl.arange(0, table_slots)
    steps = tl.minimum(tl.load(fields + 5 * slot + 4, slot < num_tables, other=1).to(tl.int32), widest_step)
    programs = tl.where(slot < num_tables, tl.cdiv(global_batch, tile // steps), 0)
    before = tl.cumsum(programs, 0) <= tl.program_id(0)
    field = fields + 5 * tl.sum(before.to(tl.int32), 0)
    program = tl.program_id(0) - tl.sum(tl.where(before, programs, 0), 0)

    ids += tl.load(field)
    weights += tl.load(field + 1) * stride
    out_column = tl.load(field + 2)
    hot = tl.load(field + 3).to(tl.int32)
    table_step = tl.minimum(tl.load(field + 4).to(tl.int32), widest_step)
    for step_bits in tl.static_range(widest_step.bit_length()):
        if table_step == 1 << step_bits:
            _add_bags(
                weights,
                ids,
                addresses,
                own_out,
                hot,
                program,
                global_batch,
                local_batch,
                first_out_row,
                out_stride,
                out_column,
                device_rows,
                in_host,
                tiered,
                stride,
                columns,
                tile >> step_bits,
                1 << step_bits,
                (1 << step_bits) < widest_step,
            )


@jit
def _sum_rows(
    weights, row, valid, device_rows, in_host, tiered: tl.constexpr, stride: tl.constexpr, columns: tl.constexpr
):
    """Returns sums over the second axis of row and valid, [bags, step], as fp32 [bags, columns]."""
    start = row.to(tl.int64) * stride
    if tiered:
        start += tl.where(row >= device_rows, in_host, 0)
    at = start[:, :, None] + tl.arange(0, columns)[None, None, :]
    return tl.sum(tl.load(weights + at, valid[:, :, None], other=0.0), 1)


@jit
def _add_bags(
    weights,
    ids,
    addresses,
    own_out,
    hot,
    program,
    global_batch,
    local_batch,
    first_out_row,
    out_stride,
    out_column,
    device_rows,
    in_host,
    tiered: tl.constexpr,
    stride: tl.constexpr,
    columns: tl.constexpr,
    bags: tl.constexpr,
    step: tl.constexpr,
    ends_in_one: tl.constexpr,
) -> None:
    bag = program * bags + tl.arange(0, bags)
    inside = bag < global_batch
    rank = bag // local_batch
    out = tl.load(addresses + rank, inside, other=0).to(own_out.dtype)
    out += (first_out_row + bag - rank * local_batch).to(tl.int64) * out_stride + out_column

    # Threads are distributed over columns, then bags, so that each adds up the ids of a bag in its registers.
    column = tl.arange(0, columns)
    nth = tl.arange(0, step)[None, :]
    at = ids + bag.to(tl.int64)[:, None] * hot + nth
    row = tl.load(at, inside[:, None] & (nth < hot), other=0)
    if ends_in_one:
        total = _sum_rows(weights, row, inside[:, None] & (nth < hot), device_rows, in_host, tiered, stride, columns)
    else:
        total = tl.zeros([bags, columns], tl.float32)
        start = 0
        while start < hot:
            # The next ids are loaded together with these ids' rows.
            following = tl.load(at + start + step, inside[:, None] & (start + step + nth < hot), other=0)
            valid = inside[:, None] & (start + nth < hot)
            total += _sum_rows(weights, row, valid, device_rows, in_host, tiered, stride, columns)
            row = following
            start += step

    # An address from memory has no known alignment.
    at_out = tl.max_contiguous(tl.multiple_of(out[:, None] + column[None, :], [16, 16]), [1, columns])
    tl.store(at_out, total.to(own_out.dtype.element_ty), inside[:, None])
