"""Benchmark cases for rows that are created when first looked up, as by 1,024 samples of DLRMv4 on one of two ranks:
lists of 64,000 sorted rows from two ranks, an eighth of them new, in a map of a million ids, and in one of as many ids
of eleven tables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dlrm_bench.kernels.benchmark.timing import Case
from dlrm_bench.kernels.embedding.id_map import EMPTY, NEAR, WINDOW, IdSlots, Keys, empty_slots, find_ids, insert_ids
from dlrm_bench.kernels.embedding.initial_rows import RowsOfTables, initial_rows
from dlrm_bench.kernels.embedding.place_ids import Naming, Stack, claim_ids, give_places

_HELD, _ROWS, _NEW, _COLUMNS, _TABLES = 1_000_000, 64_000, 8_000, 512, 11


def _keys(ids: Tensor, with_tables: bool) -> Keys:
    """Returns the keys of ids, in turn of all tables."""
    return Keys(ids, (ids % _TABLES).int() if with_tables else None)


def _map(with_tables: bool) -> tuple[IdSlots, Tensor]:
    """Returns a map that holds every third id, and the slot of each place."""
    slots = empty_slots(_HELD, torch.device("cuda"), with_tables)
    slot_of = torch.empty(2 * _HELD, dtype=torch.int32, device="cuda")
    places = torch.arange(_HELD, dtype=torch.int32, device="cuda")
    insert_ids(_keys(3 * places, with_tables), places, slots, slot_of)
    return slots, slot_of


def _insert_and_take_out(keys: Keys, places: Tensor, slots: IdSlots, slot_of: Tensor, of_new: Tensor) -> None:
    """Inserts keys and removes them again, so that every run inserts the same number."""
    insert_ids(keys, places, slots, slot_of)
    slots.places.index_fill_(0, slot_of[of_new].long(), EMPTY)


def _batch(with_tables: bool) -> tuple[Tensor, Tensor, str]:
    """Returns distinct ids in order, of which those that leave a rest of 1 by 3 are new; the indices of the new ones;
    and the shape's name."""
    named = torch.randint(_HELD, (_ROWS,), dtype=torch.int32, device="cuda").sort().values
    is_new = torch.arange(_ROWS, device="cuda") % (_ROWS // _NEW) == 0
    ids = torch.where(is_new, 3 * named + 1, 3 * named).unique()
    shape = f"{_ROWS} {'ids of tables' if with_tables else 'ids'}, {_NEW} new, of {_HELD}"
    return ids.long() if with_tables else ids, (ids % 3 == 1).nonzero().flatten(), shape


def id_map_cases() -> Iterator[Case]:
    """Yields `find_ids`, and `insert_ids` together with the removal of the keys that it inserts. Bytes of a key that is
    found: of the slots that its search reads first."""
    for with_tables in (False, True):
        slots, slot_of = _map(with_tables)
        ids, new, shape = _batch(with_tables)
        keys, key = _keys(ids, with_tables), 12 if with_tables else 8
        out = torch.empty_like(ids, dtype=torch.int32)
        nbytes = key * (NEAR * len(ids) + WINDOW * _NEW)
        yield Case("find_ids", shape, nbytes, partial(find_ids, keys, slots, out))
        places = torch.full_like(out, -1)
        places[new] = torch.arange(_HELD, _HELD + len(new), dtype=torch.int32, device="cuda")
        arguments = (keys, places, slots, slot_of, places[new].long())
        yield Case("insert_ids", shape, key * 32 * len(new), partial(_insert_and_take_out, *arguments))


def place_ids_cases() -> Iterator[Case]:
    """Yields `claim_ids` and `give_places`, each for keys that it has served before: the work is the same."""
    for with_tables in (False, True):
        slots, slot_of = _map(with_tables)
        ids, new, shape = _batch(with_tables)
        keys, key = _keys(ids, with_tables), 12 if with_tables else 8
        one = torch.ones(1, dtype=torch.int32, device="cuda")
        free = torch.arange(_HELD, 2 * _HELD, dtype=torch.int32, device="cuda")
        stack = Stack(free, one.long() * _HELD, slot_of, torch.zeros(0, dtype=torch.bool, device="cuda"))
        naming = Naming(torch.zeros(2 * _HELD + 1, dtype=torch.int32, device="cuda"), one, one)
        places = torch.empty_like(ids, dtype=torch.int32)
        nbytes = key * (NEAR * len(ids) + WINDOW * _NEW) + 20 * len(ids)
        yield Case("claim_ids", shape, nbytes, partial(claim_ids, keys, slots, places, naming))
        claims = claim_ids(keys, slots, places, naming)
        nbytes = 12 * len(ids) + (32 + key) * len(new)
        yield Case("give_places", shape, nbytes, partial(give_places, keys, claims, places, slots, stack, naming))


def initial_rows_cases() -> Iterator[Case]:
    numbers = torch.arange(_ROWS, dtype=torch.int32, device="cuda")
    targets = torch.where(numbers % (_ROWS // _NEW) == 0, numbers, -1)
    first = torch.arange(_TABLES, device="cuda") * (_ROWS // _TABLES)
    half = torch.full((_TABLES,), 0.5, device="cuda")
    of_tables = RowsOfTables(first, first * 7, half * 2**-23, half, 0, 2)
    out = torch.empty(_ROWS, _COLUMNS, device="cuda")
    for name, keys in {"rows": Keys(numbers), "raw ids": _keys(numbers.long() << 33, with_tables=True)}.items():
        shape = f"{_NEW} of {_ROWS} {name} x {_COLUMNS}"
        yield Case("initial_rows", shape, 4 * _NEW * _COLUMNS, partial(initial_rows, out, targets, keys, of_tables))
