"""Cross-cutting: plans of whole tables, of parts of their columns, and of both train to the same bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dlrm_bench.dlrm.runtime.ranks import Ranks
from tests.cases import GPU_PLACES
from tests.pipeline.static.test_tiers import CONFIG, MODEL, Trained, check_equal, train
from tests.pipelines import changed, static_pipeline

PLANS = (("0-2=table-wise",), ("0-2=column-wise",), ("0=column-wise", "1-2=table-wise"))
WIDE = changed(CONFIG, model=replace(MODEL, embedding_dim=64, bottom_mlp=(64,)), local_batch_size=128, peer_memory=True)


def columns_of_tables(ranks: Ranks, words: Sequence[str]) -> list[list[int]]:
    pipeline = static_pipeline(changed(WIDE, constraints=words), ranks)
    shards = pipeline.ebc.plan.shards
    pipeline.close()
    return [sorted(shard.columns for shard in shards if shard.table == table) for table in range(3)]


def by_plan(ranks: Ranks) -> tuple[list[list[list[int]]], list[Trained]]:
    """Columns of each table's parts, and what is trained, of each plan; and of one of them with rows in host memory.

    All ids are of three rows a table, whose gradients are sums of many.
    """
    on_gpu = {"cuda_graph": "iteration", "overlap": True} if ranks.device.type == "cuda" else {}
    configs = [changed(WIDE, constraints=words, **on_gpu) for words in PLANS]
    configs.append(changed(WIDE, constraints=PLANS[0], table_memory="0.5", **on_gpu))
    return [columns_of_tables(ranks, words) for words in PLANS], [train(ranks, config, hot=3) for config in configs]


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), GPU_PLACES[1]])
def test_plans_train_to_equal_bits(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    for columns, (whole, *others) in run_ranks(world_size, by_plan, gpu=gpu):
        assert columns == [[[64]] * 3, [[32, 32]] * 3, [[32, 32], [64], [64]]]
        for other in others:
            check_equal(other, whole)
