"""The map from keys to places: kernels against their plain twins, and both against a dict."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlrm_bench.kernels.embedding._split_mix import GOLDEN, mix
from dlrm_bench.kernels.embedding.id_map import (
    EMPTY,
    WINDOW,
    IdSlots,
    Keys,
    empty_slots,
    find_ids,
    insert_ids,
    plain_find_ids,
    plain_insert_ids,
    triton_find_ids,
    triton_insert_ids,
)
from tests.kernels.devices import DEVICE, needs_triton

KERNELS = [(plain_find_ids, plain_insert_ids), (triton_find_ids, triton_insert_ids)]


def found(keys: Tensor | Keys, slots: IdSlots, find: Callable[..., None] = find_ids) -> Tensor:
    of = keys if isinstance(keys, Keys) else Keys(keys)
    places = torch.full((len(of.ids),), 77, dtype=torch.int32, device=DEVICE)
    find(of, slots, places)
    return places


@needs_triton
@pytest.mark.parametrize(("find", "insert"), KERNELS)
@pytest.mark.parametrize("count", [0, 1, 40])
def test_finds_what_was_inserted_and_nothing_else(
    find: Callable[..., None], insert: Callable[..., None], count: int
) -> None:
    ids = torch.randperm(1000, device=DEVICE)[: 2 * count] + (1 << 40)
    places = torch.arange(2 * count, dtype=torch.int32, device=DEVICE)
    given_, slot_of = torch.where(places % 2 == 0, places, -1), torch.full((2 * count,), -1, dtype=torch.int32)
    slots, slot_of = empty_slots(300, DEVICE), slot_of.to(DEVICE)
    insert(Keys(ids), given_.clone(), slots, slot_of)
    assert torch.equal(found(ids, slots, find), given_)
    assert torch.equal(found(torch.cat([ids, ids - 2000]), slots, find)[len(ids) :], torch.full_like(given_, -1))
    assert torch.equal(slots.ids[slot_of[::2].long()], ids[::2])
    assert (slot_of[1::2] == -1).all()
    assert int((slots.places != EMPTY).sum()) == count


@needs_triton
@pytest.mark.parametrize(("find", "insert"), KERNELS)
def test_full_windows_say_so(find: Callable[..., None], insert: Callable[..., None]) -> None:
    """Of one window's slots, all of the map."""
    slots = empty_slots(1, DEVICE)
    assert len(slots.ids) == WINDOW
    count = WINDOW + 5
    ids, places = (torch.arange(count, device=DEVICE).to(kind) for kind in (torch.int64, torch.int32))
    slot_of = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)
    insert(Keys(ids), places, slots, slot_of)
    assert int((places == -1).sum()) == int((slot_of == -1).sum()) == 5
    assert torch.equal(found(ids, slots, find), places)
    assert int((found(ids - count, slots, find) >= 0).sum()) == 0


@needs_triton
@pytest.mark.parametrize("find", [plain_find_ids, triton_find_ids])
@pytest.mark.parametrize("with_tables", [False, True])
def test_finds_keys_in_any_slot_of_their_window_and_in_no_other(find: Callable[..., None], with_tables: bool) -> None:
    """Some in the first slots only, and three in each slot from two before the window to many behind it. The window's
    first slot has the id of each other one: of another table, or left behind."""
    offsets = torch.cat([torch.arange(150) % 4, torch.arange(-2, WINDOW + 40).repeat_interleave(3)]).to(DEVICE)
    places = torch.arange(len(offsets), dtype=torch.int32, device=DEVICE)
    keys = Keys(places.long() * 7003 + (1 << 40), places % 5 if with_tables else None)
    slots = empty_slots(1 << 19, DEVICE, with_tables)
    start = mix(keys.numbers * GOLDEN) & (len(slots.ids) - 1)
    at = (start + offsets) % len(slots.ids)
    assert len(torch.cat([at, start[offsets != 0]]).unique()) == len(at) + int((offsets != 0).sum())
    slots.ids[start] = slots.ids[at] = keys.ids
    if keys.tables is not None and slots.tables is not None:
        slots.places[start], slots.tables[start], slots.tables[at] = 1 << 20, keys.tables + 1, keys.tables
    slots.places[at] = places
    expected = torch.where((offsets >= 0) & (offsets < WINDOW), places, -1)
    assert torch.equal(found(keys, slots, find), expected)
    order = torch.randperm(len(offsets), device=DEVICE)
    assert torch.equal(found(keys.some(order), slots, find), expected[order])


STEPS = st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 400), max_size=60)), max_size=12)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_is_a_dict(steps: list[tuple[bool, set[int]]]) -> None:
    """Of ids that are inserted and taken out in turn; 401 ids in slots for 401."""
    act_as_a_dict(steps, 400, find_ids, insert_ids)


