"""Predicted costs of two tiers: the rows that batches really name beyond the device's, and the figures of MLPerf's
model."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from dlrm_bench.dlrm.data.distributions import hashed_ids, zipf_ids
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.optimizers import Adagrad
from dlrm_bench.dlrm.runtime.gpu_types import DEFAULT_COSTS
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.id_statistics import IdStatistics
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard, bytes_of_rank
from dlrm_bench.dlrm.tables.plan.tier_costs import (
    Exchanges,
    TierLoad,
    check_tiers_fit,
    missed_rows,
    misses_per_sample,
    tier_loads,
)
from dlrm_bench.dlrm.tables.row_rates import RowRates, random_rates
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory

ADAGRAD = Adagrad(1e-8)
MLPERF = MLPERF_MODEL.tables
MLPERF_IDS = IdStatistics(skew=1.05, expanded=True)
LARGE = (0, 9, 10, 19, 20, 21)
"""MLPerf's tables of a million rows or more."""


@cache
def mlperf_rates() -> list[RowRates]:
    return [random_rates(rows, hot, MLPERF_IDS) for rows, hot in zip(MLPERF.rows, MLPERF.hot, strict=True)]


def small_tables() -> Tables:
    return Tables(names=("a", "b", "c"), rows=(60_000, 20_000, 5_000), columns=64, hot=(6, 1, 3))


def drawn(tables: Tables, rng: np.random.Generator, samples: int) -> list[np.ndarray]:
    """The ids of random data in each table."""
    firsts = [zipf_ids(rng, rows, 1.05, samples) for rows in tables.rows]
    return [
        np.concatenate([first[:, None], hashed_ids(first, hot - 1, rows, salt=table)], axis=1).ravel()
        for table, (first, rows, hot) in enumerate(zip(firsts, tables.rows, tables.hot, strict=True))
    ]


@pytest.mark.parametrize("share", [0.5, 0.25, 0.1])
def test_misses_are_those_of_batches_beside_the_best_placement(share: float) -> None:
    """Simulated: rows placed by the counts of a million samples, batches drawn beside them."""
    tables, rng = small_tables(), np.random.default_rng(0)
    counts = [np.bincount(ids, minlength=r) for ids, r in zip(drawn(tables, rng, 1_000_000), tables.rows, strict=True)]
    device_rows = int(share * sum(tables.rows))
    order = np.argsort(-np.concatenate(counts), kind="stable")
    in_host = np.ones(sum(tables.rows), dtype=bool)
    in_host[order[:device_rows]] = False
    starts, missed = np.cumsum([0, *tables.rows[:-1]]), []
    for _ in range(20):
        named = np.concatenate([start + ids for start, ids in zip(starts, drawn(tables, rng, 2000), strict=True)])
        missed.append(in_host[np.unique(named)].sum())
    rates = [random_rates(rows, hot, MLPERF_IDS) for rows, hot in zip(tables.rows, tables.hot, strict=True)]
    shards = tuple(Shard(0, table, 0, 64) for table in range(3))
    (load,) = tier_loads(Plan(1, shards), tables, ADAGRAD, TableMemory(share=share), 2000, rates)
    assert load.missed_rows == pytest.approx(np.mean(missed), rel=0.05)
    assert load.moved_bytes == load.missed_rows * 512
    assert load.us(DEFAULT_COSTS) == pytest.approx(load.missed_rows / 28), "rows of 512 bytes"
    assert (load.device_bytes, load.host_bytes) == (device_rows * 512, (85_000 - device_rows) * 512)
    assert misses_per_sample([load], tables, 2000) == load.missed_rows / 2000


