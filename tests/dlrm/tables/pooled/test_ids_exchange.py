"""Exchanges of ids over nodes bring what one collective over all ranks brings, and a table's ids once to each node."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.runtime.peer_memory import PeerMemory
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.pooled.ids_exchange import CollectiveIdsExchange, NodeIdsExchange
from dlrm_bench.dlrm.tables.pooled.ways import Layout, OverNodes
from tests.dlrm.tables.pooled.test_static_ebc import BARRIERS, MODEL, draw_ids, in_row_parts, random_plan

SHAPES = [BatchShape(samples=6, dtype=torch.float32, parts=2), BatchShape(samples=5, dtype=torch.float32)]
BATCHES = 3


def exchange(ranks: Ranks) -> bool:
    memory = PeerMemory(ranks)
    for seed, shape in enumerate(SHAPES):
        plan = in_row_parts(random_plan(seed, ranks.world_size), seed)
        layout = Layout(MODEL.tables, plan, ranks, shape)
        flat = CollectiveIdsExchange(layout)
        nodes = NodeIdsExchange(layout, OverNodes(memory, BARRIERS))
        expected, buffers = flat.empty(), [nodes.empty() for _ in range(2)]
        for turn in range(BATCHES):
            ids, out = draw_ids(shape.samples, ranks.rank, turn).to(ranks.device), buffers[turn % 2]
            flat.exchange(ids, expected)
            nodes.exchange(ids, out)
            assert torch.equal(out.own, expected.own), f"batch {turn} of {shape} on rank {ranks.rank}"
        size = ranks.local_world_size
        for node, sent in enumerate(nodes._send_splits):
            held = {shard.table for shard in plan.shards if shard.rank // size == node}
            assert sent == shape.samples * sum(MODEL.multi_hot_sizes[table] for table in held), "each table once"
    return True


@pytest.mark.parametrize(("world_size", "gpu"), [(4, False), pytest.param(4, True, marks=pytest.mark.multi_gpu)])
def test_two_nodes_bring_what_one_collective_does(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    assert all(run_ranks(world_size, exchange, gpu=gpu, nodes=2))
