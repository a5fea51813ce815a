"""Numbers of rows: each row of each table has one number at its owner, and whole tables follow one another."""

import pytest
import torch

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.row_numbers import RowNumbers
from dlrm_bench.dlrm.tables.tables import Tables

TABLES = Tables(names=("a", "b", "c"), rows=(50, 2, 9), columns=16, hot=(1, 1, 1))


def rows_of(numbers: RowNumbers) -> set[tuple[int, int]]:
    ends = [*numbers.first_rows[1:], numbers.count]
    return {
        (table, numbers.part + i * numbers.parts)
        for table, first, end in zip(numbers.tables, numbers.first_rows, ends, strict=True)
        for i in range(end - first)
        if numbers.part + i * numbers.parts < TABLES.rows[table]
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_are_all_rows_once(world_size: int) -> None:
    device = torch.device("cpu")
    ranks = [Ranks(rank=r, local_rank=r, world_size=world_size, local_world_size=1, device=device) for r in range(3)]
    numbers = [RowNumbers.of_parts(TABLES, of) for of in ranks[:world_size]]
    found = [row for of in numbers for row in rows_of(of)]
    assert len(found) == len(set(found)) == sum(TABLES.rows)
    assert len({(of.first_rows, of.count) for of in numbers}) == 1, "one number whoever owns a row"


def test_whole_tables_follow_one_another() -> None:
    numbers = RowNumbers.of_whole(TABLES, [2, 0])
    assert (numbers.tables, numbers.first_rows, numbers.count) == ((2, 0), (0, 9), 59)
    assert numbers.first(3).tolist() == [0, 1, 2, 9, 10, 11]
    assert numbers.first(20).tolist() == [*range(29)]
    assert rows_of(numbers) == {(2, row) for row in range(9)} | {(0, row) for row in range(50)}
