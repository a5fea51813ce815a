"""Places of ids: against a model that is a dict, with ids that lose theirs, and loaded again."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic import dynamic_rows, id_map
from dlrm_bench.dlrm.tables.dynamic.id_map import IdMap
from dlrm_bench.dlrm.tables.dynamic.memory import RowPlaces
from dlrm_bench.dlrm.tables.row_numbers import RawIds
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.kernels.embedding import place_ids
from dlrm_bench.kernels.embedding.id_map import Keys

CPU = torch.device("cpu")
BATCH = st.lists(st.integers(0, 60), max_size=9)


def in_order(ids: list[int]) -> Tensor:
    """Ids of a batch as a sort gives them, after two unused places."""
    return torch.tensor([-1, -1, *sorted(ids)], dtype=torch.int32)


def placed(of: IdMap, ids: list[int]) -> tuple[dict[int, int], int]:
    """The place of each id, and how many have none."""
    numbers = in_order(ids)
    places = torch.full_like(numbers, 77)
    new, lacking = of.place(Keys(numbers), places)
    assert (places[:2] == -1).all()
    given_ = new[new >= 0].tolist()
    assert len(given_) == len(set(given_))
    return dict(zip(numbers[2:].tolist(), places[2:].tolist(), strict=True)), int(lacking)


class Model:
    """What a map should do: of ids that were not named by the last two batches, those named longest ago go first."""

    def __init__(self, places: int, evicts: bool) -> None:
        self.places, self.evicts = places, evicts
        self.last: dict[int, int] = {}
        self.batch = self.evicted = 0

    def place(self, ids: list[int]) -> int:
        """How many have no place."""
        self.batch += 1
        named, new = set(ids) & self.last.keys(), sorted(set(ids) - self.last.keys())
        self.last |= dict.fromkeys(named, self.batch)
        lacking = max(0, len(new) - (self.places - len(self.last)))
        if self.evicts:
            old = sorted(last for last in self.last.values() if last < self.batch - 1)[:lacking]
            self.oldest_kept = old
            lacking -= len(old)
            self.evicted += len(old)
        self.last |= dict.fromkeys(new[: len(new) - lacking], self.batch)
        return lacking


@pytest.mark.parametrize("evicts", [False, True])
@settings(max_examples=40, deadline=None)
@given(batches=st.lists(BATCH, max_size=14))
def test_is_a_dict(evicts: bool, batches: list[list[int]]) -> None:
    ours, again, model = (
        kind(14, evicts, CPU) if kind is IdMap else Model(14, evicts) for kind in (IdMap, IdMap, Model)
    )
    of_before: dict[int, int] = {}
    for batch in batches:
        for of in (ours, again):
            of.next_batch(None)
        before = dict(model.last)
        places, lacking = placed(ours, batch)
        assert placed(again, batch) == (places, lacking)
        assert lacking == model.place(batch)
        gone = _gone(ours, before)
        if evicts:  # which of equally old ones goes is the map's to say
            assert sorted(before[i] for i in gone) == model.oldest_kept
            for i in gone:
                del model.last[i]
        if lacking:
            assert sum(place < 0 for place in places.values()) == lacking
            return
        assert len(set(places.values())) == len(places)
        assert all(places[i] == of_before[i] for i in places.keys() & of_before.keys() - set(gone))
        assert placed(ours, batch) == (places, 0)  # a batch that is placed again changes nothing
        assert int(ours.evicted) == model.evicted
        of_before = {**{i: p for i, p in of_before.items() if i not in gone}, **places}
        assert ours.describe()["used"] == len(model.last)


def _gone(of: IdMap, ids: dict[int, int]) -> list[int]:
    numbers = torch.tensor([*ids], dtype=torch.int32)
    places = torch.empty_like(numbers)
    of.find(Keys(numbers), places)
    return numbers[places < 0].tolist()


def draws(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(20, generator=generator) ** 2 * 90).int().tolist() for _ in range(count)]


def run(of: IdMap, batches: list[list[int]]) -> list[Any]:
    found = []
    for batch in batches:
        of.next_batch(None)
        found.append(placed(of, batch))
    return found


@pytest.mark.parametrize("ahead", [False, True])
def test_goes_on_from_entries(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """With windows of a part of the places. ahead: the next batch was placed before the save."""
    monkeypatch.setattr(id_map, "_LEAST_WINDOW", 21)
    monkeypatch.setattr(id_map, "_CHUNK", 16)
    ours, other = (IdMap(60, True, CPU) for _ in range(2))
    batches = draws(24)
    run(ours, batches[:12])
    if not ahead:
        other.load(ours.entries())
    expected = run(ours, batches[12:13])
    if ahead:
        other.load(ours.entries())
    other.go_on_after(12)
    assert not ahead or torch.equal(ours.entries().last, other.entries().last), "the batch that was placed ahead is 13"
    expected += run(ours, batches[13:])
    assert run(other, batches[12:]) == expected
    assert int(ours.evicted) > int(other.evicted) > 20
    assert torch.equal(ours.entries().keys.ids, other.entries().keys.ids)
    assert torch.equal(ours.entries().last, other.entries().last)


@pytest.mark.parametrize("again", [[1, 2, 3], [3, 4]])
def test_a_repeated_batch_is_counted_once(again: list[int]) -> None:
    """The last one, or, of two slots in turn, the one before it."""
    ours = IdMap(10, True, CPU)
    run(ours, [[1, 2, 3], [3, 4], [1, 2, 3]])
    before = [tensor.clone() for tensor in ours.memory()]
    ours.next_batch(torch.tensor([0], dtype=torch.int32))
    assert placed(ours, again)[1] == 0
    assert all(torch.equal(*of) for of in zip(before, ours.memory(), strict=True))


def test_batches_of_another_size_count_on_from_theirs() -> None:
    """Of 12 batches, which are 6 of twice the size: what was named last stays so."""
    ours = IdMap(40, True, CPU)
    run(ours, [[i, i + 1] for i in range(12)])
    other = IdMap(13, True, CPU)
    other.load(ours.entries())
    other.go_on_after(5)
    places = run(other, [[30, 31]])[0][0]
    assert sorted(_gone(other, dict.fromkeys(range(13)))) == [0, 1]
    assert len(set(places.values())) == 2


def test_windows_follow_one_another_after_billions_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 million places a window is 625,000: batch 3,436 begins beyond what int32 counts."""
    monkeypatch.setattr(id_map, "_LEAST_WINDOW", 5)
    ours, batch = IdMap(60, True, CPU), (1 << 31) // 5 + 1
    run(ours, [list(range(60))])
    ours.go_on_after(batch - 1)
    assert run(ours, [[100], [101]]) == [({100: batch * 5 % 60}, 0), ({101: (batch + 1) * 5 % 60}, 0)]


