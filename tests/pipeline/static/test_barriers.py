"""Cross-cutting: every barrier of peer memory is needed, and no other. Ordered by streams as on GPUs, the ranks' writes
into each other's memory do not race, and would without any one of the barriers. The launched barriers are those that
concurrency.py declares, and CONCURRENCY.md names all of them, and all streams."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dlrm_bench.dlrm.config import TrainingConfig
from dlrm_bench.dlrm.dcnv2 import static_schedule
from dlrm_bench.dlrm.dcnv2.concurrency import bucket_gradients, stage_streams
from dlrm_bench.dlrm.runtime.peer_memory import Barrier
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.runtime.streams import Stream
from dlrm_bench.dlrm.runtime.topology import Topology
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.pipeline.static import pipeline as static
from dlrm_bench.pipeline.static.concurrency import pipeline_barriers, pipeline_streams
from tests.pipeline.static.test_pipeline import batches_of, small
from tests.pipelines import static_pipeline
from tests.races import Event, Meeting, Recorder, races

STEPS = 2
"""Steps before an evaluation, and after it: each of the two slots is used again."""
CONFIG = small("sharded", 2 * STEPS, presort_ids=True, peer_memory=True)
BUCKETS = {
    1: ("top_mlp.0.", "top_mlp.1.", "cross.0.", "cross.1.", "bottom_mlp.0."),
    2: ("top_mlp.0.", "cross.0.", "cross.1.", "bottom_mlp.0."),
}
"""The beginnings of the dense buckets' names, by the number of parts of the batch."""
PAGE = Path(static.__file__).with_name("CONCURRENCY.md")


def halves(config: TrainingConfig, topology: Topology, *_: Any, **__: Any) -> Plan:
    """Returns a plan that gives each of a node's two ranks one half of the columns of the same tables."""
    nodes, columns = topology.nodes, config.model.embedding_dim // 2
    shards = [
        Shard(2 * (table % nodes) + half, table, half * columns, columns)
        for table in range(config.model.num_features)
        for half in range(2)
    ]
    return Plan(world_size=2 * nodes, shards=tuple(sorted(shards)))


def whole(config: TrainingConfig, topology: Topology, *_: Any, **__: Any) -> Plan:
    """Returns a plan whose ranks hold different tables, so that each sorts for itself."""
    world_size, dim = topology.world_size, config.model.embedding_dim
    shards = (Shard(table % world_size, table, 0, dim) for table in range(config.model.num_features))
    return Plan(world_size=world_size, shards=tuple(sorted(shards)))


@dataclass(frozen=True, slots=True)
class Launched:
    """The launches of a rank."""

    events: list[Event]
    streams: set[Stream]


def record(ranks: Ranks) -> dict[int, Launched]:
    """Returns this rank's launches in a training with an evaluation: of small batches, and of those that go in two
    halves, from tables whose ids, on one node, the ranks sort together."""
    launched = {}
    for parts in (1, 2):
        with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
            patch.setattr(static, "plan_for", halves if parts == 2 else whole)
            if parts == 2:
                patch.setattr(static_schedule, "_FILLING_BATCH", 1)
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
        launched[parts] = Launched(recorder.events, recorder.streams)
    return launched


def declared(parts: int, nodes: int) -> set[Barrier]:
    """The barriers of the static pipeline and of DLRM-DCNv2's stage 3."""
    return {*pipeline_barriers(parts, nodes), *map(bucket_gradients, BUCKETS[parts])}


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_barrier_orders_what_nothing_else_does(run_ranks: Callable[..., list[Any]], nodes: int) -> None:
    """Over nodes in each node, whose ranks alone share memory; what collectives between nodes order does not count."""
    per_rank = run_ranks(2 * nodes, record, nodes=nodes)
    for parts in (1, 2):
        streams = {stream for launched in per_rank for stream in launched[parts].streams}
        assert streams <= {*pipeline_streams(), *stage_streams(CONFIG.model)}
        for node in range(nodes):
            logs = [launched[parts].events for launched in per_rank[2 * node : 2 * node + 2]]
            assert races(logs) == []
            barriers = {event.barrier for event in logs[0] if isinstance(event, Meeting)}
            assert barriers == declared(parts, nodes)
            missed = [barrier.name for barrier in barriers if not races(logs, without=barrier)]
            assert missed == []


def test_the_page_names_every_stream_and_barrier() -> None:
    page = PAGE.read_text()
    names = {value.name for values in (pipeline_streams(), stage_streams(CONFIG.model)) for value in values}
    names |= {barrier.name for parts in (1, 2) for barrier in declared(parts, nodes=1)}
    # One line of the page is of all layers, parts or buckets.
    general = {re.sub(r"\d+", "N", re.sub(r"^\w+\.\d+\. gradients$", "BUCKET gradients", name)) for name in names}
    written = set(re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE))
    assert general == written
