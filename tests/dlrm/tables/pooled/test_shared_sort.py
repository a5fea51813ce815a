"""Which ranks share a sort. What each sorts: test_sort_shares.py. What they sort together: test_static_ebc.py."""

from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.pooled.shared_sort import sorts_are_shared

HALVES = tuple(Shard(rank, table, 32 * rank, 32) for rank in range(2) for table in range(3))


def test_ranks_of_the_same_tables_share_their_sort() -> None:
    assert sorts_are_shared(Plan(world_size=2, shards=HALVES))
    with_another = (*HALVES, Shard(2, 3, 0, 64))
    assert sorts_are_shared(Plan(world_size=3, shards=with_another))
    whole = tuple(Shard(rank, rank, 0, 64) for rank in range(3))
    assert not sorts_are_shared(Plan(world_size=3, shards=whole))
    assert not sorts_are_shared(Plan(world_size=1, shards=(Shard(0, 0, 0, 64),)))
