"""Room for ids: entries of lists, and ids outside their tables."""

import pytest
import torch

from dlrm_bench.dlrm.tables.sequence.capacity import IdCapacity, check_ids
from dlrm_bench.dlrm.tables.tables import Tables

TABLES = Tables(names=("item", "artist", "user"), rows=(9, 3, 4), columns=16, hot=(1, 1, 1))
CAPACITY = IdCapacity((4, 2, 3))


@pytest.mark.parametrize(
    ("places", "distinct", "ranks", "entries"),
    [
        ((450_000, 11_264), 50_000, 2, 31_744),
        ((450_000, 11_264), None, 8, 72_448),
        ((450_000, 11_264), 10**9, 8, 72_448),  # no more than there are places
        ((100, 60), None, 2, 160),  # which holds every batch
    ],
)
def test_lists_have_room_for_what_is_expected_and_a_quarter_more(places, distinct, ranks, entries) -> None:
    capacity = IdCapacity(places, distinct)
    assert capacity.list_entries(ranks) == entries
    assert entries == sum(places) or entries >= 1.25 * min(distinct or sum(places), sum(places)) / ranks + 256


def test_ids_in_their_tables_pass() -> None:
    check_ids(torch.tensor([0, 8, -1, -1, 2, -1, 0, 3, -1], dtype=torch.int32), CAPACITY, TABLES, 0, 1)


@pytest.mark.parametrize(
    ("place", "row", "said"),
    [(3, 9, "id 9 at place 3 of item"), (5, 3, "id 3 at place 1 of artist"), (6, -2, "id -2 at place 0 of user")],
)
def test_an_id_outside_its_table_is_named(place: int, row: int, said: str) -> None:
    ids = torch.full((9,), -1, dtype=torch.int32)
    ids[place] = row
    with pytest.raises(ValueError, match=f"--check-ids: iteration 7, rank 1: {said} is outside its table of"):
        check_ids(ids, CAPACITY, TABLES, 1, 7)
