"""The memory report adds up to what the model, its state and its batches need."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.data.batch import Batch, storage_bytes
from dlrm_bench.dlrm.dcnv2.config import DataConfig, OptimizerConfig, TableOptimizerName
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import COLUMNS
from dlrm_bench.dlrm.tables.dynamic.memory import bytes_of
from dlrm_bench.dlrm.tables.plan.costs import rank_loads
from dlrm_bench.dlrm.tables.plan.planner import plan_for
from dlrm_bench.dlrm.tables.pooled.static_ebc import StaticEBC
from dlrm_bench.pipeline.static.memory import memory_gb
from tests.pipelines import changed, run_config, static_pipeline

MODEL = preset("smoke").model
BATCH_SIZE = 64


def config(embedding: TableOptimizerName, presort: bool, peer_memory: bool) -> RunConfig:
    return run_config(
        "static",
        preset="test",
        model=MODEL,
        data=DataConfig(source="random", random_batches=4),
        optimizer=OptimizerConfig(embedding=embedding),
        presort_ids=presort,
        peer_memory=peer_memory,
        local_batch_size=BATCH_SIZE,
        precision="fp32",
        iterations=100,
    )


JOBS: list[tuple[TableOptimizerName, bool, bool]] = [
    ("adagrad", True, True),
    ("adagrad", True, False),
    ("adagrad", False, False),
    ("rowwise_adagrad", False, False),
]


def describe(ranks: Ranks) -> list[list[dict[str, float]]]:
    return [static_pipeline(config(*job), ranks).describe()["memory_gb"] for job in JOBS]


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.multi_gpu)])
def test_static_pipeline(run_ranks: Callable[..., list[Any]], gpu: bool) -> None:
    first, second = run_ranks(2, describe, gpu=gpu)
    for (embedding, presort, peer_memory), ranks in zip(JOBS, first, strict=True):
        optimizer = OptimizerConfig(embedding=embedding)
        made_for = config(embedding, presort, peer_memory)
        plan = plan_for(made_for, Topology.one_node(2), int(1e9), replicate=not peer_memory)
        loads = rank_loads(plan, MODEL.tables, optimizer.tables, 2 * BATCH_SIZE, 4)
        for rank, (memory, load) in enumerate(zip(ranks, loads, strict=True)):
            assert memory["tables"] * 1e9 == pytest.approx(load.table_bytes, rel=0.01)
            assert memory["optimizer_state"] * 1e9 == pytest.approx(load.state_bytes, rel=0.01)
            # Of each of four batches: the batch and the ids that the rank looks up. The two in evaluation have no
            # sorted ids.
            batch = storage_bytes(BATCH_SIZE, MODEL)
            ids = 2 * BATCH_SIZE * sum(MODEL.multi_hot_sizes[shard.table] for shard in plan.of_rank(rank)) * 4
            local = BATCH_SIZE * sum(MODEL.multi_hot_sizes[table] for table in plan.replicated) * 4
            starts = sum(MODEL.rows[table] for table in plan.replicated) * 4
            needed = 4 * (batch + ids + 3 * local + starts) + (4 * ids if presort else 0)
            assert memory["batches"] * 1e9 == pytest.approx(needed, rel=0.01)
            assert memory["dense_weights"] > 0
            peers = memory["peer_memory"] if peer_memory else 0
            if peer_memory:
                # Gradients of the rank's pooled vectors, inputs of the interaction of its samples.
                columns = max(sum(shard.columns for shard in plan.of_rank(owner)) for owner in range(2))
                inputs = BATCH_SIZE * (MODEL.num_features + 1) * MODEL.embedding_dim
                assert peers * 1e9 > 4 * (2 * BATCH_SIZE * columns + inputs)
            if gpu:
                assert 0 < sum(list(memory.values())[:4]) <= memory["allocated"] + peers
                assert memory["allocated"] <= memory["reserved"]
                assert memory["left"] > 0
    assert len(second) == len(first)


def described(ranks: Ranks, **options: Any) -> tuple[dict[str, float], StaticEBC]:
    pipeline = static_pipeline(changed(config("adagrad", presort=True, peer_memory=False), **options), ranks)
    return pipeline.describe()["memory_gb"][0], pipeline.ebc


def placed(ranks: Ranks) -> list[tuple[float, float]]:
    """The bytes of rows and their places that the record has, and those that are said before: of rows that are made
    when they are first named, and on two tiers."""
    memory, ebc = described(ranks, dynamic_rows=50_000, evict_rows=True)
    columns, batch = MODEL.embedding_dim, BATCH_SIZE * sum(MODEL.multi_hot_sizes)
    saved = 50_000 * 4 * COLUMNS  # of ids, only while the rows are saved
    held = sum(memory[name] for name in ("tables", "optimizer_state", "row_places"))
    found = [(held, bytes_of(50_000, columns, columns, batch) - saved)]
    memory, ebc = described(ranks, table_memory="0.5")
    assert ebc._tiers is not None
    placement = ebc._tiers.placement
    rings = sum(4 * len(pool.ring) for pool in placement.state.pools)
    # Of a row its place, count and last batch; of a place its row, and whether a guest has it.
    found.append((memory["row_places"], 6 * placement.rows + 5 * placement.device_rows + rings))
    return found


def test_places_of_rows_are_memory_too(run_ranks: Callable[..., list[Any]]) -> None:
    ((dynamic, tiers),) = run_ranks(1, placed)
    assert dynamic[0] * 1e9 == pytest.approx(dynamic[1], rel=0.01)
    assert tiers[0] * 1e9 == pytest.approx(tiers[1], rel=0.02)


def beside_tiers(ranks: Ranks) -> tuple[float, int, int]:
    """The bytes of rank 0's table rows in the record; those of its rows on the device, and of replicated tables."""
    memory, ebc = described(ranks, table_memory="0.5")
    assert ebc._tiers is not None
    replicated = sum(MODEL.rows[table] for table in ebc.plan.replicated)
    rows = ebc._tiers.placement.device_rows * ebc.columns
    return memory["table_rows"] * 1e9, 2 * 4 * rows, 2 * 4 * replicated * MODEL.embedding_dim


def test_replicated_tables_are_table_rows_beside_two_tiers_too(run_ranks: Callable[..., list[Any]]) -> None:
    recorded, tiers, replicated = run_ranks(2, beside_tiers)[0]
    assert replicated > 0.02 * tiers
    assert recorded == pytest.approx(tiers + replicated, rel=1e-3)


def views(ranks: Ranks) -> list[dict[str, float]]:
    batch = Batch.empty(BATCH_SIZE, MODEL)
    whole = torch.zeros(1000)
    return memory_gb(ranks, {"batch": batch, "views": [whole[:10], (whole, [whole[5:]])], "nothing": []})


def test_memory_that_several_views_show_counts_once(run_ranks: Callable[..., list[Any]]) -> None:
    ((memory,),) = run_ranks(1, views)
    expected = {"batch": storage_bytes(BATCH_SIZE, MODEL) / 1e9, "views": 4e-6, "nothing": 0}
    assert memory == pytest.approx(expected, rel=1e-3)
