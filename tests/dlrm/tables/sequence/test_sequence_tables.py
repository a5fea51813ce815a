"""Tables whose rows are looked up one by one, against TorchRec's EmbeddingCollection with its fused optimizer."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad as TorchRecRowWiseAdagrad

from dlrm_bench.dlrm.optimizers import RowWiseAdagrad
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.initial_weights import fill_initial_weights
from dlrm_bench.dlrm.tables.sequence.capacity import IdCapacity
from dlrm_bench.dlrm.tables.sequence.sequence_tables import DistributedRows, SequenceTables
from dlrm_bench.dlrm.tables.tables import Tables
from dlrm_bench.kernels.non_finite import Watch

TABLES = Tables(names=("item", "artist", "user"), rows=(2600, 3, 40), columns=16, hot=(1, 1, 1))
ROOMY = IdCapacity((1400, 30, 20))
TIGHT = replace(ROOMY, distinct=1)
OPTIMIZER, RATE, SEED = RowWiseAdagrad(1e-8), 0.05, 3
STEPS = 20


def draw(rank: int, step: int, events: int = 200, stride: int = 1) -> list[Tensor]:
    """Ids of each table: skewed ones, of each rank and step another number, 0 among them. stride: multiples of it."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = []
    for rows, room in zip(TABLES.rows, ROOMY.places, strict=True):
        most = min(room, events)
        count = int(torch.randint(most + 1, (1,), generator=generator)) if stride == 1 else most
        skewed = torch.rand(count, generator=generator) ** (3 if stride == 1 else 1)
        ids.append(((skewed * rows).int() // stride * stride).int())
    return ids


def in_places(ids: list[Tensor], capacity: IdCapacity = ROOMY) -> Tensor:
    """The ids in their places, int32 [K]."""
    padded = [
        torch.cat([of, torch.full((room - len(of),), -1).int()]) for of, room in zip(ids, capacity.places, strict=True)
    ]
    return torch.cat(padded)


def gradient_of(ids: list[Tensor], rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7000 * step + rank)
    return [torch.randn(len(of), TABLES.columns, generator=generator) for of in ids]


def gradients_in_places(gradients: list[Tensor], capacity: IdCapacity = ROOMY) -> Tensor:
    """Gradients [K, columns], those of unused places not a number, which must not matter."""
    blocks = []
    for of, room in zip(gradients, capacity.places, strict=True):
        blocks += [of, torch.full((room - len(of), TABLES.columns), float("nan"))]
    return torch.cat(blocks)


def new_tables(ranks: Ranks, capacity: IdCapacity = ROOMY, **options: Any) -> SequenceTables:
    rate = torch.tensor([RATE], device=ranks.device)
    return SequenceTables(TABLES, capacity, ranks, OPTIMIZER, rate, SEED, **options)


def distributed(tables: SequenceTables, ids: Tensor, into: DistributedRows) -> tuple[DistributedRows, bool]:
    """The rows that a batch is trained with, and whether it overflows."""
    tables.expect(into)
    tables.input_dist(ids, into)
    eager = tables.eager_rows(into)
    return (into, False) if eager is None else (eager, True)


def state_of(tables: SequenceTables) -> list[tuple[Tensor, Tensor]]:
    return [(shard.weights.cpu(), shard.state.cpu()) for shard in tables.table_shards()]


def torchrec_tables(ranks: Ranks) -> DistributedModelParallel:
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=TABLES.columns, feature_names=[name])
            for name, rows in zip(TABLES.names, TABLES.rows, strict=True)
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(TorchRecRowWiseAdagrad, collection.parameters(), {"lr": RATE, "eps": OPTIMIZER.eps})
    sharder = EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        collection,
        {name: row_wise() for name in TABLES.names},
        sharder=sharder,
        world_size=ranks.world_size,
        local_size=ranks.local_world_size,
        device_type=ranks.device.type,
    )
    model = DistributedModelParallel(collection, device=ranks.device, plan=ShardingPlan({"": plan}), sharders=[sharder])
    for number, (rows, (first, weights)) in enumerate(zip(TABLES.rows, torchrec_parts(model), strict=True)):
        fill_initial_weights(weights, seed=SEED, table=number, num_embeddings=rows, row_offset=first)
    return model


def torchrec_parts(model: DistributedModelParallel) -> list[tuple[int, Tensor]]:
    """First row and weights of this rank's part of each table."""
    of_table = {key.split(".")[-2]: value for key, value in model.state_dict().items()}
    shards = [of_table[name].local_shards()[0] for name in TABLES.names]
    return [(shard.metadata.shard_offsets[0], shard.tensor) for shard in shards]


