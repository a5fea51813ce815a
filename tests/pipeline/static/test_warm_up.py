"""A warm-up leaves weights, optimizer state and the later training as they would be without one, bit for bit."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.data.batch import BatchLayout, feature_blocks
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.dynamic.dynamic_rows import NO_TABLE
from dlrm_bench.pipeline.dynamic_state import IDS
from dlrm_bench.pipeline.static.graphs import Graphs
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from dlrm_bench.pipeline.static.warm_up import ROWS, warm_up_batch
from tests.cases import GPU_PLACES, SMALL_MODEL, WAYS
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.small_runs import batches_of, equal_states, small
from tests.pipeline.whole_state import ModelState, whole_state
from tests.pipelines import static_pipeline

GRAPH = {"cuda_graph": "iteration", "overlap": True}
STEPS = 3
MODEL = replace(SMALL_MODEL, num_embeddings=(5000, 7, 30, ROWS + 1, 600, 400))
CONFIGS = {
    **{f"graph, {way}": small(**options, **GRAPH, model=MODEL) for way, options in WAYS.items()},
    "rowwise": small("rowwise_adagrad", model=MODEL),
    # Its losses in the warm-up are not finite.
    "diverges": small(learning_rate=1e30, model=MODEL, **WAYS["peer memory"]),
}
GPU_CONFIGS = {
    **{
        f"graph, bf16, {way}": small(**options, **GRAPH, model=MODEL, precision="bf16") for way, options in WAYS.items()
    },
    "graph, halves": small(**GRAPH, **WAYS["peer memory"], model=MODEL, local_batch_size=2048),
    "sgd": small("sgd", model=MODEL),
}
RANKS = [pytest.param(2, False), *GPU_PLACES]
"""Numbers of ranks: on the CPU one rank has nothing that two have not."""


@dataclass(slots=True)
class Trained:
    states: list[ModelState]
    """States before the warm-up and after it, where there is one, and after the training."""
    losses: list[float]
    logits: torch.Tensor
    captures: dict[str, int]
    """Captures of each graph, after the training, which alone is too short for any."""


def train(ranks: Ranks, config: RunConfig, warms_up: bool) -> Trained:
    trained, states = static_pipeline(config, ranks), []
    if warms_up:
        states.append(whole_state(trained))
        trained.warm_up(evaluates=True)
        states.append(whole_state(trained))
    batches = batches_of(config, ranks, STEPS)
    losses = [trained.train_step(batches).item() for _ in range(STEPS)]
    logits = torch.cat([values for values, _ in trained.evaluate(batches_of(config, ranks, 2))]).cpu()
    with pytest.raises(StopIteration):
        trained.train_step(batches)
    states.append(whole_state(trained))
    captures = {name: graph["captures"] for name, graph in trained.describe()["cuda_graphs"].items()}
    trained.close()
    return Trained(states, losses, logits, captures)


def train_all(ranks: Ranks) -> dict[str, tuple[Trained, Trained]]:
    configs = CONFIGS
    if ranks.device.type == "cuda":
        configs = CONFIGS | GPU_CONFIGS
    else:
        capture_on_cpu()
    return {name: (train(ranks, config, True), train(ranks, config, False)) for name, config in configs.items()}


Run = Callable[[int, bool], list[dict[str, tuple[Trained, Trained]]]]


@pytest.fixture(scope="module")
def trained(run_ranks: Callable[..., list[Any]]) -> Run:
    return cache(lambda world_size, gpu: run_ranks(world_size, train_all, gpu=gpu))


@pytest.mark.parametrize(("world_size", "gpu"), RANKS)
def test_weights_and_optimizer_state_are_restored(trained: Run, world_size: int, gpu: bool) -> None:
    for name, (warm, _) in trained(world_size, gpu)[0].items():
        before, after, end = warm.states
        assert equal_states(before, after), name
        assert not equal_states(before, end), name
    assert not math.isfinite(trained(world_size, gpu)[0]["diverges"][0].losses[-1])


@pytest.mark.parametrize(("world_size", "gpu"), RANKS)
def test_the_training_is_the_one_without_a_warm_up(trained: Run, world_size: int, gpu: bool) -> None:
    # Sums on a GPU may come in another order.
    close = {"rtol": 1e-3, "atol": 0} if gpu else {"rtol": 0, "atol": 0}
    for of_rank in trained(world_size, gpu):
        for name, (warm, cold) in of_rank.items():
            losses = torch.tensor(warm.losses), torch.tensor(cold.losses)
            torch.testing.assert_close(*losses, **close, equal_nan=True, msg=name)
            if not gpu:
                torch.testing.assert_close(warm.logits, cold.logits, **close, equal_nan=True, msg=name)
                assert equal_states(warm.states[-1], cold.states[-1]), name


@pytest.mark.parametrize(("world_size", "gpu"), RANKS)
def test_everything_is_captured_by_then(trained: Run, world_size: int, gpu: bool) -> None:
    for name, (warm, cold) in trained(world_size, gpu)[0].items():
        graphs = {"iteration": 1, "evaluation": 1} if name.startswith("graph") else {}
        assert warm.captures == graphs
        assert cold.captures == dict.fromkeys(graphs, 0)


def replays(ranks: Ranks, evaluates: bool) -> set[tuple[str, int]]:
    """Returns the graphs that a warm-up replays, by name and number."""
    found, run = set[tuple[str, int]](), Graphs.run

    def noted(graphs: Graphs, i: int) -> None:
        found.add((graphs._name, i))
        run(graphs, i)

    capture_on_cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "run", noted)
        pipeline = static_pipeline(small(**GRAPH, model=MODEL), ranks)
        pipeline.warm_up(evaluates)
        assert pipeline._graphs is not None
        assert pipeline._graphs.captures == 1
        pipeline.close()
    return found


@pytest.mark.parametrize("evaluates", [False, True])
def test_every_graph_has_run_once(run_ranks: Callable[..., list[Any]], evaluates: bool) -> None:
    """A graph's first replay takes longer."""
    (found,) = run_ranks(1, replays, evaluates)
    names = ("iteration", "evaluation") if evaluates else ("iteration",)
    assert found == {(name, i) for name in names for i in range(2)}