@pytest.mark.parametrize(
    ("share", "of_512", "of_6912"), [(0.5, 1526, 20_159), (0.25, 4877, 63_924), (0.1, 12_663, 170_063)]
)
def test_rows_of_mlperf_missed_with_the_hottest_of_all_tables_on_the_device(
    share: float, of_512: float, of_6912: float
) -> None:
    """A GPU's half of the rows that two miss. Expected are a simulation's figures. The prediction is 16 % below them at
    the half and up to 6 % above at less; test_row_rates.py has it beside rates that are counted row by row, and of a
    table of 40 million rows with three ids a sample it was within 2 % of those."""
    shards = [(Shard(0, table, 0, 128), rates) for table, rates in enumerate(mlperf_rates())]
    device_rows = int(share * sum(MLPERF.rows))
    for samples, rows in ((1024, of_512), (13_824, of_6912)):
        tolerance = 0.17 if share == 0.5 else 0.06
        assert missed_rows(shards, device_rows, samples) / 2 == pytest.approx(rows, rel=tolerance)


@pytest.mark.parametrize(("share", "of_512", "of_6912"), [(0.5, 7045, 94_035), (0.2, 13_035, 180_647)])
def test_rows_of_mlperf_missed_with_the_same_share_of_each_table(share: float, of_512: float, of_6912: float) -> None:
    """Of the large tables: within 10 % of a simulation's figures."""
    rates = mlperf_rates()
    for samples, rows in ((1024, of_512), (13_824, of_6912)):
        missed = sum(
            missed_rows([(Shard(0, table, 0, 128), rates[table])], int(share * MLPERF.rows[table]), samples)
            for table in LARGE
        )
        assert missed / 2 == pytest.approx(rows, rel=0.1)


def test_halves_of_columns_miss_the_same_rows_of_half_the_bytes() -> None:
    tables = small_tables()
    rates = [random_rates(rows, hot, MLPERF_IDS) for rows, hot in zip(tables.rows, tables.hot, strict=True)]

    def loads(*shards: Shard, replicated: tuple[int, ...] = ()) -> list[TierLoad]:
        plan = Plan(1 + max(shard.rank for shard in shards), shards, replicated)
        return tier_loads(plan, tables, ADAGRAD, TableMemory(share=0.5), 500, rates)

    (whole,) = loads(*(Shard(0, table, 0, 64) for table in range(3)))
    halves = loads(*(Shard(rank, table, 32 * rank, 32) for rank in range(2) for table in range(3)))
    assert [half.missed_rows for half in halves] == [whole.missed_rows] * 2
    assert sum(half.moved_bytes for half in halves) == whole.moved_bytes
    assert misses_per_sample(halves, tables, 500) == pytest.approx(misses_per_sample([whole], tables, 500))
    (replicated,) = loads(Shard(0, 0, 0, 64), Shard(0, 1, 0, 64), replicated=(2,))
    of_replicated = sum(bytes_of_rank((), (2,), tables, ADAGRAD.state_columns))
    assert replicated.device_bytes == 40_000 * 512 + of_replicated


@pytest.mark.parametrize(
    "memory",
    [
        TableMemory(share=0.5),
        TableMemory(share=0.1),
        TableMemory(device_bytes=3 * 10**10),
        TableMemory(share=0.7, shares={0: 0.1, 9: 0.3, 2: 0.0, 20: 0.4}),
    ],
)
@pytest.mark.parametrize("held", [range(26), (0,), (20,), (9, 10, 22), (1, 2, 3)])
def test_exchanges_of_a_rank_are_those_of_its_load(memory: TableMemory, held: Sequence[int]) -> None:
    """Within a percent, or ten rows, of whole tables and of parts of columns."""
    rates = mlperf_rates()
    exchanges = Exchanges(MLPERF, ADAGRAD, memory, 13_824, rates, DEFAULT_COSTS, 2)
    for columns in (128, 16):
        shards = tuple(Shard(0, table, 0, columns) for table in held)
        (load,) = tier_loads(Plan(1, shards), MLPERF, ADAGRAD, memory, 13_824, rates)
        assert exchanges.us(shards) == pytest.approx(load.us(DEFAULT_COSTS), rel=0.01, abs=10 / 28)


def test_exchanges_of_tables_add_up_to_those_of_a_rank_that_has_them_all() -> None:
    exchanges = Exchanges(MLPERF, ADAGRAD, TableMemory(share=0.5), 13_824, mlperf_rates(), DEFAULT_COSTS, 1)
    by_table = [exchanges.table_us(table) for table in range(26)]
    every = tuple(Shard(0, table, 0, 128) for table in range(26))
    assert sum(by_table) == pytest.approx(exchanges.us(every), rel=1e-6)
    assert {table for table, us in enumerate(by_table) if us > 1} == {0, 9, 10, 19, 21}, (
        "the rows that few samples name"
    )


