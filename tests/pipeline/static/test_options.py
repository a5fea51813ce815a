"""Options of the static pipeline."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.benchmark import StaticDenseOptions
from dlrm_bench.dlrm.dcnv2.config import OptimizerConfig
from dlrm_bench.dlrm.tables.dynamic.memory import RowPlaces
from dlrm_bench.pipeline.static.options import StaticOptions
from tests.cases import SMALL_MODEL
from tests.pipeline.small_runs import small
from tests.pipelines import changed


def test_peer_memory_needs_presorted_ids() -> None:
    with pytest.raises(ValueError, match="--peer-memory needs --presort-ids"):
        StaticOptions(peer_memory=True)
    assert StaticOptions(peer_memory=True, presort_ids=True).peer_memory


@pytest.mark.parametrize("graph", ["iteration", "try"])
def test_graphs_need_a_gpu(graph: str) -> None:
    said = StaticOptions(cuda_graph=graph).needs_gpu  # type: ignore[arg-type]
    assert said == f"--cuda-graph {graph} needs a GPU: on this machine choose --cuda-graph none"
    assert StaticOptions().needs_gpu is None


@pytest.mark.parametrize("presorted", [False, True])
def test_stage_3_gets_the_options_that_it_depends_on(presorted: bool) -> None:
    """Parts of a batch need sorted ids: FBGEMM's fused backward would update the tables once for each."""
    options = StaticOptions(presort_ids=presorted, peer_memory=presorted, fp8=presorted, overlap=not presorted)
    assert options.dense == StaticDenseOptions(eight_bits=presorted, peer_memory=presorted, may_go_in_parts=presorted)


SORTED: dict[str, Any] = {"presort_ids": True}
IN_PEERS = SORTED | {"peer_memory": True}


@pytest.mark.parametrize(
    ("options", "replicates", "splits_rows"),
    [
        ({}, (True, True), (False, False)),
        (SORTED, (True, True), (True, True)),
        (IN_PEERS, (False, True), (False, True)),
        (SORTED | {"table_memory": "0.5"}, (True, True), (False, False)),
        (IN_PEERS | {"table_memory": "0.5"}, (False, True), (False, False)),
        (SORTED | {"dynamic_rows": 100}, (False, False), (False, False)),
        (IN_PEERS | {"dynamic_rows": 100}, (False, False), (False, False)),
    ],
)
def test_plans_have_what_the_way_of_the_exchanges_allows(
    options: dict[str, Any], replicates: tuple[bool, bool], splits_rows: tuple[bool, bool]
) -> None:
    """On one node and on two."""
    of_run = StaticOptions(**options)
    assert tuple(map(of_run.replicates, (1, 2))) == replicates
    assert tuple(map(of_run.splits_rows, (1, 2))) == splits_rows


@dataclass(kw_only=True, slots=True, frozen=True)
class WarmingUp(OptimizerConfig):
    def rate(self, iteration: int) -> float:  # type: ignore[override]
        return min(1.0, iteration / 4) * self.learning_rate


def test_a_schedule_is_refused_where_each_step_would_be_a_capture() -> None:
    optimizer = WarmingUp()
    with pytest.raises(ValueError, match="--cuda-graph iteration captures FBGEMM's update with its learning rate"):
        changed(small(), optimizer=optimizer, cuda_graph="iteration")
    cases: tuple[dict[str, Any], ...] = ({"presort_ids": True, "cuda_graph": "iteration"}, {})
    for options in cases:
        assert changed(small(), optimizer=optimizer, **options).optimizer is optimizer
    assert changed(small(), cuda_graph="iteration").optimizer.rate(1) is None


def test_dynamic_rows_are_a_number_of_places() -> None:
    for places in (0, -1, 1 << 30):
        with pytest.raises(ValueError, match=rf"--dynamic-rows is {places}: choose 1 to 536870912 places"):
            StaticOptions(dynamic_rows=places)
    with pytest.raises(ValueError, match="--evict-rows reuses places of --dynamic-rows: set --dynamic-rows"):
        StaticOptions(evict_rows=True)


def test_dynamic_rows_of_pooled_tables_are_refused_where_they_cannot_be() -> None:
    fits = {"dynamic_rows": 100}
    assert changed(small(), **fits).pipeline.row_places == RowPlaces(100, False)
    assert changed(small(), **fits, constraints=("0=table-wise",)).pipeline.dynamic_rows == 100
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"table_memory": "0.5", "presort_ids": True}, "--table-memory holds all rows, in two tiers: choose one"),
        ({"constraints": ("0=column-wise",)}, "0=column-wise: with --dynamic-rows each table is whole on one rank"),
        ({"constraints": ("0=row-wise",)}, "0=row-wise: with --dynamic-rows each table is whole on one rank"),
        ({"constraints": ("0=data-parallel",)}, "=data-parallel: with --dynamic-rows each table is whole on one rank"),
        ({"dynamic_rows": 3}, r"--dynamic-rows is 3: a rank may own any of \d+ tables, and warms up with a row"),
        ({"optimizer": OptimizerConfig(embedding="rowwise_adagrad")}, "rowwise_adagrad would round differently"),
        ({"model": replace(SMALL_MODEL, embedding_dim=48, bottom_mlp=(24, 48))}, "a power of two of columns"),
        ({"model": replace(SMALL_MODEL, num_embeddings=(1 << 30, 1 << 30, 1, 1, 1, 1))}, "31-bit row numbers"),
    )
    for options, said in cases:
        with pytest.raises(ValueError, match=said):
            changed(small(), **fits | options)


@pytest.mark.parametrize("options", [{}, {"peer_memory": True}, {"table_memory": "0.5"}])
def test_sorted_ids_are_refused_for_models_of_sequences(options: dict[str, Any]) -> None:
    said = (
        "--presort-ids, --peer-memory and --table-memory are for pooled tables: leave them out for a model of sequences"
    )
    with pytest.raises(ValueError, match=said):
        changed(preset("smoke-dlrmv4"), "static", presort_ids=True, **options)


def test_raw_ids_need_places_and_have_no_table_to_be_checked_against() -> None:
    raw = {"model": replace(SMALL_MODEL, raw_ids=True)}
    assert changed(small(), dynamic_rows=100, **raw).model.tables.raw_ids
    large = replace(raw["model"], num_embeddings=(1 << 30, 1 << 30, 1, 1, 1, 1))
    assert changed(small(), dynamic_rows=100, model=large).model.tables.raw_ids, "expected rows bound nothing"
    with pytest.raises(ValueError, match=r"--model\.raw-ids gives no number of rows: add --dynamic-rows N"):
        changed(small(), **raw)
    with pytest.raises(ValueError, match=r"--check-ids compares ids with sizes of tables, and with --model\.raw-ids"):
        changed(small(), dynamic_rows=100, check_ids=True, **raw)


def test_the_plan_for_dynamic_rows_has_whole_tables() -> None:
    """Which so have one owner, whatever the number of ranks."""
    options = StaticOptions(dynamic_rows=100, presort_ids=True)
    for nodes in (1, 2):
        assert not options.replicates(nodes)
        assert not options.splits_rows(nodes)
        assert not options.splits_columns
    assert StaticOptions().splits_columns
