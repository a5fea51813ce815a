"""Places of ids: against a model that is a dict, with ids that lose theirs, and loaded again."""

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
from dlrm_bench.dlrm.tables.tables import Tables

CPU = torch.device("cpu")
BATCH = st.lists(st.integers(0, 60), max_size=9)


def in_order(ids: list[int]) -> Tensor:
    """Ids of a batch as a sort gives them, after two unused places."""
    return torch.tensor([-1, -1, *sorted(ids)], dtype=torch.int32)


def placed(of: IdMap, ids: list[int]) -> tuple[dict[int, int], int]:
    """The place of each id, and how many have none."""
    numbers = in_order(ids)
    places = torch.full_like(numbers, 77)
    new, lacking = of.place(numbers, places)
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
    of.find(numbers, places)
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
    expected += run(ours, batches[13:])
    assert run(other, batches[12:]) == expected
    assert int(ours.evicted) > int(other.evicted) > 20
    for one, two in zip(ours.entries(), other.entries(), strict=True):
        assert torch.equal(one, two)


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


@pytest.mark.parametrize("evicts", [False, True])
def test_placing_asks_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch, evicts: bool) -> None:
    """On a device whose tensors have shapes alone, and no numbers that the host could read."""
    for name in ("find_ids", "insert_ids"):
        monkeypatch.setattr(id_map, name, lambda *_: None)
    monkeypatch.setattr(dynamic_rows, "initial_rows", lambda *_: None)
    tables = Tables(names=("a", "b"), rows=(50, 70), columns=16, hot=(1, 1), pooled=False)
    meta = Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2, device=torch.device("meta"))
    monkeypatch.setattr(dynamic_rows, "table_key", lambda *_: 7)  # which it computes once, on the host
    rows = dynamic_rows.DynamicRows.in_parts(tables, meta, 1, RowPlaces(30, evicts))
    ids = torch.empty(12, dtype=torch.int32, device="meta")
    places = torch.empty_like(ids)
    for is_new in (None, torch.empty(1, dtype=torch.int32, device="meta")):
        rows.map.next_batch(is_new)
        assert rows.place(ids, places).shape == (1,)
    rows.write_unnamed(ids, places, torch.empty(12, 16, device="meta"), places)
    rows.place_unnamed(ids, places)


def test_ids_of_64_bits_have_places() -> None:
    ours, ids = IdMap(5, False, CPU), torch.tensor([-1, 3, 1 << 33, 1 << 33, 1 << 62])
    places = torch.empty(5, dtype=torch.int32)
    ours.next_batch(None)
    ours.place(ids, places)
    assert places.tolist() == [-1, 0, 1, 1, 2]
