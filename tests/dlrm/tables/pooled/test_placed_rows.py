"""Rows of pooled tables that have places: their numbers and memory where they are made. Trainings:
tests/pipeline/static/test_dynamic_rows.py and test_tiers.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import NO_TABLE, DynamicRows
from dlrm_bench.dlrm.tables.dynamic.memory import RowPlaces
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.pooled import placed_rows
from dlrm_bench.dlrm.tables.pooled.placed_rows import (
    empty_placed,
    make_rows,
    named_rows,
    rows_in_memory,
    rows_on_tiers,
)
from dlrm_bench.dlrm.tables.pooled.tbe import FixedTBE, TBEShape
from dlrm_bench.dlrm.tables.pooled.ways import Layout
from dlrm_bench.dlrm.tables.row_rates import assumed_rates
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory
from dlrm_bench.kernels.embedding.id_map import Keys

TABLES = Tables(names=("a", "b", "c"), rows=(50, 20, 9), columns=16, hot=(2, 3, 1))
PLACES, SAMPLES, SEED = RowPlaces(12, False), 4, 3
NEW, AGAIN = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)


def rows_of(
    shards: tuple[Shard, ...], fbgemm: bool = True, replicated: tuple[int, ...] = (), raw_ids: bool = False
) -> DynamicRows:
    """The rows of rank 1 of two."""
    cpu = torch.device("cpu")
    ranks = Ranks(rank=1, local_rank=1, world_size=2, local_world_size=2, device=cpu)
    tables = replace(TABLES, raw_ids=raw_ids)
    layout = Layout(tables, Plan(2, shards, replicated), ranks, BatchShape(samples=SAMPLES, dtype=torch.float32))
    own = [shard.table for shard in shards if shard.rank == 1]
    rows, hot = (tuple(of[table] for table in own) for of in (TABLES.rows, TABLES.hot))
    shape = TBEShape(rows=rows, hot=hot, columns=16, samples=2 * SAMPLES, dtype=torch.float32, raw_ids=raw_ids)
    assert rows_in_memory(shape, PLACES) == PLACES.count + 2 * SAMPLES * sum(hot)
    of_tbe = (shape, OptimizerConfig().tables, 0.1, cpu, True, fbgemm)
    return named_rows(layout, FixedTBE(*of_tbe, places=rows_in_memory(shape, PLACES)), SEED, PLACES)


WHOLE = (Shard(0, 1, 0, 16), Shard(1, 0, 0, 16), Shard(1, 2, 0, 16))


@pytest.mark.parametrize("fbgemm", [True, False])
def test_rows_have_the_weights_of_their_tables(fbgemm: bool) -> None:
    dynamic = rows_of(WHOLE, fbgemm)
    rows = torch.tensor([3, 58, 3, 49], dtype=torch.int32)  # of tables 0, 2, 0, 0
    placed, unseen = (empty_placed(rows, makes, sorts=False) for makes in (True, False))
    dynamic._memory[0].fill_(7)
    dynamic._memory[1].fill_(7)
    make_rows(dynamic, Keys(rows), unseen, NEW)
    assert unseen.lookup.tolist() == [-1] * 4, "an evaluation makes no rows"
    for is_new in (NEW, AGAIN):
        make_rows(dynamic, Keys(rows), placed, is_new)
        assert placed.lacking is not None
        assert placed.lookup.tolist() == [0, 1, 0, 2], "in the order in which rows are first named"
        assert placed.lacking.tolist() == [-1]
        assert dynamic.map.describe()["made"] == 3
    assert not dynamic.state[:3].any()
    assert (dynamic.state[3:] == 7).all()
    dynamic.place_unnamed(Keys(rows - 1), unseen.lookup)
    assert unseen.lookup.tolist() == [12, 13, 14, 15], "beyond all places"
    for number, place in ((3, 0), (58, 1), (49, 2), (2, 12), (57, 13), (48, 15)):
        table, row = (0, number) if number < 50 else (2, number - 50)
        expected = torch.empty(1, 16)
        fill_initial_weights(expected, seed=SEED, table=table, num_embeddings=TABLES.rows[table], row_offset=row)
        assert torch.equal(dynamic._memory[0][place], expected[0]), number
    assert [entry[:3] for entry in dynamic.entries()[:3].tolist()] == [[3, 0, 0], [8, 0, 2], [49, 0, 0]]
    assert (dynamic.entries()[3:, 2] == NO_TABLE).all()


def test_saved_rows_are_chosen_by_the_tables_that_a_rank_has() -> None:
    entries = torch.tensor([[3, 0, 0, 1], [4, 0, 1, 1], [8, 0, 2, 2], [49, 0, 0, 2]], dtype=torch.int32)
    dynamic = rows_of(WHOLE)
    assert dynamic.choose(entries).tolist() == [0, 2, 3]
    places = torch.empty(4, dtype=torch.int32)
    dynamic.map.find(Keys(torch.tensor([3, 49, 58, 4])), places)
    assert places.tolist() == [0, 2, 1, -1]
    assert torch.equal(dynamic.entries()[:3], entries[[0, 2, 3]])


def halves(*ids: int) -> list[list[int]]:
    """The lower and the upper half of each id, as they are saved."""
    return torch.tensor(ids).view(torch.int32).view(-1, 2).tolist()


def test_raw_ids_are_saved_with_their_tables() -> None:
    """Whatever the order of the tables on a rank; and numbers are chosen of row numbers only."""
    saved = [(3, 0, 1), (4, 1, 1), (-8, 2, 2), (3 + (1 << 32), 0, 2), (3, 2, 2)]  # id, table, batch
    words = [
        [*half, table, last] for (_, table, last), half in zip(saved, halves(*(of[0] for of in saved)), strict=True)
    ]
    entries = torch.tensor(words, dtype=torch.int32)
    dynamic = rows_of((Shard(0, 1, 0, 16), Shard(1, 2, 0, 16), Shard(1, 0, 0, 16)), raw_ids=True)
    assert dynamic.choose(entries).tolist() == [0, 2, 3, 4]
    places = torch.empty(6, dtype=torch.int32)
    tables, ids = torch.tensor([1, 1, 0, 0, 0, 1]).int(), torch.tensor([3, 3 + (1 << 32), -8, 3, 4, -8])
    dynamic.map.find(Keys(ids, tables), places)
    assert places.tolist() == [0, 2, 1, 3, -1, -1]
    assert torch.equal(dynamic.entries()[:4], entries[[0, 2, 3, 4]])
    for bad in (entries, entries[3:4]):
        with pytest.raises(ValueError, match=r"saved id \S+ is outside its table: ids of .*--model\.raw-ids"):
            rows_of(WHOLE).choose(bad)
    assert rows_of(WHOLE).choose(entries[:1]).tolist() == [0], "an id that is a row number"


@pytest.mark.parametrize(
    ("shards", "replicated"),
    [
        ((Shard(0, 1, 0, 16), Shard(1, 0, 0, 8), Shard(1, 0, 8, 8)), (2,)),
        ((Shard(0, 0, 0, 16, 0, 2), Shard(1, 0, 0, 16, 1, 2)), (1, 2)),
        ((Shard(0, 1, 0, 16), Shard(1, 0, 0, 16)), (2,)),
    ],
)
def test_parts_of_tables_and_copies_are_no_plan_for_them(
    shards: tuple[Shard, ...], replicated: tuple[int, ...]
) -> None:
    with pytest.raises(AssertionError, match=r"whole tables|each table on one rank"):
        rows_of(shards, replicated=replicated)


def rows_on_tiers_of(rank: int, plan: Plan) -> tuple[int, tuple[Any, ...]]:
    """Returns the bytes of host memory that are asked for on the node of `rank`, of two nodes of two ranks each, and
    what its rows on two tiers are made of."""
    asked, cpu = [], torch.device("cpu")
    ranks = Ranks(rank=rank, local_rank=rank % 2, world_size=4, local_world_size=2, device=cpu)
    layout = Layout(TABLES, plan, ranks, BatchShape(samples=2 * SAMPLES, dtype=torch.float32, parts=2))
    own = [shard.table for shard in plan.of_rank(rank)]
    rows, hot = (tuple(of[table] for table in own) for of in (TABLES.rows, TABLES.hot))
    shape = TBEShape(rows=rows, hot=hot, columns=16, samples=4 * SAMPLES, dtype=torch.float32, parts=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placed_rows, "check_host_memory", asked.append)
        patch.setattr(placed_rows, "TieredRows", lambda *arguments: arguments)
        made: Any = rows_on_tiers(layout, shape, TableMemory(share=0.5))
    (needed,) = asked
    return needed, made


def test_the_host_memory_of_a_node_is_that_of_its_own_ranks() -> None:
    plan = Plan(4, (Shard(0, 0, 0, 16), Shard(1, 1, 0, 16), Shard(2, 2, 0, 16), Shard(3, 1, 0, 16)))
    host = [2 * 4 * 16 * (rows - rows // 2) for rows in (50, 20, 9, 20)]
    for rank in range(4):
        node = 2 * (rank // 2)
        assert rows_on_tiers_of(rank, plan)[0] == sum(host[node : node + 2])


def test_rows_are_expected_as_often_as_a_batch_names_them() -> None:
    """All of its parts, and the samples of all ranks."""
    plan = Plan(4, (Shard(0, 0, 0, 16), Shard(1, 1, 0, 16), Shard(2, 0, 0, 16), Shard(2, 2, 0, 16), Shard(3, 1, 0, 16)))
    _, (_, columns, device, expected) = rows_on_tiers_of(2, plan)
    assert (columns, device) == (16, torch.device("cpu"))
    samples = 4 * 2 * SAMPLES
    of_tables = expected[:50], expected[50:]
    for of_table, table in zip(of_tables, (0, 2), strict=True):
        assert of_table == pytest.approx(samples * assumed_rates(TABLES.rows[table], TABLES.hot[table]))


def test_row_parts_are_refused_on_two_tiers() -> None:
    shards = (*(Shard(rank, 0, 0, 16, rank, 2) for rank in range(2)), Shard(2, 1, 0, 16), Shard(3, 2, 0, 16))
    with pytest.raises(ValueError, match="--table-memory cannot be used with row-wise sharding"):
        rows_on_tiers_of(0, Plan(4, shards))