def alarms(ranks: Ranks) -> list[int]:
    """Returns raised flags and tallies after a warm-up in which some were."""
    step = StaticPipeline.train_step

    def alarming(pipeline: StaticPipeline, batches: Any) -> torch.Tensor:
        loss = step(pipeline, batches)
        pipeline._guard.watch.stopped.fill_(1)
        pipeline.tallies().counts.fill_(1)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticPipeline, "train_step", alarming)
        pipeline = static_pipeline(small(model=MODEL), ranks)
        pipeline.warm_up(evaluates=False)
    return [int(of.sum()) for of in (pipeline._guard.watch.stopped, pipeline.tallies().counts)]


def test_flags_and_tallies_of_a_warm_up_do_not_stop_the_training(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(1, alarms) == [[0, 0]]


def test_the_batch_names_the_rows_that_are_kept() -> None:
    batch = warm_up_batch(BatchLayout(1000, SMALL_MODEL), SMALL_MODEL.tables, pin=False)
    for rows, block in zip(SMALL_MODEL.rows, feature_blocks(batch.ids, SMALL_MODEL.multi_hot_sizes), strict=True):
        assert block.min() == 0
        assert block.max() == min(rows, ROWS, block.numel()) - 1


Row = tuple[int, int]
"""A table, and an id of it."""


def of_one_batch(ranks: Ranks, way: str) -> tuple[set[Row], set[Row]]:
    """Returns the rows that the only batch of a training names on this rank, and those made on all ranks, on rank 0."""
    pipeline = static_pipeline(small(model=MODEL, dynamic_rows=12_000, **WAYS[way]), ranks)
    pipeline.warm_up(evaluates=True)
    (batch,) = batches = list(batches_of(small(model=MODEL), ranks, 1))
    pipeline.train_step(iter(batches))
    blocks = enumerate(feature_blocks(batch.ids, MODEL.multi_hot_sizes))
    named = {(table, row) for table, block in blocks for row in block.flatten().tolist()}
    entries = whole_state(pipeline).weights.get(IDS, torch.empty(0, 4)).view(torch.int32)
    pipeline.close()
    return named, {(table, row) for row, _, table, _ in entries.tolist() if table != NO_TABLE}


@pytest.mark.parametrize("way", WAYS)
def test_a_single_batch_makes_its_own_rows_alone(run_ranks: Callable[..., list[Any]], way: str) -> None:
    """No other batch comes to replace the warm-up's in the second slot, which is distributed beside the first one."""
    (first, made), (second, _) = run_ranks(2, of_one_batch, way)
    assert made == first | second
