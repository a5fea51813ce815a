"""Picked ids: those of the rank's rows, in bags; batches that overflow the list are picked again, whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_bench.dlrm.batch_shape import BatchShape
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.tables.plan.plan import Shard
from dlrm_bench.dlrm.tables.pooled.row_parts import PickedIds, RowParts
from tests.kernels.devices import DEVICE

MODEL = ModelConfig(
    num_embeddings=(1000, 7, 90), multi_hot_sizes=(12, 1, 3), embedding_dim=16, bottom_mlp=(16,), top_mlp=(1,)
)
RANKS = 2


def bags_of(picked: PickedIds) -> list[list[int]]:
    offsets = picked.offsets.tolist()
    return [picked.rows[start:end].tolist() for start, end in pairwise(offsets)]


def draw(shards: tuple[Shard, ...], shape: BatchShape, seed: int) -> torch.Tensor:
    """Ids as the exchange leaves them, a fifth of them padding."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(shape.parts):
        for shard in shards:
            size = RANKS * shape.part_samples * MODEL.multi_hot_sizes[shard.table]
            ids = torch.randint(MODEL.rows[shard.table], (size,), generator=generator, dtype=torch.int32)
            blocks.append(ids.masked_fill(torch.rand(size, generator=generator) < 0.2, -1))
    return torch.cat(blocks).to(DEVICE)


def check(parts: RowParts, picked: PickedIds, ids: torch.Tensor, shards: tuple[Shard, ...], shape: BatchShape) -> None:
    bags, rows, numbers, at, first = bags_of(picked), [], [], 0, 0
    samples = RANKS * shape.part_samples
    for part in range(shape.parts):
        first = 0
        for nth, shard in enumerate(shards):
            hot = MODEL.multi_hot_sizes[shard.table]
            block, at = ids[at : at + samples * hot].view(samples, hot).tolist(), at + samples * hot
            for sample, bag in enumerate(block):
                own = [i // shard.row_parts for i in bag if i >= 0 and i % shard.row_parts == shard.row_part]
                assert bags.pop(0) == own
                rows += [first + row for row in own]
                numbers += [(part * samples + sample) * len(shards) + nth] * len(own)
            first += shard.rows(MODEL.tables)
    assert not bags
    assert int(picked.count) == len(rows) == int(picked.offsets[-1])
    assert picked.sort_rows.tolist() == rows + [-1] * (picked.capacity - len(rows))
    assert picked.bags[: len(rows)].tolist() == numbers
    assert not picked.rows[len(rows) :].any(), "rows that exist"


@given(st.integers(0, 10**6), st.sampled_from([1, 2]), st.integers(1, 6), st.integers(1, 5))
@settings(max_examples=25)
def test_bags_have_the_ids_of_this_ranks_rows(seed, parts, samples, row_parts):
    shape = BatchShape(samples=parts * samples, dtype=torch.float32, parts=parts)
    shards = (Shard(0, 0, 0, 16, seed % row_parts, row_parts), Shard(0, 1, 0, 16), Shard(0, 2, 0, 16, 0, 2))
    picking, ids = RowParts(MODEL.tables, shards, RANKS, shape, DEVICE), draw(shards, shape, seed)
    picked = picking.empty(whole=True)
    picking.pick(ids, picked)
    check(picking, picked, ids, shards, shape)


def test_a_batch_of_this_ranks_rows_alone_overflows_and_is_picked_again():
    shape = BatchShape(samples=200, dtype=torch.float32)
    shards = (Shard(0, 0, 0, 16, 1, 4),)
    picking, usual = RowParts(MODEL.tables, shards, RANKS, shape, DEVICE), draw((Shard(0, 0, 0, 16),), shape, 1)
    picked = picking.empty()
    assert picked.capacity < picking.num_ids / 2
    for ids, overflows in ((usual, False), (usual.clamp(min=0) // 4 * 4 + 1, True), (usual, False)):
        picked.reset()
        picking.pick(ids, picked)
        assert picked.overflows() == overflows
        if overflows:
            assert int(picked.offsets[-1]) == picked.capacity, "what is looked up stays in the list"
        whole = picking.empty(whole=True)
        picking.pick(ids, whole)
        check(picking, whole, ids, shards, shape)
        assert not whole.overflows()


@pytest.mark.gpu
def test_picking_can_be_captured():
    shape = BatchShape(samples=64, dtype=torch.float32)
    shards = (Shard(0, 0, 0, 16, 1, 2), Shard(0, 2, 0, 16, 0, 3))
    picking, ids = RowParts(MODEL.tables, shards, RANKS, shape, DEVICE), draw(shards, shape, 1)
    picked = picking.empty()
    picking.pick(ids, picked)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        picking.pick(ids, picked)
    for seed in (2, 3):
        ids.copy_(draw(shards, shape, seed))
        picked.reset()
        graph.replay()
        assert not picked.overflows()
        torch.cuda.synchronize()
        check(picking, picked, ids, shards, shape)