def beside_torchrec(ranks: Ranks) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[int, Tensor]], float]:
    """This rank's rows of each table, TorchRec's with their first row, and how far apart lookups were at most."""
    ours, theirs, apart = new_tables(ranks), torchrec_tables(ranks), 0.0
    out, rows = torch.full((ROOMY.count, TABLES.columns), 7.0, device=ranks.device), ours.empty_ids()
    ends = [0, *accumulate(ROOMY.places)]
    for step in range(STEPS):
        ids = draw(ranks.rank, step)
        if step == 3 and ranks.rank == 0:
            ids = [of[:0] for of in ids]  # a rank without ids
        ours.expect(rows)
        ours.input_dist(in_places(ids).to(ranks.device), rows)
        assert ours.eager_rows(rows) is None
        ours.forward(rows, out)
        lengths = [torch.tensor([len(of)], dtype=torch.int32) for of in ids]
        kjt = KeyedJaggedTensor(list(TABLES.names), torch.cat(ids), lengths=torch.cat(lengths))
        found = theirs(kjt.to(ranks.device))
        values = [found[name].values() for name in TABLES.names]
        for start, end, of in zip(ends, ends[1:], values, strict=False):
            apart = max(apart, float((out[start : start + len(of)] - of).abs().sum()))
            assert not out[start + len(of) : end].any()
        gradients = gradient_of(ids, ranks.rank, step)
        torch.autograd.backward(values, [of.to(ranks.device) for of in gradients])
        ours.backward(rows, gradients_in_places(gradients).to(ranks.device))
    return state_of(ours), [(first, weights.cpu()) for first, weights in torchrec_parts(theirs)], apart


def check_beside_torchrec(results: list[Any]) -> None:
    for table, rows in enumerate(TABLES.rows):
        ours, theirs = torch.full((2, rows, TABLES.columns), float("nan"))
        for rank, (mine, parts, apart) in enumerate(results):
            assert apart < 1e-4
            ours[rank :: len(results)] = mine[table][0]
            first, part = parts[table]
            theirs[first : first + len(part)] = part
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equals_torchrec(run_ranks, world_size: int) -> None:
    check_beside_torchrec(run_ranks(world_size, beside_torchrec))


@pytest.mark.gpu
def test_equals_torchrec_on_a_gpu(run_ranks) -> None:
    check_beside_torchrec(run_ranks(1, beside_torchrec, gpu=True))


@pytest.mark.multi_gpu
def test_equals_torchrec_on_gpus(run_ranks) -> None:
    check_beside_torchrec(run_ranks(2, beside_torchrec, gpu=True))


# Overflows

OVERFLOWING = ((), (0,), (0, 1), (1,), ())
"""Ranks whose batches overflow tight lists, by step."""


def overflowing(rank: int, step: int, ranks: int) -> list[Tensor]:
    """Ids of rank 0 alone, as many as there is room for, where the rank overflows at this step."""
    return draw(rank, step, events=1400, stride=ranks) if rank in OVERFLOWING[step] else draw(rank, step)


def trained(ranks: Ranks, capacity: IdCapacity, exchange: torch.dtype) -> tuple[list[Any], list[Tensor], list[bool]]:
    """This rank's rows, what it looked up, and which batches overflowed."""
    tables, lookups, overflows = new_tables(ranks, capacity, exchange=exchange), [], []
    slots, out = [tables.empty_ids() for _ in range(2)], torch.empty(capacity.count, TABLES.columns)
    for step in range(len(OVERFLOWING)):
        ids = overflowing(ranks.rank, step, ranks.world_size)
        rows, overflowed = distributed(tables, in_places(ids), slots[step % 2])
        tables.forward(rows, out)
        tables.backward(rows, gradients_in_places(gradient_of(ids, ranks.rank, step)))
        lookups.append(out.clone())
        overflows.append(overflowed)
    return state_of(tables), lookups, overflows


TRAINED = {"tight": (TIGHT, torch.float32), "roomy": (ROOMY, torch.float32), "bf16": (TIGHT, torch.bfloat16)}


def trained_alike(ranks: Ranks) -> dict[str, Any]:
    return {name: trained(ranks, *of) for name, of in TRAINED.items()} | {"again": trained(ranks, *TRAINED["tight"])}