@pytest.mark.parametrize("raw_ids", [False, True])
@pytest.mark.parametrize("evicts", [False, True])
def test_placing_asks_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch, evicts: bool, raw_ids: bool) -> None:
    """On a device whose tensors have shapes alone, and no numbers that the host could read."""
    empty = torch.empty(1, dtype=torch.int64, device="meta")
    monkeypatch.setattr(id_map, "find_ids", lambda *_: None)
    monkeypatch.setattr(place_ids, "plain_claim_ids", lambda _keys, _slots, places, _naming: (places,) * 3)
    monkeypatch.setattr(place_ids, "plain_give_places", lambda _keys, claims, *_: (claims.first, empty, empty))
    monkeypatch.setattr(dynamic_rows, "initial_rows", lambda *_, **__: None)
    tables = Tables(names=("a", "b"), rows=(50, 70), columns=16, hot=(1, 1), pooled=False)
    meta = Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2, device=torch.device("meta"))
    monkeypatch.setattr(dynamic_rows, "table_key", lambda *_: 7)  # which it computes once, on the host
    rows = dynamic_rows.DynamicRows.in_parts(tables, meta, 1, RowPlaces(30, evicts))
    places = torch.empty(12, dtype=torch.int32, device="meta")
    keys = Keys(places)
    if raw_ids:
        memory = torch.empty(50, 16, device="meta"), torch.empty(50, 16, device="meta")
        of = replace(tables, raw_ids=True)
        rows = dynamic_rows.DynamicRows(RawIds((1, 0)), of, 1, RowPlaces(30, evicts), memory)
        keys = Keys(places.long(), places)
    for is_new in (None, torch.empty(1, dtype=torch.int32, device="meta")):
        rows.map.next_batch(is_new)
        assert rows.place(keys, places).shape == (1,)
    rows.write_unnamed(keys, places, torch.empty(12, 16, device="meta"), places)
    rows.place_unnamed(keys, places)


def test_ids_of_64_bits_have_places() -> None:
    ours, ids = IdMap(5, False, CPU), torch.tensor([-1, 3, 1 << 33, 1 << 33, 1 << 62])
    places = torch.empty(5, dtype=torch.int32)
    ours.next_batch(None)
    ours.place(Keys(ids), places)
    assert places.tolist() == [-1, 0, 1, 1, 2]


ANY = [-1, 0, 7, 7 + (1 << 32), -(1 << 63), 7 - (1 << 32), (1 << 63) - 1, 12, 13, 14, 15]


@pytest.mark.parametrize("evicts", [False, True])
def test_ids_of_tables_are_placed_as_their_numbers(monkeypatch: pytest.MonkeyPatch, evicts: bool) -> None:
    """As keys of any int64 in two tables, and as their numbers in the same order."""
    monkeypatch.setattr(id_map, "_LEAST_WINDOW", 5)
    every = sorted((table, of) for table in range(2) for of in ANY)
    raw, numbered = IdMap(13, evicts, CPU, with_tables=True), IdMap(13, evicts, CPU)
    generator = torch.Generator().manual_seed(2)
    for _ in range(12):
        numbers = torch.randint(len(every), (6,), generator=generator).sort().values
        tables, ids = torch.tensor([every[number] for number in numbers.tolist()]).unbind(1)
        places, found = torch.empty(2, 2, 6, dtype=torch.int32).unbind()
        for of, keys, at, back in zip(
            (raw, numbered), (Keys(ids.contiguous(), tables.int()), Keys(numbers)), places, found, strict=True
        ):
            of.next_batch(None)
            of.place(keys, at)
            of.find(keys, back)
        assert torch.equal(places[0], places[1])
        assert torch.equal(found, places)
    counts = [{name: of.describe()[name] for name in ("used", "made", "evicted")} for of in (raw, numbered)]
    assert counts[0] == counts[1]
    assert (counts[0]["evicted"] > 10) == evicts
    of_raw, of_numbered = raw.entries(), numbered.entries()
    assert of_raw.keys.tables is not None
    pairs = zip(of_raw.keys.tables.tolist(), of_raw.keys.ids.tolist(), strict=True)
    assert list(pairs) == [every[number] for number in of_numbered.keys.ids.tolist()]
    again = IdMap(13, evicts, CPU, with_tables=True)
    again.load(of_raw)
    for one, two in zip((*again.entries().keys, again.entries().last), (*of_raw.keys, of_raw.last), strict=True):
        assert torch.equal(one, two)  # type: ignore[arg-type]
