"""What each rank sorts of a shared sort, and what that saves."""

from collections.abc import Sequence

import pytest

from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.runtime.gpu_types import DEFAULT_COSTS
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.costs import table_times
from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.plan.sort_shares import SavedBySharing, Share, divide, sort_sharers

HOT = MLPERF_MODEL.tables.hot


def of(places: Sequence[int], hot: Sequence[int] = HOT) -> int:
    return sum(hot[place] for place in places)


def test_ranks_of_one_node_with_the_same_tables_share_their_sort() -> None:
    halves = [Shard(rank, table, 64 * rank, 64) for rank in range(2) for table in range(2)]
    by_rank = [halves[:2], halves[2:], [Shard(2, 2, 0, 128)]]
    assert sort_sharers(by_rank, Topology.one_node(3)) == [2, 2, 1]
    assert sort_sharers(by_rank, Topology.one_node(3), in_tiers=True) == [1] * 3
    assert sort_sharers([*by_rank, []], Topology.of(4, 2)) == [1] * 4
    parts = [[Shard(rank, 0, 0, 128, rank, 2)] for rank in range(2)]
    assert sort_sharers(parts, Topology.one_node(2)) == [1, 1]


def test_every_table_is_sorted_by_one_rank_for_all_or_by_every_rank() -> None:
    for ranks in (1, 2, 3, 4, 30):
        shares = divide(HOT, ranks)
        assert all(share.for_itself == shares[0].for_itself for share in shares)
        places = [place for share in shares for place in share.for_all] + shares[0].for_itself
        assert sorted(places) == list(range(len(HOT)))
        assert all(part == sorted(part) for share in shares for part in share)


def test_two_ranks_sort_as_many_ids_each() -> None:
    assert [of(share.for_all) for share in divide(HOT, 2)] == [107, 107]
    assert divide(HOT, 2)[0].for_itself == []


@pytest.mark.parametrize(("ranks", "too_large", "most"), [(4, [20], 29), (8, [20, 21], 12)])
def test_every_rank_sorts_what_is_too_large_for_one_and_they_share_the_others(ranks, too_large, most):
    """Tables of 100 and 27 ids a sample: four ranks then sort 128 or 129 of 214 each, not one 100 and three 38."""
    shares = divide(HOT, ranks)
    assert [share.for_itself for share in shares] == [too_large] * ranks
    assert max(of(share.for_all) for share in shares) == most


def test_no_rank_sends_where_sorting_alone_is_faster() -> None:
    assert divide((100, 1), 4)[0] == Share([], [0, 1])
    assert divide((50,), 2) == [Share([], [0])] * 2


@pytest.mark.parametrize(("ranks", "for_all", "for_itself"), [(2, 107, 0), (4, 29, 100), (8, 12, 127)])
def test_what_sharing_saves_is_that_of_the_ids_sorted_and_sent(ranks, for_all, for_itself):
    tables, samples, columns = MLPERF_MODEL.tables, 512 * ranks, 128 // ranks
    by_rank = [[Shard(rank, table, columns * rank, columns) for table in range(26)] for rank in range(ranks)]
    saved = SavedBySharing(tables, samples, DEFAULT_COSTS).us(by_rank, Topology.one_node(ranks))
    spared = (214 - for_all - for_itself) * DEFAULT_COSTS.sort_us_per_million_ids / 1e6
    moved = 8 * for_all * (ranks - 1) / DEFAULT_COSTS.all_to_all_bytes_per_us
    assert min(saved) == pytest.approx(samples * (spared - moved))
    assert min(saved) > 0
    times = [table_times(own, tables, samples, saved_us=us) for own, us in zip(by_rank, saved, strict=True)]
    assert max(each.sort for each in times) < table_times(by_rank[0], tables, samples).sort


def test_ranks_that_sort_alone_save_nothing():
    tables, halves = MLPERF_MODEL.tables, [[Shard(rank, 20, 64 * rank, 64)] for rank in range(2)]
    for by_rank, topology in (
        ([[Shard(0, 20, 0, 128)], [Shard(1, 21, 0, 128)]], Topology.one_node(2)),
        (halves, Topology.of(2, 1)),
    ):
        assert SavedBySharing(tables, 1024, DEFAULT_COSTS).us(by_rank, topology) == [0.0, 0.0]
