"""Plans: nothing lost, nothing twice, one width a rank, and costs as measured."""

import pytest

from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.embedding.plan import Plan, Shard, all_to_alls_us, picking_us, tables_us
from dlrm_bench.dlrm.gpu_costs import DEFAULT
from dlrm_bench.dlrm.topology import Topology


def model_of(rows: list[int], hot: list[int], dim: int = 32) -> ModelConfig:
    return ModelConfig(
        num_embeddings=tuple(rows), multi_hot_sizes=tuple(hot), embedding_dim=dim, bottom_mlp=(dim,), top_mlp=(8, 1)
    )


@pytest.mark.parametrize("dim", [128, 64, 32, 16])
def test_plans_are_within_a_tenth_of_what_was_measured(dim):
    """Microseconds of forward and backward of one call, exact Adagrad, by width and table."""
    hot = model_of([40_000_000] * 4, [100, 27, 25, 12])
    small = model_of([17295, 7122, 1543, 63, 10, 4, 976, 14, 108, 36], [1] * 10)
    measured = {
        128: [(0, 55296, 3801), (1, 55296, 1284), (2, 55296, 1201), (3, 55296, 629), (0, 4096, 435)],
        64: [(0, 55296, 2201), (1, 55296, 743)],
        32: [(0, 55296, 1406), (0, 4096, 252)],
        16: [(0, 55296, 1232)],
    }
    for table, global_batch_size, us in measured[dim]:
        assert tables_us([Shard(0, table, 0, dim)], hot, global_batch_size) == pytest.approx(us, rel=0.1)
    if dim == 128:
        assert tables_us([Shard(0, table, 0, 128) for table in range(10)], small, 55296) == pytest.approx(396, rel=0.1)


def test_all_to_alls_take_what_was_measured():
    """26 tables of 128 columns over eight ranks, bf16: 34 us at 512 samples a GPU, 157 us at 6912; two of them."""
    for local_batch_size, us in ((512, 34), (6912, 157)):
        assert all_to_alls_us(26 * 128 // 8, Topology.one_node(8), 8 * local_batch_size, 2) == pytest.approx(
            2 * us, rel=0.03
        )
    # On two ranks half of the bytes stay where they are.
    one, two, eight = (Topology.one_node(gpus) for gpus in (1, 2, 8))
    assert all_to_alls_us(0, two, 10**6, 2) < all_to_alls_us(128, two, 10**6, 2) < all_to_alls_us(128, eight, 10**6, 2)
    assert all_to_alls_us(128, one, 10**6, 2) == 0


def test_the_network_is_the_slower_way():
    """Of two nodes of four GPUs half of the bytes leave the node, at the network's rate, beside the others."""
    nodes, node = Topology.of(8, 4), Topology.one_node(8)
    travels = 10**6 * 128 * 2 / 2 / nodes.network.bytes_per_us
    assert all_to_alls_us(128, nodes, 10**6, 2) == pytest.approx(2 * (nodes.network.latency_us + travels))
    assert all_to_alls_us(128, nodes, 10**6, 2) > all_to_alls_us(128, node, 10**6, 2)


def test_a_part_of_the_rows_costs_a_part_and_a_look_at_all_ids():
    model = model_of([10**6, 10**6], [10, 10], dim=128)
    whole, half = [Shard(0, 0, 0, 128)], [Shard(0, 0, 0, 128, 1, 2)]
    fixed = tables_us([], model, 10000)
    picking = tables_us(half, model, 10000) - fixed - (tables_us(whole, model, 10000) - fixed) / 2
    assert picking == pytest.approx(DEFAULT.picking_us + picking_us(0, model, 10000, DEFAULT))
    # The ids of a whole table go the same way, where they lie among those of a split one.
    both = tables_us([*half, Shard(0, 1, 0, 128)], model, 10000)
    apart = tables_us(half, model, 10000) + tables_us([Shard(0, 1, 0, 128)], model, 10000) - fixed
    assert both == pytest.approx(apart + picking_us(1, model, 10000, DEFAULT))


def test_cost_counts_ids_columns_and_rows():
    model = model_of([10**6, 10**6, 100], [1, 10, 1], dim=128)
    cost = tables_us([Shard(0, 0, 0, 128)], model, 10000)
    assert tables_us([Shard(0, 1, 0, 128)], model, 10000) > cost
    assert tables_us([Shard(0, 0, 0, 64)], model, 10000) < cost
    assert tables_us([Shard(0, 2, 0, 128)], model, 10000) < cost
    assert tables_us([Shard(0, 0, 0, 128)], model, 20000) > cost


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
