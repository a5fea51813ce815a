"""Which ranks share a sort, and what each of them sorts. What they sort together: test_static_ebc.py."""

import torch

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.pooled.shared_sort import _share_out, sorts_are_shared

SHAPE = BatchShape(samples=8, dtype=torch.float32)
HALVES = tuple(Shard(rank, table, 32 * rank, 32) for rank in range(2) for table in range(3))


def test_ranks_of_the_same_tables_share_their_sort() -> None:
    assert sorts_are_shared(Plan(world_size=2, shards=HALVES), SHAPE)
    with_another = (*HALVES, Shard(2, 3, 0, 64))
    assert sorts_are_shared(Plan(world_size=3, shards=with_another), SHAPE)
    whole = tuple(Shard(rank, rank, 0, 64) for rank in range(3))
    assert not sorts_are_shared(Plan(world_size=3, shards=whole), SHAPE)
    assert not sorts_are_shared(Plan(world_size=1, shards=(Shard(0, 0, 0, 64),)), SHAPE)


def test_the_number_of_padding_ids_is_not_known() -> None:
    padded = BatchShape(samples=8, dtype=torch.float32, padded=True)
    assert not sorts_are_shared(Plan(world_size=2, shards=HALVES), padded)


def test_each_table_is_sorted_by_one_rank_and_the_ranks_have_about_as_many_ids() -> None:
    hot = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
    for ranks in (1, 2, 3, 4, 30):
        shares = _share_out(hot, ranks)
        assert sorted(place for places in shares for place in places) == list(range(len(hot)))
        assert all(places == sorted(places) for places in shares)
        assert max(sum(hot[place] for place in places) for places in shares) <= max(100, sum(hot) / ranks + 7)
    assert [sum(hot[place] for place in places) for places in _share_out(hot, 2)] == [107, 107]
