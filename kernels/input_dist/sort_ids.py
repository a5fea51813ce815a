"""Sorts the ids of a batch by the rows that they name, each with its bag: the input of `sorted_adagrad`.

On Hopper GPUs this is our own radix sort. It sorts 32-bit pairs by only as many bits as rows need, while torch.sort
sorts by all 32 and carries 64-bit positions; it makes rows from ids in the first pass, and moves bags, not positions.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from dlrm_bench.kernels._cuda import Kernel, available, multiprocessors
from dlrm_bench.kernels._triton import cdiv

_SOURCE = Path(__file__).with_suffix(".cu")
# As in sort_ids.cu.
_THREADS, _WARPS = 256, 8
_DIGIT_BITS = 8  # at most
# Ids per thread: fewer if there are few ids, so that more multiprocessors get some.
_ITEMS, _FEW, _ITEMS_OF_FEW = 16, 1 << 19, 4


class SortTable:
    """The row offset and bag of each id, and working memory for sorts; copied to the device once.

    first_rows: int32 [N], the number to add to each id. bags: int32 [N], the bag of each: sample * tables + table.
    rows: exceeds every id plus its first row. Sorts with the same table run one after another.
    """

    def __init__(self, first_rows: Tensor, bags: Tensor, rows: int, digit_bits: int = 0, items: int = 0) -> None:
        """digit_bits: maximum number of bits per pass; items: ids per thread; 0 for the fastest."""
        assert first_rows.dtype == bags.dtype == torch.int32 and first_rows.shape == bags.shape, "int32 [N]"
        assert 0 < rows < 1 << 31, "rows must fit in int32"
        self.first_rows, self.bags, self.rows = first_rows, bags, rows
        bits = rows.bit_length()  # a key is a row plus one
        self.passes = cdiv(bits, digit_bits or _DIGIT_BITS)
        self.digit_bits = cdiv(bits, self.passes)
        count = len(bags)
        self.items = items or (_ITEMS_OF_FEW if count < _FEW else _ITEMS)
        self.tiles = cdiv(count, _THREADS * self.items)
        self.memory: tuple[Tensor, ...] | None = None
        """Keys and values of intermediate passes, digits' counts and starts, tickets, and published counts."""
        if _on_hopper(bags.device):
            digits = self.passes << self.digit_bits
            sizes = (count, count, digits, digits, self.passes + 1, digits * self.tiles)
            self.memory = tuple(torch.zeros(size, dtype=torch.int32, device=bags.device) for size in sizes)


def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and available()


def sort_ids(ids: Tensor, table: SortTable, sorted_ids: Tensor, sorted_bags: Tensor) -> None:
    """Sorts rows, stably, with the bag of each.

    ids: from a batch, not negative; the row of each is ids + table.first_rows. sorted_ids: rows, ascending.
    sorted_bags: the bag of each. All int32 [N]; the outputs overlap nothing.
    """
    tensors = (ids, sorted_ids, sorted_bags)
    assert all(t.dtype == torch.int32 and t.shape == table.bags.shape for t in tensors), "ids and bags: int32 [N]"
    sort = cuda_sort_ids if table.memory is not None else plain_sort_ids
    sort(ids, table, sorted_ids, sorted_bags)


def plain_sort_ids(ids: Tensor, table: SortTable, sorted_ids: Tensor, sorted_bags: Tensor) -> None:
    """Computes `sort_ids` in PyTorch."""
    sort_rows(ids + table.first_rows, table.bags, sorted_ids, sorted_bags)


def sort_rows(rows: Tensor, bags: Tensor, sorted_ids: Tensor, sorted_bags: Tensor) -> None:
    """Sorts rows, negative ones being padding, stably, with the bag of each, in PyTorch. All int32 [N]; the outputs
    overlap nothing."""
    order = torch.empty(rows.shape, dtype=torch.int64, device=rows.device)
    torch.sort(rows, stable=True, out=(sorted_ids, order))
    torch.index_select(bags, 0, order, out=sorted_bags)


class _Arguments(ctypes.Structure):
    """sort_ids.cu's struct Arguments."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "first_rows", "bags")),
        ("keys", ctypes.c_void_p * 2),
        ("values", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in ("digits", "starts", "tickets", "published")),
        *((name, ctypes.c_int) for name in ("count", "tiles", "pass_")),
    )


@functools.cache
def _kernel(name: str, bits: int, passes: int, items: int, device: torch.device) -> Kernel:
    defines = {"BITS": bits, "PASSES": passes, "ITEMS": items}
    bins = 1 << bits
    shared_bytes = 4 * (2 * _THREADS * items + (_WARPS + 2) * bins + _WARPS) if name == "sort_ids_pass" else 0
    with torch.cuda.device(device):
        return Kernel(_SOURCE, name, defines, _THREADS, shared_bytes)


def cuda_sort_ids(ids: Tensor, table: SortTable, sorted_ids: Tensor, sorted_bags: Tensor) -> None:
    """Computes `sort_ids` with a kernel that counts digits, and one kernel per digit."""
    if len(ids) == 0:
        return
    assert table.memory is not None, "sorting needs a Hopper GPU"
    assert ids.is_contiguous() and sorted_ids.is_contiguous() and sorted_bags.is_contiguous(), "contiguous tensors only"
    keys, values, *shared = (tensor.data_ptr() for tensor in table.memory)
    of_batch = (ids.data_ptr(), table.first_rows.data_ptr(), table.bags.data_ptr())
    pairs = ((ctypes.c_void_p * 2)(sorted_ids.data_ptr(), keys), (ctypes.c_void_p * 2)(sorted_bags.data_ptr(), values))
    kernels = [
        _kernel(name, table.digit_bits, table.passes, table.items, ids.device)
        for name in ("sort_ids_count", "sort_ids_pass")
    ]
    sizes = (len(ids), table.tiles)
    blocks = min(cdiv(len(ids), 4 * _THREADS), 2 * multiprocessors(ids.device))
    kernels[0].launch(blocks, _Arguments(*of_batch, *pairs, *shared, *sizes, 0))
    for digit in range(table.passes):
        kernels[1].launch(table.tiles, _Arguments(*of_batch, *pairs, *shared, *sizes, digit))
