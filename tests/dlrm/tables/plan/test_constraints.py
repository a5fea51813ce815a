"""The words of --constraints, and plans that obey them or are refused by name."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.flags import parse_run
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.presets import MLPERF_MODEL
from dlrm_bench.dlrm.optimizers import Adagrad, RowWiseAdagrad
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.constraints import TableConstraint, described, parse_constraints
from dlrm_bench.dlrm.tables.plan.plan import Plan
from dlrm_bench.dlrm.tables.plan.planner import REPLICATED_ROWS, make_plan
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.dlrm.tables.tiers.table_memory import TableMemory
from tests.dlrm.tables.plan.test_plan import model_of
from tests.pipelines import changed

TABLES = MLPERF_MODEL.tables


def test_words_name_tables_by_number_range_and_name() -> None:
    narrow, share = TableConstraint(kind="column-wise", columns=64), TableConstraint(device_share=0.25)
    both = TableConstraint(kind="row-wise", device_share=0.5)
    found = parse_constraints(["9,0=column-wise:64", "cat_3,19-20=hbm:.25", "5=hbm:0.5,row-wise"], TABLES)
    assert found == {0: narrow, 3: share, 5: both, 9: narrow, 19: share, 20: share}
    words = described(found, TABLES)
    assert words == "cat_0,cat_9=column-wise:64 cat_3,cat_19,cat_20=hbm:0.25 cat_5=row-wise,hbm:0.5"
    assert parse_constraints(words.split(), TABLES) == found
    assert parse_constraints([], TABLES) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("20", "--constraints 20 is not TABLES=SHARDING: write --constraints 0,9="),
        ("=table-wise", "=table-wise is not TABLES="),
        ("26=table-wise", "there is no table 26: tables are 0 to 25, or cat_0 to cat_25"),
        ("5-3=table-wise", "there is no table 5-3"),
        ("dog=table-wise", "there is no table dog"),
        ("0,3-=table-wise", "there is no table 3-"),
        ("1=table_wise", "'table_wise' is none of table-wise, column-wise, row-wise, data-parallel and hbm:SHARE"),
        ("1=table-wise:64", "table-wise takes no number, only column-wise:COLUMNS does"),
        (
            "1=column-wise:48",
            "column-wise:48 cannot split tables of 128 columns: choose a multiple of 4 that divides 128",
        ),
        ("1=column-wise:128", "column-wise:128 cannot split"),
        ("1=column-wise:", "column-wise: cannot split"),
        ("1=hbm:1.5", "hbm:1.5 is not a share of a table's rows: choose 0 to 1"),
        ("1=hbm:nan", "hbm:nan is not a share"),
        ("1=hbm", "hbm: is not a share"),
        ("1=table-wise,row-wise", "one sharding type and one hbm:SHARE: leave row-wise out"),
        ("1=hbm:0.1,hbm:0.2", "leave hbm:0.2 out"),
        ("1=data-parallel,hbm:0.2", "a data-parallel table is in device memory: leave hbm:0.2 out"),
        ("1-4=table-wise 3=row-wise", "--constraints 3=row-wise: cat_3 is already constrained: name it once"),
    ],
)
def test_a_word_that_is_none_is_named(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        parse_constraints(words.split(), TABLES)


def plan_of(tables: Tables, world_size: int, *words: str, **options: Any) -> Plan:
    """The plan of one node at 512 samples a rank."""
    constraints = parse_constraints(words, tables)
    return make_plan(tables, Topology.one_node(world_size), 512 * world_size, constraints=constraints, **options)


def obeys(plan: Plan, tables: Tables, table: int, constraint: TableConstraint) -> bool:
    shards = [shard for shard in plan.shards if shard.table == table]
    if constraint.kind == "data-parallel" or not shards:
        return constraint.kind in (None, "data-parallel") and table in plan.replicated
    if constraint.kind == "row-wise":
        return [(s.rank, s.row_part, s.row_parts, s.columns) for s in shards] == [
            (rank, rank, plan.world_size, tables.columns) for rank in range(plan.world_size)
        ]
    if constraint.kind is None:
        return True
    whole_rows, widths = {s.row_parts for s in shards} == {1}, {s.columns for s in shards}
    if constraint.kind == "table-wise":
        return whole_rows and len(shards) == 1 and widths == {tables.columns}
    return whole_rows and (widths == {constraint.columns} if constraint.columns else max(widths) < tables.columns)


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (2, "20=table-wise"),
        (2, "0,9=column-wise:64 20=table-wise"),
        (4, "0,9=column-wise:32 19-21=column-wise:64"),
        (8, "0-25=column-wise:64"),
        (2, "7=column-wise 10=data-parallel"),
        (2, "5,18=table-wise 20=data-parallel"),
        (8, "20=row-wise"),
        (4, "20,0=row-wise 10=table-wise 3=data-parallel"),
    ],
)
def test_plans_of_the_mlperf_model_obey(world_size: int, words: str) -> None:
    plan = plan_of(TABLES, world_size, *words.split(), split_rows="row" in words)
    for table, constraint in parse_constraints(words.split(), TABLES).items():
        assert obeys(plan, TABLES, table, constraint), (table, constraint)


WISHES = [
    "row-wise",
    "row-wise",
    "table-wise",
    "column-wise",
    "column-wise:16",
    "column-wise:32",
    "row-wise",
    "data-parallel",
]


@given(
    rows=st.lists(st.sampled_from([3, REPLICATED_ROWS, 10**6, 10**7]), min_size=1, max_size=8),
    wishes=st.dictionaries(st.integers(0, 7), st.sampled_from(WISHES), max_size=4),
    world_size=st.integers(1, 5),
    split_rows=st.booleans(),
    replicate=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_plan_obeys_or_is_refused_by_name(
    rows: list[int], wishes: dict[int, str], world_size: int, split_rows: bool, replicate: bool
) -> None:
    tables = model_of(rows, [1 + 7 * t % 20 for t in range(len(rows))], dim=64)
    words = [f"{table}={wish}" for table, wish in wishes.items() if table < len(rows)]
    try:
        plan = plan_of(tables, world_size, *words, split_rows=split_rows, replicate=replicate)
    except ValueError as refused:
        error = str(refused)
    else:
        error = ""
    if error:
        assert "--constraints" in error or not words
        return
    plan.check(tables)
    assert {shard.rank for shard in plan.shards} == set(range(world_size))
    for table, constraint in parse_constraints(words, tables).items():
        assert obeys(plan, tables, table, constraint), (table, constraint, plan)


@pytest.mark.parametrize(
    ("world_size", "words", "options", "said"),
    [
        (
            4,
            "20=column-wise:4",
            {},
            "cat_20=column-wise:4: the static pipeline splits tables of 128 columns into shards of",
        ),
        (
            4,
            "20=column-wise",
            {"optimizer": RowWiseAdagrad(1e-8)},
            "does not split tables of 128 columns with this optimizer",
        ),
        (
            4,
            "20=row-wise",
            {},
            "cat_20=row-wise: the static pipeline splits rows only on two ranks or more, with --presort-ids",
        ),
        (1, "20=row-wise", {"split_rows": True}, "on two ranks or more"),
        (4, "5=row-wise", {"split_rows": True}, "its 3 rows are fewer than 4 ranks: choose table-wise"),
        (
            4,
            "5=data-parallel",
            {"replicate": False},
            "cat_5=data-parallel: the static pipeline replicates tables only on two",
        ),
        (4, "5=data-parallel", {"optimizer": RowWiseAdagrad(1e-8)}, "under exact Adagrad"),
        (
            4,
            "1=row-wise 20=column-wise:64",
            {"split_rows": True},
            "cat_20=column-wise:64: a row-wise table has all its columns on every",
        ),
        (
            4,
            "1=column-wise:64 2=column-wise:32 3=table-wise",
            {},
            "ask for shards of 32, 64, 128 columns: .* choose two",
        ),
        (
            1,
            "1=column-wise:64 2=table-wise",
            {},
            r"no plan of 1 rank\(s\) satisfies --constraints cat_1=column-wise:64 cat_2",
        ),
        (2, "0-25=data-parallel", {}, r"no plan of 2 rank\(s\) satisfies"),
        (
            2,
            "20=table-wise",
            {"memory_bytes": 10**10},
            "GB that a rank has; .* or leave out some of --constraints cat_20",
        ),
    ],
)
def test_what_no_plan_obeys_is_refused_by_name(world_size: int, words: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of(TABLES, world_size, *words.split(), **{"optimizer": Adagrad(1e-8), **options})


def test_no_constraints_change_no_plan() -> None:
    """And one constraint changes one."""
    free = make_plan(TABLES, Topology.one_node(2), 512 * 2)
    assert plan_of(TABLES, 2) == free != plan_of(TABLES, 2, "20=table-wise")


def test_flags_are_checked_before_anything_starts() -> None:
    flags = ["--constraints", "0,9=column-wise:64", "20=table-wise", "--seed", "3"]
    for pipeline in ("static", "torchrec", "five-stage"):
        config: RunConfig = parse_run("launch-bound", pipeline, flags, "", prints=False)
        assert config.pipeline.constraints == ("0,9=column-wise:64", "20=table-wise")
        with pytest.raises(ValueError, match="--constraints 99=table-wise: there is no table 99"):
            parse_run("launch-bound", pipeline, ["--constraints", "99=table-wise"], "", prints=False)


def test_a_small_table_that_host_memory_is_to_hold_is_not_replicated() -> None:
    words = ["5=hbm:0", "8=hbm:0.5", "12=hbm:1"]
    constraints = parse_constraints(words, TABLES)
    shares = {table: of.device_share for table, of in constraints.items() if of.device_share is not None}
    memory = TableMemory(share=0.9, shares=shares)
    topology = Topology.one_node(2)
    plan = make_plan(TABLES, topology, 1024, constraints=constraints, tiers=memory)
    assert {5, 8} <= {shard.table for shard in plan.shards}
    assert 12 in plan.replicated
    assert max(TABLES.rows[table] for table in (5, 8, 12)) <= 256


def test_pipelines_refuse_what_they_cannot_obey() -> None:
    smoke = preset("smoke")
    with pytest.raises(ValueError, match="cat_3=hbm:0\\.5: hbm is for tables in two tiers of memory: add"):
        changed(smoke, "static", constraints=("3=hbm:0.5",))
    with pytest.raises(ValueError, match="every pipeline splits the tables of this model by rows over all ranks"):
        changed(preset("smoke-dlrmv4"), "static", constraints=("1=table-wise",))
    assert replace(smoke.pipeline, constraints=("3=table-wise",)) != smoke.pipeline