@needs_triton
def test_triton_is_a_dict() -> None:
    steps = [(True, {1, 2, 9}), (False, {2, 3}), (True, {2, 4}), (False, {1, 9}), (True, {9})]
    act_as_a_dict(steps, 10, triton_find_ids, triton_insert_ids)


def act_as_a_dict(
    steps: list[tuple[bool, set[int]]], most: int, find: Callable[..., None], insert: Callable[..., None]
) -> None:
    slots, known, free = empty_slots(most + 1, DEVICE), dict[int, int](), list(range(most + 1))
    slot_of = torch.full((most + 1,), -1, dtype=torch.int32, device=DEVICE)
    for adds, chosen in steps:
        changed = [i for i in sorted(chosen) if (i in known) != adds]
        if adds:
            known |= {i: free.pop() for i in changed}
            ids = torch.tensor(changed, dtype=torch.int32, device=DEVICE)
            places = torch.tensor([known[i] for i in changed], dtype=torch.int32, device=DEVICE)
            insert(Keys(ids), places, slots, slot_of)
        elif changed:
            places = torch.tensor([known.pop(i) for i in changed], device=DEVICE)
            free += places.tolist()
            slots.places[slot_of[places].long()] = EMPTY
        asked = torch.arange(-3, most + 3, dtype=torch.int32, device=DEVICE)
        assert found(asked, slots, find).tolist() == [known.get(i, -1) for i in asked.tolist()]


def test_the_longest_way_of_a_half_full_map_is_within_the_window() -> None:
    """Of a million ids."""
    slots = empty_slots(1 << 20, torch.device("cpu"))
    ids = torch.arange(1 << 20) * 3
    places, slot_of = torch.arange(1 << 20, dtype=torch.int32), torch.empty(1 << 20, dtype=torch.int32)
    insert_ids(Keys(ids), places, slots, slot_of)
    assert int(places.min()) == 0


# Keys of several tables, whose ids are any int64

IDS = [0, -1, 1, -(1 << 63), (1 << 63) - 1, 5, 5 + (1 << 32), 5 + (1 << 63) - (1 << 64), -6, -6 - (1 << 44)]
"""Among them the ends of int64, and ids that differ in their upper words only."""


def of_tables(tables: int) -> Keys:
    """Each id in each table."""
    ids = torch.tensor(IDS, device=DEVICE).repeat(tables)
    return Keys(ids, torch.arange(tables, dtype=torch.int32, device=DEVICE).repeat_interleave(len(IDS)))


@needs_triton
@pytest.mark.parametrize(("find", "insert"), KERNELS)
def test_any_int64_of_any_table_has_its_own_place(find: Callable[..., None], insert: Callable[..., None]) -> None:
    keys = of_tables(5)
    count = len(keys.ids)
    places = torch.arange(count, dtype=torch.int32, device=DEVICE).flip(0)
    given_ = torch.where(places % 3 > 0, places, -1)
    slots, slot_of = empty_slots(count, DEVICE, with_tables=True), torch.full_like(places, -1)
    assert (found(keys, slots, find) == -1).all(), "an empty map lacks all of them"
    insert(keys, given_.clone(), slots, slot_of)
    assert torch.equal(found(keys, slots, find), given_)
    gone = given_ % 3 == 1
    slots.places[slot_of[given_[gone].long()].long()] = EMPTY
    assert torch.equal(found(keys, slots, find), torch.where(gone, -1, given_))
    again = torch.where(gone, given_, -1)
    insert(keys, again.clone(), slots, slot_of)
    assert torch.equal(found(keys, slots, find), given_)
    assert slots.tables is not None
    held = (slots.places != EMPTY).nonzero().flatten()
    content = zip(slots.ids[held].tolist(), slots.tables[held].tolist(), slots.places[held].tolist(), strict=True)
    assert keys.tables is not None
    expected = zip(keys.ids.tolist(), keys.tables.tolist(), given_.tolist(), strict=True)
    assert sorted(content) == sorted(of for of in expected if of[2] >= 0)


def test_equal_ids_of_many_tables_do_not_crowd() -> None:
    """A million keys, of the first ids of 26 tables."""
    ids = torch.arange(1 << 20) // 26
    tables = (torch.arange(1 << 20) % 26).int()
    slots = empty_slots(1 << 20, torch.device("cpu"), with_tables=True)
    places, slot_of = torch.arange(1 << 20, dtype=torch.int32), torch.empty(1 << 20, dtype=torch.int32)
    insert_ids(Keys(ids, tables), places, slots, slot_of)
    assert int(places.min()) == 0
