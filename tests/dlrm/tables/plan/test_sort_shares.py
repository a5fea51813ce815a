"""What each rank sorts of a shared sort, and what that saves."""

import pytest

from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.runtime.gpu_types import DEFAULT_COSTS
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.costs import table_times
from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.plan.sort_shares import saved_by_sharing_us, share_out


def test_each_table_is_sorted_by_one_rank_and_the_ranks_have_about_as_many_ids() -> None:
    hot = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
    for ranks in (1, 2, 3, 4, 30):
        shares = share_out(hot, ranks)
        assert sorted(place for places in shares for place in places) == list(range(len(hot)))
        assert all(places == sorted(places) for places in shares)
        assert max(sum(hot[place] for place in places) for places in shares) <= max(100, sum(hot) / ranks + 7)
    assert [sum(hot[place] for place in places) for places in share_out(hot, 2)] == [107, 107]


@pytest.mark.parametrize(("ranks", "most", "rest"), [(2, 107, 107), (4, 100, 38), (8, 100, 16)])
def test_the_rank_of_the_largest_table_saves_least(ranks, most, rest):
    """By the ids a sample that it sorts, and the bytes that it sends: at four ranks, nothing."""
    tables, samples, columns = MLPERF_MODEL.tables, 512 * ranks, 128 // ranks
    by_rank = [[Shard(rank, table, columns * rank, columns) for table in range(26)] for rank in range(ranks)]
    saved = saved_by_sharing_us(by_rank, Topology.one_node(ranks), tables, samples, DEFAULT_COSTS)

    def us(sorted_ids: int, moved: int) -> float:
        spared = (214 - sorted_ids) * DEFAULT_COSTS.sort_us_per_million_ids / 1e6
        return samples * (spared - 8 * moved / DEFAULT_COSTS.all_to_all_bytes_per_us)

    assert min(saved) == pytest.approx(us(most, most * (ranks - 1)))
    assert max(saved) == pytest.approx(us(rest, max(rest * (ranks - 1), 214 - rest)), abs=0.3)
    assert (min(saved) > 0) == (ranks == 2)
    if ranks == 2:
        alone, shared = (table_times(by_rank[0], tables, samples, sharers=sharers).sort for sharers in (1, ranks))
        assert saved == pytest.approx([alone - shared] * 2), "equal shares"


def test_ranks_that_sort_alone_save_nothing():
    tables, halves = MLPERF_MODEL.tables, [[Shard(rank, 20, 64 * rank, 64)] for rank in range(2)]
    for by_rank, topology in (
        ([[Shard(0, 20, 0, 128)], [Shard(1, 21, 0, 128)]], Topology.one_node(2)),
        (halves, Topology.of(2, 1)),
    ):
        assert saved_by_sharing_us(by_rank, topology, tables, 1024, DEFAULT_COSTS) == [0.0, 0.0]
