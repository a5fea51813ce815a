"""Lists of distinct rows: the Triton kernels against their plain twins, and those against Python's sets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_bench.kernels.embedding.distinct_rows import (
    DistinctRows,
    owner_keys,
    plain_distinct_rows,
    plain_owner_keys,
    triton_distinct_rows,
    triton_owner_keys,
)
from tests.kernels.devices import DEVICE, needs_triton


def empty(places: int, owners: int, capacity: int) -> DistinctRows:
    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, 7, dtype=torch.int32, device=DEVICE)

    return DistinctRows(full(owners, capacity), full(places), full(1))


def draw(places: int, most: int, unused: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(most, (places,), generator=generator, dtype=torch.int32)
    return keys.masked_fill_(torch.rand(places, generator=generator) < unused, -1).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("owners", [1, 2, 3, 17])
def test_triton_keys_equal_plain(owners: int) -> None:
    ids, first = draw(2500, 90, 0.3, 1), draw(2500, 60, 0.0, 2)
    got, expected = torch.empty_like(ids), torch.empty_like(ids)
    triton_owner_keys(ids, first, owners, 100, got)
    plain_owner_keys(ids, first, owners, 100, expected)
    assert torch.equal(got, expected)
    assert torch.equal(got < 0, ids < 0)


@needs_triton
@pytest.mark.parametrize("capacity", [3000, 40, 1], ids=["all fit", "some overflow", "overflow"])
@pytest.mark.parametrize(
    ("places", "owners", "rows", "unused"),
    [(2500, 3, 30, 0.3), (2500, 1, 5000, 0.0), (1024, 2, 600, 0.5), (3, 5, 1, 0.0), (2048, 4, 9, 1.0), (1, 2, 1, 0.0)],
)
def test_triton_equals_plain(places: int, owners: int, rows: int, unused: float, capacity: int) -> None:
    ordered, _ = draw(places, owners * rows, unused, places + owners).sort()
    got, expected = (empty(places, owners, capacity) for _ in range(2))
    triton_distinct_rows(ordered, rows, got)
    plain_distinct_rows(ordered, rows, expected)
    for name, mine, plain in zip(DistinctRows._fields, got, expected, strict=True):
        assert torch.equal(mine, plain), name


@pytest.mark.gpu
def test_triton_equals_plain_on_a_batch_of_the_benchmarks_size() -> None:
    ordered, _ = draw(461_000, 293_000_000, 0.3, 1).sort()
    got, expected = (empty(len(ordered), 8, 60_000) for _ in range(2))
    triton_distinct_rows(ordered, 36_700_000, got)
    plain_distinct_rows(ordered, 36_700_000, expected)
    for name, mine, plain in zip(DistinctRows._fields, got, expected, strict=True):
        assert torch.equal(mine, plain), name


@given(st.lists(st.integers(-1, 40), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 20))
@settings(max_examples=50)
def test_every_place_finds_its_row_in_its_owners_list(ids: list[int], owners: int, capacity: int) -> None:
    named = torch.tensor(ids, dtype=torch.int32)
    rows_of_owner = 40 // owners + 1
    keys = torch.empty_like(named)
    owner_keys(named, torch.zeros_like(named), owners, rows_of_owner, keys)
    out = empty(len(ids), owners, capacity)
    ordered, at = keys.sort(stable=True)
    plain_distinct_rows(ordered, rows_of_owner, out)
    lists = [sorted({i // owners for i in ids if i >= 0 and i % owners == owner}) for owner in range(owners)]
    assert int(out.longest) == max(map(len, lists))
    for of_owner, expected in zip(out.rows.tolist(), lists, strict=True):
        kept = expected[:capacity]
        assert of_owner == kept + [-1] * (capacity - len(kept))
    for i, slot in zip((ids[place] for place in at.tolist()), out.slots.tolist(), strict=True):
        if i < 0 or lists[i % owners].index(i // owners) >= capacity:
            assert slot == -1
        else:
            assert slot // capacity == i % owners
            assert int(out.rows.view(-1)[slot]) == i // owners
