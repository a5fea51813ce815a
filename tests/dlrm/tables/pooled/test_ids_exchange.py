"""Exchanges of ids over nodes bring what one collective over all ranks brings, and a table's ids once to each node."""

from collections.abc import Callable
from dataclasses import replace
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


def exchange(ranks: Ranks, raw: bool) -> bool:
    memory, tables = PeerMemory(ranks), replace(MODEL.tables, raw_ids=raw)
    for seed, shape in enumerate(SHAPES):
        plan = in_row_parts(random_plan(seed, ranks.world_size), seed)
        layout = Layout(tables, plan, ranks, shape)
        flat, numbers = CollectiveIdsExchange(layout), CollectiveIdsExchange(replace(layout, tables=MODEL.tables))
        of_numbers = numbers.empty()
        nodes = NodeIdsExchange(layout, OverNodes(memory, BARRIERS))
        expected, buffers = flat.empty(), [nodes.empty() for _ in range(2)]
        for turn in range(BATCHES):
            ids, out = draw_ids(shape.samples, ranks.rank, turn).to(ranks.device), buffers[turn % 2]
            numbers.exchange(ids, of_numbers)
            ids = spread(ids) if raw else ids
            flat.exchange(ids, expected)
            assert torch.equal(expected.own, spread(of_numbers.own) if raw else of_numbers.own)
            nodes.exchange(ids, out)
            assert torch.equal(out.own, expected.own), f"batch {turn} of {shape} on rank {ranks.rank}"
        size = ranks.local_world_size
        for node, sent in enumerate(nodes._send_splits):
            held = {shard.table for shard in plan.shards if shard.rank // size == node}
            words = 2 if raw else 1
            assert sent == words * shape.samples * sum(MODEL.multi_hot_sizes[table] for table in held), "each once"
    return True


def spread(rows: torch.Tensor) -> torch.Tensor:
    """Raw ids, which differ in both words."""
    return rows.long() * -0x100000003 + (1 << 62)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("world_size", "gpu"), [(4, False), pytest.param(4, True, marks=pytest.mark.multi_gpu)])
def test_two_nodes_bring_what_one_collective_does(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool, raw: bool
) -> None:
    assert all(run_ranks(world_size, exchange, raw, gpu=gpu, nodes=2))
