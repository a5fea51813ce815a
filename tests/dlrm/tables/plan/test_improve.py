"""Plans of tables in two tiers of memory: exchanges balanced beside embedding work, within the memory of a rank."""

from itertools import product

import pytest

from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.optimizers import Adagrad
from dlrm_bench.dlrm.runtime.gpu_types import DEFAULT_COSTS
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.id_statistics import IdStatistics
from dlrm_bench.dlrm.tables.plan.constraints import parse_constraints
from dlrm_bench.dlrm.tables.plan.costs import iteration_us
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard, bytes_of_rank
from dlrm_bench.dlrm.tables.plan.planner import make_plan
from dlrm_bench.dlrm.tables.plan.tier_costs import table_rates, tier_loads
from dlrm_bench.dlrm.tables.plan.work import beside
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory

ADAGRAD = Adagrad(1e-8)
IDS = IdStatistics(skew=1.05, expanded=True)
HALF = TableMemory(share=0.5)
MLPERF = MLPERF_MODEL.tables


def times_of(
    plan: Plan, tables: Tables, batch: int, memory: TableMemory = HALF, ids: IdStatistics = IDS
) -> tuple[float, float]:
    """Microseconds of embedding work and of the most exchanges of any rank, by the plain functions."""
    topology = Topology.one_node(plan.world_size)
    loads = tier_loads(plan, tables, ADAGRAD, memory, batch, table_rates(tables, ids, None))
    embedding = iteration_us(plan.shards, tables, topology, batch, 2, DEFAULT_COSTS, ids, in_tiers=True)
    return embedding, max(load.us(DEFAULT_COSTS) for load in loads)


def plan_in_tiers(tables: Tables, ranks: int, batch: int, tiers: TableMemory | None = HALF, **options) -> Plan:
    topology = Topology.one_node(ranks)
    return make_plan(tables, topology, batch, 2, ADAGRAD, ids=IDS, tiers=tiers, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "exchanges", "embedding"), [(2, 0.75, 1.02), (4, 0.55, 1.03), (8, 0.15, 1.35)])
def test_fewer_rows_of_mlperf_are_exchanged_than_by_a_plan_that_knows_no_tiers(
    ranks: int, exchanges: float, embedding: float
) -> None:
    """At 6,912 samples a GPU; the other plan splits every large table by columns, or leaves few of them to a rank."""
    batch = 6912 * ranks
    before = times_of(plan_in_tiers(MLPERF, ranks, batch, tiers=None), MLPERF, batch)
    after = times_of(plan_in_tiers(MLPERF, ranks, batch), MLPERF, batch)
    assert after[1] < exchanges * before[1]
    assert after[0] < embedding * before[0]


def test_one_rank_has_nothing_to_choose() -> None:
    assert plan_in_tiers(MLPERF, 1, 6912) == plan_in_tiers(MLPERF, 1, 6912, tiers=None)


def test_a_plan_of_two_ranks_is_near_the_best_of_all() -> None:
    tables = Tables(
        names=tuple("abcdef"),
        rows=(900_000, 900_000, 900_000, 300_000, 60_000, 20_000),
        columns=32,
        hot=(20, 8, 3, 12, 1, 30),
    )
    batch = 8192
    plan = plan_in_tiers(tables, 2, batch)
    every = []
    for ranks in product(range(2), repeat=tables.count):
        if len(set(ranks)) == 2:
            whole = tuple(sorted(Shard(rank, table, 0, 32) for table, rank in enumerate(ranks)))
            every.append(beside(*times_of(Plan(2, whole), tables, batch)))
    halves = tuple(Shard(rank, table, 16 * rank, 16) for rank in range(2) for table in range(tables.count))
    every.append(beside(*times_of(Plan(2, halves), tables, batch)))
    assert beside(*times_of(plan, tables, batch)) <= 1.02 * min(every)
    assert max(every) > 1.5 * min(every)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [HALF, TableMemory(device_bytes=20 * 10**9)])
def test_no_rank_exceeds_its_memory_of_either_tier(memory: TableMemory) -> None:
    """Ranks hold unequal rows; where memory is scarce, less unequal ones."""
    device, host, batch = int(60e9), int(60e9), 4 * 6912
    capacity = memory.capacity(device, host)
    ample, scarce = (
        plan_in_tiers(MLPERF, 4, batch, memory, memory_bytes=size) for size in (None, min(capacity, int(58e9)))
    )
    rates = table_rates(MLPERF, IDS, None)
    for load in tier_loads(scarce, MLPERF, ADAGRAD, memory, batch, rates):
        assert load.device_bytes <= min(device, memory.device_bytes or device) + 10**6  # small tables are on every rank
        assert load.host_bytes <= host
    most = [
        max(sum(bytes_of_rank(plan.of_rank(r), plan.replicated, MLPERF, ADAGRAD.state_columns)) for r in range(4))
        for plan in (ample, scarce)
    ]
    assert most[1] <= 58e9 < most[0]


def test_too_little_memory_for_any_plan_is_an_error() -> None:
    tables = Tables(names=("a", "b", "c"), rows=(300_000, 100_000, 100_000), columns=32, hot=(100, 1, 1))
    with pytest.raises(ValueError, match="no plan of 2 rank"):
        plan_in_tiers(tables, 2, 1024, memory_bytes=tables.bytes // 2)


def test_constraints_are_obeyed() -> None:
    plan = plan_in_tiers(
        MLPERF, 2, 13_824, constraints=parse_constraints(["0,9=column-wise:64", "7=data-parallel"], MLPERF)
    )
    assert {shard.columns for shard in plan.shards if shard.table in (0, 9)} == {64}
    assert 7 in plan.replicated
    plan.check(MLPERF)


def test_tables_with_a_share_of_their_own_are_where_they_fit() -> None:
    """Placed by their work alone, those that are to be on the device would take more of a rank than it has there."""
    rows = (50_000, 100_000, 50_000, 100_000, 200_000, 50_000)
    tables = Tables(names=tuple("abcdef"), rows=rows, columns=32, hot=(5, 1, 20, 60, 5, 60))
    memory = TableMemory(share=0.76, shares={0: 1.0, 1: 1.0, 2: 1.0, 4: 1.0})
    constraints = parse_constraints(["0-2,4=table-wise,hbm:1"], tables)
    plan = plan_in_tiers(tables, 2, 1024, memory, constraints=constraints, split_columns=False)
    loads = tier_loads(plan, tables, ADAGRAD, memory, 1024, table_rates(tables, IDS, None))  # or an error of a rank
    assert sum(load.device_bytes for load in loads) <= 0.76 * sum(rows) * 256


def test_a_rank_of_too_few_rows_is_avoided() -> None:
    """One rank would hold the table of three rows alone: of its rows, one would be on the device."""
    tables = Tables(names=("a", "b", "c"), rows=(3, 100_000, 100_000), columns=32, hot=(100, 1, 1))
    plan = plan_in_tiers(tables, 2, 1024, replicate=False)
    for load in tier_loads(plan, tables, ADAGRAD, HALF, 1024, table_rates(tables, IDS, None)):
        assert load.device_bytes > 0
