"""Plans: nothing lost, nothing twice, one width a rank."""

import pytest

from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.tables import Tables


def model_of(rows: list[int], hot: list[int], dim: int = 32) -> Tables:
    names = tuple(f"cat_{table}" for table in range(len(rows)))
    return Tables(names=names, rows=tuple(rows), columns=dim, hot=tuple(hot))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(0, 0, 0, 32)], r"rank 1 holds shards of widths \[\]"),
        ([(0, 0, 0, 32), (0, 1, 0, 16), (1, 1, 16, 16)], r"rank 0 holds shards of widths \[16, 32\]"),
        ([(0, 0, 0, 32), (1, 1, 16, 16)], "table 1 has a gap or an overlap at column 0"),
        ([(0, 0, 0, 16), (0, 0, 0, 16), (1, 1, 0, 32)], "table 0 has a gap or an overlap in the rows of column 0"),
        ([(0, 0, 0, 32), (1, 1, 0, 16)], "table 1 has 16 of 32 columns"),
        ([(0, 0, 0, 32), (1, 0, 0, 32)], "table 0 has a gap or an overlap in the rows of column 0"),
        ([(0, 0, 0, 32, 0, 2), (1, 1, 0, 32)], "table 0 has a gap or an overlap in the rows of column 0"),
        ([(0, 0, 0, 32, 0, 2), (0, 0, 0, 32, 1, 3), (1, 1, 0, 32)], "an overlap in the rows of column 0"),
    ],
)
def test_bad_plans_are_refused(shards, message):
    with pytest.raises(ValueError, match=message):
        Plan(world_size=2, shards=tuple(Shard(*s) for s in shards)).check(model_of([100, 100], [1, 1]))


def test_a_rank_has_as_many_rows_as_int32_can_number() -> None:
    one, two = (Plan(1, (Shard(0, 0, 0, 32), Shard(0, 1, 0, 32))), Plan(2, (Shard(0, 0, 0, 32), Shard(1, 1, 0, 32))))
    half = 2**30
    one.check(model_of([half, half - 1], [1, 1]))
    two.check(model_of([half, half], [1, 1]))
    with pytest.raises(
        ValueError,
        match=r"rank 0 holds shards of 2147483648 rows in all, which must stay below 2\^31: use more GPUs or",
    ):
        one.check(model_of([half, half], [1, 1]))