def test_batches_that_overflow_train_as_in_longer_lists(run_ranks) -> None:
    for results in run_ranks(2, trained_alike):
        assert results["tight"][2] == [bool(of) for of in OVERFLOWING]
        assert not any(results["roomy"][2])
        for name, exact in (("roomy", True), ("again", True), ("bf16", False)):
            close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 0.1, "atol": 0.02}
            for expected, got in zip(results["tight"][0], results[name][0], strict=True):
                torch.testing.assert_close(got, expected, **close)
            for expected, got in zip(results["tight"][1], results[name][1], strict=True):
                torch.testing.assert_close(got, expected, **close)
        lookups = zip(results["bf16"][1], results["tight"][1], strict=True)
        assert not all(torch.equal(*of) for of in lookups)


# Capacities, updates that stop


def one_rank(device: str = "cpu") -> Ranks:
    return Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device(device))


def test_batches_of_several_capacities_train_the_same_tables() -> None:
    tables, other = new_tables(one_rank()), new_tables(one_rank())
    small = IdCapacity((220, 210, 20))
    sized = other.sized(small)
    for step in range(4):
        ids = draw(0, step)
        gradients = gradient_of(ids, 0, step)
        for of, capacity in ((tables, ROOMY), (sized if step % 2 else other, small if step % 2 else ROOMY)):
            rows, _ = distributed(of, in_places(ids, capacity), of.empty_ids())
            of.backward(rows, gradients_in_places(gradients, capacity))
    for expected, got in zip(state_of(tables), state_of(sized), strict=True):
        assert torch.equal(expected[0], got[0])
        assert torch.equal(expected[1], got[1])


def test_a_raised_flag_stops_the_update() -> None:
    tables, ids = new_tables(one_rank()), draw(0, 1)
    rows, _ = distributed(tables, in_places(ids), tables.empty_ids())
    watch, before = Watch(torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)), state_of(tables)
    before = [(weights.clone(), state.clone()) for weights, state in before]
    gradients = gradients_in_places(gradient_of(ids, 0, 1))
    tables.backward(rows, gradients, watch)
    for expected, got in zip(before, state_of(tables), strict=True):
        assert torch.equal(expected[0], got[0])
    watch.stopped.zero_()
    gradients[0] = float("inf")
    tables.backward(rows, gradients, watch)
    assert watch.bad.item() == 1
    item, (weights, state) = int(ids[0][0]), state_of(tables)[0]
    assert torch.equal(weights[item], before[0][0][item])
    assert state[item] == 0
    assert state.count_nonzero() == len(ids[0].unique()) - 1


# Graphs


def captured_and_eager(ranks: Ranks) -> tuple[list[bool], list[bool]]:
    """Whether weights of graphs' replays equal those of eager steps, bit by bit, and which batches overflowed."""
    states, overflows = [], []
    for replays in (False, True):
        tables = new_tables(ranks, TIGHT)
        rows, overflows = tables.empty_ids(), []
        ids = torch.full((TIGHT.count,), -1, dtype=torch.int32, device=ranks.device)
        gradients = torch.zeros(TIGHT.count, TABLES.columns, device=ranks.device)
        out, graphs = torch.empty_like(gradients), []

        def first(tables: Any = tables, ids: Tensor = ids, rows: Any = rows) -> None:
            tables.input_dist(ids, rows)

        def rest(tables: Any = tables, rows: Any = rows, out: Tensor = out, gradients: Tensor = gradients) -> None:
            tables.forward(rows, out)
            tables.backward(rows, gradients + 0.1 * out)

        if replays:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for work in (first, rest):
                    work()  # of no ids
            torch.cuda.synchronize()
            for work in (first, rest):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    work()
                graphs.append(graph)
        for step in range(len(OVERFLOWING)):
            of_rank = overflowing(ranks.rank, step, ranks.world_size)
            ids.copy_(in_places(of_rank))
            gradients.copy_(gradients_in_places(gradient_of(of_rank, ranks.rank, step)).nan_to_num(0))
            tables.expect(rows)
            graphs[0].replay() if replays else first()
            eager = tables.eager_rows(rows)
            overflows.append(eager is not None)
            if eager is not None:
                rest(rows=eager)
            else:
                graphs[1].replay() if replays else rest()
        torch.cuda.synchronize()
        states.append([tensor for pair in state_of(tables) for tensor in pair])
    return [torch.equal(*of) for of in zip(*states, strict=True)], overflows


@pytest.mark.gpu
def test_stages_are_captured_on_a_gpu(run_ranks) -> None:
    assert run_ranks(1, captured_and_eager, gpu=True) == [([True] * 6, [False] * 5)]


@pytest.mark.multi_gpu
def test_stages_are_captured_with_their_exchanges_and_overflows(run_ranks) -> None:
    assert run_ranks(2, captured_and_eager, gpu=True) == [([True] * 6, [bool(of) for of in OVERFLOWING])] * 2