def test_tables_with_a_share_miss_what_they_would_alone() -> None:
    """And the others have the rest of the device's rows."""
    tables = small_tables()
    rates = [random_rates(rows, hot, MLPERF_IDS) for rows, hot in zip(tables.rows, tables.hot, strict=True)]
    shards = tuple(Shard(0, table, 0, 64) for table in range(3))
    memory = TableMemory(share=0.5, shares={0: 0.25, 2: 0.0})
    (load,) = tier_loads(Plan(1, shards), tables, ADAGRAD, memory, 500, rates)
    alone = [missed_rows([(shards[t], rates[t])], rows, 500) for t, rows in ((0, 15_000), (1, 20_000), (2, 0))]
    assert load.missed_rows == pytest.approx(sum(alone))
    assert (load.device_bytes, load.host_bytes) == (35_000 * 512, 50_000 * 512)
    assert alone[1] == 0, "42,500 rows less the 15,000 of table 0 are more than table 1 has"
    exchanges = Exchanges(tables, ADAGRAD, memory, 500, rates, DEFAULT_COSTS, 1)
    by_table = [exchanges.table_us(table) for table in range(3)]
    assert by_table == pytest.approx([rows / 28 for rows in alone], rel=0.01)


def test_too_little_device_memory_costs_more_than_any_exchange_and_less_the_nearer_it_is() -> None:
    shards = [Shard(0, table, 0, 128) for table in (9, 10)]
    times = [
        Exchanges(MLPERF, ADAGRAD, memory, 13_824, mlperf_rates(), DEFAULT_COSTS, 1).us(shards)
        for memory in (TableMemory(share=share, shares={9: 1.0}) for share in (0.1, 0.5, 0.96))
    ]
    assert times[0] > times[1] > 1e6 > times[2]


def test_uniform_rates_are_one_bin() -> None:
    tables = small_tables()
    rates = [RowRates(rates=np.full(1, 1e-4), rows=np.full(1, float(rows))) for rows in tables.rows]
    exchanges = Exchanges(tables, ADAGRAD, TableMemory(share=0.5), 500, rates, DEFAULT_COSTS, 1)
    missed = 42_500 * -np.expm1(-500 * 1e-4)
    assert exchanges.us([Shard(0, table, 0, 64) for table in range(3)]) == pytest.approx(missed / 28, rel=1e-6)


@pytest.mark.parametrize(
    ("memory", "gpus", "device", "host", "said"),
    [
        (TableMemory(share=0.64), 1, 134e9, 131e9, None),
        (
            TableMemory(share=0.8),
            1,
            134e9,
            131e9,
            r"share 0\.8\): .* take 209\.1 GB, but 1 node\(s\) of 1 GPU\(s\) have",
        ),
        (
            TableMemory(share=0.3),
            1,
            134e9,
            131e9,
            r"134\.0 GB of device memory for them and 131\.0 GB of host memory, of",
        ),
        (TableMemory(device_bytes=60 * 10**9), 1, 134e9, 131e9, r"60 GB a rank\): .* can use 191\.0 GB at most"),
        (TableMemory(device_bytes=60 * 10**9), 1, 134e9, 256e9, None),
        (
            TableMemory(share=0.01),
            8,
            134e9,
            200e9,
            r"1072\.0 GB of device memory for them and 200\.0 GB of host memory",
        ),
    ],
)
def test_nodes_of_too_little_memory_are_refused_with_the_numbers(
    memory: TableMemory, gpus: int, device: float, host: float, said: str | None
) -> None:
    arguments = (MLPERF, ADAGRAD, memory, Topology.one_node(gpus), int(device), int(host))
    if said is None:
        check_tiers_fit(*arguments)
        return
    with pytest.raises(ValueError, match=said):
        check_tiers_fit(*arguments)
