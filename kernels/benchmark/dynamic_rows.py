"""Benchmark cases for rows that are created when first looked up, as by 1,024 samples of DLRMv4 on one of two ranks:
lists of 64,000 sorted rows from two ranks, an eighth of them new, in a map of a million ids."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dlrm_bench.kernels.benchmark.timing import Case
from dlrm_bench.kernels.embedding.id_map import EMPTY, WINDOW, IdSlots, empty_slots, find_ids, insert_ids
from dlrm_bench.kernels.embedding.initial_rows import RowsOfTables, initial_rows

_HELD, _ROWS, _NEW, _COLUMNS, _TABLES = 1_000_000, 64_000, 8_000, 512, 11


def _map() -> tuple[IdSlots, Tensor]:
    """Returns a map that holds every third id, and the slot of each place."""
    slots, slot_of = empty_slots(_HELD, torch.device("cuda")), torch.empty(2 * _HELD, dtype=torch.int32, device="cuda")
    places = torch.arange(_HELD, dtype=torch.int32, device="cuda")
    insert_ids(3 * places, places, slots, slot_of)
    return slots, slot_of


def _insert_and_take_out(ids: Tensor, places: Tensor, slots: IdSlots, slot_of: Tensor, of_new: Tensor) -> None:
    """Inserts ids and removes them again, so that every run inserts the same number."""
    insert_ids(ids, places, slots, slot_of)
    slots.ids.index_fill_(0, slot_of[of_new].long(), EMPTY)


def id_map_cases() -> Iterator[Case]:
    """Yields `insert_ids` together with the removal of the ids that it inserts."""
    slots, slot_of = _map()
    named = torch.randint(_HELD, (_ROWS,), dtype=torch.int32, device="cuda").sort().values
    is_new = torch.arange(_ROWS, device="cuda") % (_ROWS // _NEW) == 0
    ids, shape = torch.where(is_new, 3 * named + 1, 3 * named), f"{_ROWS} ids, {_NEW} new, of {_HELD}"
    ids = ids.unique()
    out = torch.empty_like(ids)
    yield Case("find_ids", shape, 8 * 16 * len(ids) + 8 * WINDOW * _NEW, partial(find_ids, ids, slots, out))
    new = (ids % 3 == 1).nonzero().flatten()
    places = torch.full_like(ids, -1)
    places[new] = torch.arange(_HELD, _HELD + len(new), dtype=torch.int32, device="cuda")
    arguments = (ids, places, slots, slot_of, places[new].long())
    yield Case("insert_ids", shape, 8 * 32 * len(new), partial(_insert_and_take_out, *arguments))


def initial_rows_cases() -> Iterator[Case]:
    numbers = torch.arange(_ROWS, dtype=torch.int32, device="cuda")
    targets = torch.where(numbers % (_ROWS // _NEW) == 0, numbers, -1)
    first = torch.arange(_TABLES, device="cuda") * (_ROWS // _TABLES)
    half = torch.full((_TABLES,), 0.5, device="cuda")
    of_tables = RowsOfTables(first, first * 7, half * 2**-23, half, 0, 2)
    out = torch.empty(_ROWS, _COLUMNS, device="cuda")
    shape = f"{_NEW} of {_ROWS} rows x {_COLUMNS}"
    yield Case("initial_rows", shape, 4 * _NEW * _COLUMNS, partial(initial_rows, out, targets, numbers, of_tables))
