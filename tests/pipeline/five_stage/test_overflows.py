"""Tables split by rows in the graph of a whole iteration: by capacity, and eagerly where a batch has more ids."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor, PoolingType
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage import reasons
from dlrm_bench.pipeline.five_stage.overflows import Overflows
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.trimmed.sharder import TrimmedEBCSharder
from tests.cases import CPU_PLACES, GPU_PLACES
from tests.pipeline.five_stage import any_models, test_iteration_graph
from tests.pipeline.five_stage.test_iteration_graph import BITS, EAGER, ON_GPU, WHOLE, assert_equal, prepare, stock
from tests.pipeline.five_stage.torchrec_models import HOT, batches, drain, state

STEPS, SIZE = 14, 32
MORE_RANKS = 1e-4
"""Means of gradients over more than two ranks, whose sums gloo rounds in another order."""


def whole(ranks: Ranks, data: list[Any], **built: Any) -> test_iteration_graph.Run:
    return test_iteration_graph.whole(ranks, data, sharder=TrimmedEBCSharder(HOT, row_capacity=1.0), **built)


def by_plan(ranks: Ranks, rtol: float) -> list[dict[str, Any]]:
    prepare(ranks)
    data = batches(ranks, STEPS, size=SIZE, fixed=True)
    described = []
    for plan in ("RW", "mixed"):
        run = whole(ranks, data, plan=plan)
        assert_equal(run.trained, stock(ranks, data, plan=plan), rtol)
        described.append(run.described)
    return described


@pytest.mark.parametrize(
    ("world_size", "gpu", "rtol"),
    [(world, gpu, BITS) for world, gpu in CPU_PLACES]
    + [pytest.param(*place.values, ON_GPU, marks=place.marks) for place in GPU_PLACES],
)
def test_rows_train_bit_by_bit_as_stock(run_ranks: Callable[..., Any], world_size: int, gpu: bool, rtol: float) -> None:
    for of_rank in run_ranks(world_size, by_plan, rtol, gpu=gpu):
        for described in of_rank:
            assert described["eager"] == {}
            assert (described["captures"], described["replays"]) == (1, STEPS - EAGER)
            (rooms,) = described["row_capacities"].values()
            assert "f3" in rooms or "f2" in rooms
            assert all(room <= SIZE * HOT[name] for name, room in rooms.items())
            # At least a row and an offset, int64, for each place in each of the two slots.
            assert described["bytes"]["row_capacities"] >= 2 * 8 * sum(rooms.values())
            assert described["bytes"]["batches"] > 0


def one_row(batch: Batch) -> Batch:
    """The batch with all ids of the first row."""
    kjt = batch.sparse_features
    ids = KeyedJaggedTensor(kjt.keys(), torch.zeros_like(kjt.values()), lengths=kjt.lengths(), stride=kjt.stride())
    return replace(batch, sparse_features=ids)


def overflowing(ranks: Ranks, steps: Sequence[int], of_ranks: Sequence[int], rtol: float) -> dict[str, Any]:
    prepare(ranks)
    data = batches(ranks, STEPS, size=SIZE, fixed=True)
    if ranks.rank in of_ranks:
        for step in steps:
            data[step] = one_row(data[step])
    run = whole(ranks, data, plan="mixed")
    assert_equal(run.trained, stock(ranks, data, plan="mixed"), rtol)
    return run.described


@pytest.mark.parametrize(
    ("world_size", "of_ranks", "rtol"), [(2, (1,), BITS), (3, (0, 2), MORE_RANKS), (2, (0, 1), BITS)]
)
def test_batches_with_more_ids_than_room_run_eagerly_on_all_ranks(
    run_ranks: Callable[..., Any], world_size: int, of_ranks: Sequence[int], rtol: float
) -> None:
    # An eager one, the second rehearsal, one between replays, two in a row, and the last one.
    for described in run_ranks(world_size, overflowing, (1, 4, 7, 9, 10, STEPS - 1), of_ranks, rtol):
        assert described["eager"] == {reasons.OVERFLOW(): 5}
        assert described["replays"] == STEPS - EAGER - 5


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES[1:])
def test_overflows_are_told_by_a_gpu(run_ranks: Callable[..., Any], world_size: int, gpu: bool) -> None:
    for described in run_ranks(world_size, overflowing, (7, 9, 10), (1,), ON_GPU, gpu=gpu):
        assert described["eager"] == {reasons.OVERFLOW(): 3}


def test_a_device_that_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never writes the word that the host looks for."""

    class Failed:
        def query(self) -> NoReturn:
            raise RuntimeError("CUDA error: device-side assert triggered")

    overflows = Overflows([], slots=2, device=torch.device("cpu"))
    overflows.launched(1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Failed)
    assert not overflows.of(0)
    with pytest.raises(RuntimeError, match="device-side assert"):
        overflows.of(1)


def two_towers() -> any_models.Loss:
    """Of sums: means of rows on several ranks are no sums of parts."""
    model = any_models.TwoTower()
    for tower in (model.user, model.item):
        for config in tower.tables.embedding_bag_configs():
            config.pooling = PoolingType.SUM
    return model


def nodes(ranks: Ranks) -> dict[str, Any]:
    """Table-row-wise and row-wise tables of two modules, on two nodes."""
    prepare(ranks)

    def data() -> list[Any]:
        made = any_models.batches(ranks, 10, sizes=(24,))
        for batch in made:
            lengths = torch.full((4 * 24,), 2, dtype=torch.int32)
            ids = torch.cat([torch.randint(0, any_models.ROWS[key], (48,)) for key in batch.bags.keys()])  # noqa: SIM118
            batch.bags = KeyedJaggedTensor(list(batch.bags.keys()), ids, lengths=lengths, stride=24)
        return made

    def plan(index: int, sequence: bool) -> str:
        return any_models.RW if index == 2 else any_models.TWRW

    torch.manual_seed(ranks.rank)
    made, results = data(), []
    for ours in (True, False):
        sharder = TrimmedEBCSharder(dict.fromkeys(("u0", "u1", "i0", "i1"), 2), row_capacity=2.0)
        sharders = {EmbeddingBagCollection: sharder} if ours else {}
        model, optimizer = any_models.build(ranks, two_towers, plan, sharders=sharders)
        if ours:
            with FiveStagePipeline(model, optimizer, ranks.device, WHOLE) as pipeline:
                results.append(drain(pipeline, iter(made)))
                described = pipeline.describe()
        else:
            results.append(drain(TrainPipelineSparseDist(model, optimizer, ranks.device), iter(made)))
        results[-1].state = state(model, optimizer)
    assert_equal(*results, MORE_RANKS)
    return described


def test_rows_of_nodes_train_as_stock(run_ranks: Callable[..., Any]) -> None:
    for described in run_ranks(4, nodes, nodes=2):
        assert described["eager"] == {}
        assert described["replays"] == 10 - EAGER
        assert set(described["row_capacities"]) == {"user.tables", "item.tables"}
