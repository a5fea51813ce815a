"""Graphs for batches of several sizes and numbers of tokens: what is replayed, padded or eager trains as stock does."""

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, _dynamo, nn
from torchrec.distributed import TrainPipelineSparseDist

import dlrm_bench.pipeline.five_stage.graph_pool
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.captured import Captured
from dlrm_bench.pipeline.five_stage.graph_pool import GraphPool, _room
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import dense_graph_on_cpu
from tests.pipeline.five_stage.any_models import (
    DIM,
    LONGEST,
    PLANS,
    Loss,
    Sequence,
    TwoTower,
    batches,
    build,
)
from tests.pipeline.five_stage.torchrec_models import Trained, drain, state

DENSE = FiveStageOptions(cuda_graph="dense")
PLACES = [(1, False), *GPU_PLACES]


def train(
    ranks: Ranks,
    model: Callable[[], Loss],
    options: FiveStageOptions | None,
    data: list[Any],
    around: Callable[[Any], Any] = lambda optimizer: optimizer,
) -> tuple[Trained, Any]:
    """By the five-stage pipeline, or by TorchRec's without options."""
    sharded, optimizer = build(ranks, model, PLANS["TW"], lambda p: around(torch.optim.SGD(p, lr=0.05, momentum=0.9)))
    torch.manual_seed(5)
    if options is None:
        pipeline: Any = TrainPipelineSparseDist(sharded, optimizer, ranks.device)
        trained = drain(pipeline, iter(data))
    else:
        with FiveStagePipeline(sharded, optimizer, ranks.device, options) as pipeline:
            trained = drain(pipeline, iter(data))
            trained.captured = pipeline._graph is not None and pipeline._graph.captured
            pipeline.graphs = 0 if pipeline._graph is None else len(pipeline._graph._pool)
            pipeline.step_captured = pipeline._graphed_update is not None and pipeline._graphed_update.captured
    trained.state = {name: value for name, value in state(sharded, optimizer).items() if "future" not in name}
    return trained, pipeline


def both(ranks: Ranks, model: Callable[[], Loss], data: list[Any], **more: Any) -> Any:
    """Trains by both; the five-stage pipeline after it."""
    signal.alarm(600)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ranks.device.type == "cpu":
        dense_graph_on_cpu()
    theirs, _ = train(ranks, model, None, data, **more)
    ours, pipeline = train(ranks, model, DENSE, data, **more)
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.state, theirs.state, rtol=1e-4, atol=1e-5)
    return pipeline


def sizes_that_come_back(ranks: Ranks) -> None:
    pipeline = both(ranks, TwoTower, batches(ranks, 20, sizes=(6, 5, 4, 6)))
    # Of each size the first batch, and those of the warm-up.
    assert pipeline._graph.eager_batches == 2
    assert pipeline.graphs == 3
    assert "the pooled vectors" not in pipeline.switched_off["cuda_graph"]
    dlrm_bench.pipeline.five_stage.graph_pool.MOST_GRAPHS = 2
    pipeline = both(ranks, TwoTower, batches(ranks, 20, sizes=(6, 5, 4, 6)))
    assert pipeline.graphs == 2
    assert "2 graphs are captured, the most that there may be" in pipeline.switched_off["cuda_graph"]


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_sizes_that_come_back_are_captured(run_ranks, world_size, gpu):
    run_ranks(world_size, sizes_that_come_back, gpu=gpu)


def jagged(ranks: Ranks) -> None:
    dlrm_bench.pipeline.five_stage.graph_pool._LEAST_STEP = 2  # these are few
    pipeline = both(ranks, Sequence, batches(ranks, 24))
    assert 2 <= pipeline.graphs <= 12
    assert pipeline._graph.eager_batches == 0
    pipeline = both(ranks, Sequence, batches(ranks, 12, full=True))
    assert pipeline.graphs == 1
    assert pipeline._graph._padding == {}


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_numbers_of_tokens_share_graphs(run_ranks, world_size, gpu):
    run_ranks(world_size, jagged, gpu=gpu)


