"""Places for new keys: the kernels against their plain twins, on maps that fill up."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dlrm_bench.kernels.embedding.id_map import WINDOW, IdSlots, Keys, empty_slots, find_ids
from dlrm_bench.kernels.embedding.place_ids import (
    Counts,
    Naming,
    Stack,
    claim_ids,
    give_places,
    plain_claim_ids,
    plain_give_places,
    triton_claim_ids,
    triton_give_places,
)
from tests.kernels.devices import DEVICE, needs_triton

PLACES = 300


class Memory(NamedTuple):
    slots: IdSlots
    naming: Naming
    stack: Stack

    @classmethod
    def empty(cls, with_tables: bool, loses: bool, places: int = PLACES) -> "Memory":
        slots = empty_slots(places, DEVICE, with_tables)
        one = torch.ones(1, dtype=torch.int32, device=DEVICE)
        naming = Naming(torch.zeros(places + 1, dtype=torch.int32, device=DEVICE), 4 * one, one.clone())
        free = torch.arange(places - 1, -2, -1, dtype=torch.int32, device=DEVICE)
        lost = torch.arange(len(slots.ids) if loses else 0, device=DEVICE) % 3 == 0
        return cls(slots, naming, Stack(free, one.long() * places, torch.full_like(free, -1), lost))


def batch(seed: int, with_tables: bool, count: int = 200) -> Keys:
    """Keys that repeat; without tables some are none."""
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randint(3, (count,), generator=generator, dtype=torch.int32)
    ids = torch.randint(-2, 90, (count,), generator=generator)
    if not with_tables:
        ids = torch.where(ids < 0, -1, ids + tables * 100)
    return Keys(ids.to(DEVICE), tables.to(DEVICE) if with_tables else None)


def one_window(places: int) -> Memory:
    """An empty map that is one window, with this number of places."""
    memory = Memory.empty(False, False, places=1)
    assert len(memory.slots.ids) == WINDOW
    roomy = Memory.empty(False, False, places)
    return memory._replace(naming=roomy.naming, stack=roomy.stack)


def use(monkeypatch: pytest.MonkeyPatch, claim: object, give: object) -> None:
    """Has these functions run, whatever the device."""
    for kind in ("plain", "triton"):
        monkeypatch.setattr(f"dlrm_bench.kernels.embedding.place_ids.{kind}_claim_ids", claim)
        monkeypatch.setattr(f"dlrm_bench.kernels.embedding.place_ids.{kind}_give_places", give)


def numbers(keys: Keys) -> list[int]:
    return keys.numbers.tolist()


def place(memory: Memory, keys: Keys) -> tuple[Tensor, Tensor, Counts]:
    """The cumulative sum, the places, and what `give_places` returns."""
    places = torch.full((len(keys.ids),), 77, dtype=torch.int32, device=DEVICE)
    claims = claim_ids(keys, memory.slots, places, memory.naming)
    counts = give_places(keys, claims, places, memory.slots, memory.stack, memory.naming)
    memory.stack.free_count.sub_(counts.given)
    return claims.nth, places, counts


@needs_triton
@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("with_tables", [False, True])
def test_kernels_do_what_plain_functions_do(monkeypatch: pytest.MonkeyPatch, with_tables: bool, loses: bool) -> None:
    """Over batches of which the third finds too few places, and the fifth is a batch that was placed before."""
    kernels, plain = Memory.empty(with_tables, loses), Memory.empty(with_tables, loses)
    lacking, returned = 0, 0
    for number in range(6):
        keys, results = batch(number, with_tables), []
        for memory, claim, give in (
            (kernels, triton_claim_ids, triton_give_places),
            (plain, plain_claim_ids, plain_give_places),
        ):
            use(monkeypatch, claim, give)
            memory.naming.batch.add_(1)
            memory.naming.is_new.fill_(number != 4)
            if number == 2:
                memory.stack.free_count.clamp_(max=20)
            nth, places, counts = place(memory, keys)
            found = torch.empty_like(places)
            find_ids(keys, memory.slots, found)
            assert torch.equal(found, places), "every place is found, and no other"
            named = memory.naming.last[:-1]
            results.append((nth, places, *counts, named.clone(), memory.stack.free_count.clone()))
        for one, two in zip(*results, strict=True):
            assert torch.equal(one, two)
        counts = Counts(*results[0][2:6])
        fresh = counts.fresh[counts.fresh >= 0]
        assert len(fresh.unique()) == len(fresh) == int(counts.given)
        first = {key: n for n, key in reversed(list(enumerate(numbers(keys))))}
        assert all(int(counts.fresh[n]) < 0 or first[key] == n for n, key in enumerate(numbers(keys)))
        lacking, returned = lacking + int(counts.lacking), returned + int(counts.returned)
    assert lacking > 0
    assert (returned > 0) == loses


@needs_triton
@pytest.mark.parametrize(
    ("claim", "give"), [(plain_claim_ids, plain_give_places), (triton_claim_ids, triton_give_places)]
)
def test_keys_of_full_windows_are_counted(monkeypatch: pytest.MonkeyPatch, claim: object, give: object) -> None:
    """Of a map that is one window, with more places than slots; each key twice."""
    use(monkeypatch, claim, give)
    memory, many = one_window(WINDOW + 5), WINDOW + 5
    keys = Keys(torch.arange(many, device=DEVICE).repeat(2))
    _, places, counts = place(memory, keys)
    assert int(counts.lacking) >= 5
    assert int((counts.fresh >= 0).sum()) == int((memory.naming.last[:-1] == 4).sum()) == WINDOW
    assert torch.equal(places[:many], places[many:])
    assert int((places[:many] < 0).sum()) == 5
    found = torch.empty_like(places)
    find_ids(keys, memory.slots, found)
    assert torch.equal(found, places)


@needs_triton
@pytest.mark.parametrize("new", [(), (200,), (200, 3, 700)])
@pytest.mark.parametrize("with_tables", [False, True])
def test_few_new_keys_among_many_known_ones(
    monkeypatch: pytest.MonkeyPatch, with_tables: bool, new: tuple[int, ...]
) -> None:
    """Which repeat at the end, far behind their first occurrences."""
    known, results = batch(1, with_tables, 900), []
    which = torch.arange(900, device=DEVICE)
    for i, n in enumerate(new):
        which[[n, 890 + i]] = 900 + n
    ids = torch.cat([known.ids, which.new_tensor(range(1000, 1900))])
    tables = None if known.tables is None else torch.cat([known.tables, known.tables])
    keys = Keys(ids, tables).some(which)
    for claim, give in ((triton_claim_ids, triton_give_places), (plain_claim_ids, plain_give_places)):
        use(monkeypatch, claim, give)
        memory = Memory.empty(with_tables, True)
        place(memory, known)
        memory.naming.batch.add_(1)
        nth, places, counts = place(memory, keys)
        found = torch.empty_like(places)
        find_ids(keys, memory.slots, found)
        assert torch.equal(found, places)
        results.append((nth, places, *counts, memory.naming.last[:-1].clone()))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    assert (results[0][2] >= 0).nonzero().flatten().tolist() == sorted(new)


@needs_triton
@pytest.mark.parametrize(
    ("claim", "give"), [(plain_claim_ids, plain_give_places), (triton_claim_ids, triton_give_places)]
)
def test_a_key_of_a_full_window_is_counted_where_all_others_are_known(
    monkeypatch: pytest.MonkeyPatch, claim: object, give: object
) -> None:
    use(monkeypatch, claim, give)
    memory = one_window(WINDOW + 5)
    place(memory, Keys(torch.arange(WINDOW, device=DEVICE)))
    ids = torch.arange(WINDOW, device=DEVICE).repeat(4)
    ids[300] = WINDOW
    _, places, counts = place(memory, Keys(ids))
    assert int(counts.lacking) == 1
    assert (counts.fresh == -1).all()
    assert (places < 0).nonzero().flatten().tolist() == [300]
