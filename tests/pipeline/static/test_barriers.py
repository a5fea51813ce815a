"""Cross-cutting: every barrier of peer memory is needed, and no other one. Ordered by streams as on GPUs, what the
ranks write into each other's memory races nowhere, and would without any one of the barriers."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.pipeline.static import batch_schedule
from dlrm_bench.pipeline.static import pipeline as static
from tests.pipeline.static.test_pipeline import batches_of, small
from tests.pipelines import static_pipeline
from tests.races import Barrier, Event, Recorder, races

STEPS = 2
"""Before an evaluation, and after it: each of the two slots is used again."""
CONFIG = small("sharded", 2 * STEPS, presort_ids=True, peer_memory=True)


def halves(config: TrainingConfig, topology: Topology, *_: Any, **__: Any) -> Plan:
    """A plan that gives each of a node's two ranks one half of the columns of the same tables."""
    nodes, columns = topology.nodes, config.model.embedding_dim // 2
    shards = [
        Shard(2 * (table % nodes) + half, table, half * columns, columns)
        for table in range(config.model.num_features)
        for half in range(2)
    ]
    return Plan(world_size=2 * nodes, shards=tuple(sorted(shards)))


def whole(config: TrainingConfig, topology: Topology, *_: Any, **__: Any) -> Plan:
    """A plan whose ranks hold different tables, so that each sorts for itself."""
    world_size, dim = topology.world_size, config.model.embedding_dim
    shards = (Shard(table % world_size, table, 0, dim) for table in range(config.model.num_features))
    return Plan(world_size=world_size, shards=tuple(sorted(shards)))


def record(ranks: Ranks) -> dict[int, list[Event]]:
    """What this rank launches in a training with an evaluation: of small batches, and of such as go in two halves, from
    tables whose ids, on one node, the ranks sort together."""
    events = {}
    for parts in (1, 2):
        with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
            patch.setattr(static, "plan_for", halves if parts == 2 else whole)
            if parts == 2:
                patch.setattr(batch_schedule, "_FILLING_BATCH", 1)
            pipeline = static_pipeline(CONFIG, ranks)
            assert (pipeline.ebc._shared_sort is not None) == (parts == 2 and ranks.nodes == 1)
            batches = iter(batches_of(CONFIG, ranks.rank, ranks.world_size))
            training = islice(batches, 2 * STEPS)
            for _ in range(STEPS):
                pipeline.train_step(training)
            list(pipeline.evaluate(iter(batches_of(CONFIG, ranks.rank, ranks.world_size)[-3:])))
            for _ in range(STEPS):
                pipeline.train_step(training)
            pipeline.close()
        events[parts] = recorder.events
    return events


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_barrier_orders_what_nothing_else_does(run_ranks: Callable[..., list[Any]], nodes: int) -> None:
    """Over nodes in each node, whose ranks alone share memory; what collectives between nodes order does not count."""
    per_rank = run_ranks(2 * nodes, record, nodes=nodes)
    for parts in (1, 2):
        for node in range(nodes):
            logs = [events[parts] for events in per_rank[2 * node : 2 * node + 2]]
            assert races(logs) == []
            names = {event.name for event in logs[0] if isinstance(event, Barrier)}
            end = "" if nodes == 1 else " staged"
            assert {f"pooled {parts - 1}{end}", f"gradients {parts - 1}{end}", "ids", "weights", "evaluated"} < names
            missed = [name for name in sorted(names) if not races(logs, without=name)]
            assert missed == []
