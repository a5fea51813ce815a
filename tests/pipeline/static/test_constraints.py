"""Cross-cutting: the static pipeline under constraints of a user: the plan is as asked, and losses are the same."""

from itertools import islice
from typing import Any

import pytest

from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.plan import Plan
from tests.pipelines import changed, static_pipeline

WORDS = ("20=row-wise", "0,9=table-wise", "5=table-wise", "10=data-parallel")


def train(ranks: Ranks, words: tuple[str, ...]) -> tuple[list[float], Plan]:
    data, length = DataConfig(random_batches=4, random_ids="uniform"), {"iterations": 4, "warmup_iterations": 0}
    small: dict[str, Any] = {"data": data, "target_auc": None, "local_batch_size": 16, **length}
    config = changed(preset("smoke"), "static", presort_ids=True, constraints=words, precision="fp32", **small)
    dataset = RandomDataset(config.data, config.model, config.seed)
    pipeline = static_pipeline(config, ranks)
    batches = iter(islice(dataset.train_batches(ranks.rank, ranks.world_size, 16), 4))
    losses = [float(pipeline.train_step(batches)) for _ in range(4)]
    pipeline.close()
    return losses, pipeline.ebc.plan


def train_twice(ranks: Ranks) -> tuple[list[float], list[float], Plan]:
    (free, _), (constrained, plan) = train(ranks, ()), train(ranks, WORDS)
    return free, constrained, plan


def test_the_plan_is_as_asked_and_the_losses_are_the_same(run_ranks: Any) -> None:
    for free, constrained, plan in run_ranks(2, train_twice):
        held = {
            table: [(s.columns, s.row_part, s.row_parts) for s in plan.shards if s.table == table]
            for table in range(26)
        }
        assert held[20] == [(16, 0, 2), (16, 1, 2)]
        assert all(held[table] == [(16, 0, 1)] for table in (0, 5, 9))
        assert 10 in plan.replicated
        assert 5 not in plan.replicated
        assert constrained == pytest.approx(free, rel=1e-6)
