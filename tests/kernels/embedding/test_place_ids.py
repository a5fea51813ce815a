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
    name, kernels = "dlrm_bench.kernels.embedding.place_ids", Memory.empty(with_tables, loses)
    plain, lacking, returned = Memory.empty(with_tables, loses), 0, 0
    for number in range(6):
        keys, results = batch(number, with_tables), []
        for memory, claim, give in (
            (kernels, triton_claim_ids, triton_give_places),
            (plain, plain_claim_ids, plain_give_places),
        ):
            for kind in ("plain", "triton"):
                monkeypatch.setattr(f"{name}.{kind}_claim_ids", claim)
                monkeypatch.setattr(f"{name}.{kind}_give_places", give)
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
    for kind in ("plain", "triton"):
        monkeypatch.setattr(f"dlrm_bench.kernels.embedding.place_ids.{kind}_claim_ids", claim)
        monkeypatch.setattr(f"dlrm_bench.kernels.embedding.place_ids.{kind}_give_places", give)
    memory, many = Memory.empty(False, False, places=1), WINDOW + 5
    long = torch.arange(many - 1, -2, -1, dtype=torch.int32, device=DEVICE)
    memory = memory._replace(
        naming=memory.naming._replace(last=torch.zeros(many + 1, dtype=torch.int32, device=DEVICE)),
        stack=Stack(long, torch.full_like(memory.stack.free_count, many), torch.full_like(long, -1), memory.stack.lost),
    )
    assert len(memory.slots.ids) == WINDOW
    keys = Keys(torch.arange(many, device=DEVICE).repeat(2))
    _, places, counts = place(memory, keys)
    assert int(counts.lacking) >= 5
    assert int((counts.fresh >= 0).sum()) == int((memory.naming.last[:-1] == 4).sum()) == WINDOW
    assert torch.equal(places[:many], places[many:])
    assert int((places[:many] < 0).sum()) == 5
    found = torch.empty_like(places)
    find_ids(keys, memory.slots, found)
    assert torch.equal(found, places)