class Join(nn.Module):
    """Sums of two vectors. Its code for any number of rows asks where the vectors begin in their memory."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other


class Joined(Sequence):
    def __init__(self) -> None:
        super().__init__()
        self.join = Join()

    def logits(self, batch: Any) -> Tensor:
        found = self.items(batch.sequences)
        joined = self.join(found["history"].values(), found["context"].values())
        return self.of(found) + joined.view(-1, LONGEST * DIM).sum(1)


def compiled_parts(ranks: Ranks) -> None:
    signal.alarm(600)
    torch.backends.cuda.matmul.allow_tf32 = False
    if ranks.device.type == "cpu":
        dense_graph_on_cpu()
    capturing, within = False, list[bool]()

    def compiles(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        within.append(capturing)
        return _dynamo.lookup_backend("aot_eager")(graph, inputs)

    def compiled() -> Joined:
        model = Joined()
        model.join.compile(backend=compiles)
        return model

    def captures(self: Captured, *args: Any) -> None:
        nonlocal capturing
        capturing = True
        capture(self, *args)
        capturing = False

    data, capture = batches(ranks, 16, sizes=(6, 6, 4, 5), full=True), Captured.capture
    theirs, _ = train(ranks, Joined, None, data)
    with patch.object(Captured, "capture", captures):
        ours, pipeline = train(ranks, compiled, DENSE, data)
    torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=1e-5, atol=1e-5)
    assert pipeline.graphs == 3
    assert len(within) >= 3  # for one number of rows, for any, and for vectors that begin elsewhere
    assert not any(within)


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_parts_are_compiled_before_the_capture(run_ranks, world_size, gpu):
    run_ranks(world_size, compiled_parts, gpu=gpu)


class EveryOther(torch.optim.Optimizer):
    """Accumulates the gradients of two batches."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.calls = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups, self.state = inner.param_groups, inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.calls % 2 == 0:
            self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            self.inner.step()


def accumulated(ranks: Ranks) -> None:
    pipeline = both(ranks, TwoTower, batches(ranks, 20), around=EveryOther)
    assert pipeline.graphs == 1
    if ranks.device.type == "cuda":
        assert pipeline.step_captured


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), *GPU_PLACES])
def test_gradients_are_accumulated_as_ddp_does(run_ranks, world_size, gpu):
    run_ranks(world_size, accumulated, gpu=gpu)


def test_room_comes_in_steps():
    assert [_room(n, n, 1.25, exact=False) for n in (1, 40, 1000, 1030, 10000)] == [32, 64, 1024, 1152, 10240]
    assert _room(900, 1000, 1.25, exact=False) == _room(1000, 1000, 1.25, exact=False)
    assert _room(700, 1000, 1.25, exact=False) == _room(700, 700, 1.25, exact=False)
    assert _room(700, 1000, 2.0, exact=False) == _room(1000, 1000, 2.0, exact=False)
    assert _room(700, 1000, 1.25, exact=True) == 700


@dataclass
class OfRows:
    """A captured graph."""

    rows: list[int]
    graph: bool = True


DRAWS: dict[str, tuple[Callable[[], list[int]], float]] = {
    "4 sequences": (lambda: [sum(random.randint(1234, 4086) for _ in range(4))], 1.1),
    "32 sequences": (lambda: [sum(random.randint(1234, 4086) for _ in range(32))], 1.12),
    "a long tail": (lambda: [int(random.lognormvariate(8, 0.5)) + 1], 1.3),
    "4 features": (lambda: [random.randint(700, 1300) for _ in range(4)], 1.25),
}


@pytest.mark.parametrize("name", DRAWS)
def test_graphs_are_few_and_have_little_room_to_spare(name):
    draw, most = DRAWS[name]
    random.seed(1)
    pool, form, graphs = GraphPool(), ((), ()), []
    for i in range(2000):
        if i == 1000:
            captured, spare = len(pool), []
        counts = draw()
        graph, plan = pool.find(form, counts, [True] * len(counts), pads=True)
        if plan.rows is not None:
            graph = OfRows(plan.rows)
            pool._forms[form].graphs.append(graph)
            pool._count += 1
            graphs.append(graph.rows)
        if i >= 1000:
            assert graph is not None
            spare.append(sum(graph.rows) / sum(counts))
    assert len(pool) <= min(14, captured + 1)
    assert len(set(map(tuple, graphs))) == len(graphs)
    assert 1 <= sum(spare) / len(spare) < most


def test_the_last_graph_has_room_for_all():
    pool, form = GraphPool(), ((), ())
    pool.find(form, [5000], [True], pads=True)
    for n in (10, 10, 10):
        pool.find(form, [n], [True], pads=True)
    pool._count = dlrm_bench.pipeline.five_stage.graph_pool.MOST_GRAPHS - 1
    graph, plan = pool.find(form, [10], [True], pads=True)
    assert graph is None
    assert plan.rows == [_room(5000, 5000, 1.25, exact=False)]


def test_forms_that_never_come_back_are_forgotten():
    pool = GraphPool()
    for i in range(2000):
        pool.find(((i,), ()), [1], [False], pads=False)
    assert len(pool._forms) <= 256
    assert isinstance(pool._forms, dict)
