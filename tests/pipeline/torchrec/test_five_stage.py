"""The harness's five-stage pipeline on TorchRec's modules: what stock trains, evaluates and saves, it does too."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.config import Precision
from dlrm_bench.dlrm.dcnv2.config import DataConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from dlrm_bench.pipeline.five_stage.graph_obstacles import why_not_graphed
from dlrm_bench.pipeline.five_stage.sharded_modules import sharded_modules
from dlrm_bench.pipeline.torchrec import model
from dlrm_bench.pipeline.torchrec.five_stage import TorchRecFiveStagePipeline, merged_reasons
from dlrm_bench.pipeline.torchrec.stock import StockPipeline
from tests.cases import PLACES, SMALL_MODEL
from tests.pipeline.whole_state import ModelState, load_whole_state, whole_state
from tests.pipelines import run_config

STEPS = 13
EVALUATED_EVERY = 6
ALL_ON: dict[str, Any] = {
    "pipeline": "five-stage",
    "avoid_record_streams": True,
    "pinned_d2h": True,
    "cuda_graph": "dense",
    "launch_threads": 2,
    "trim_input_dist": True,
    "graph_dists": True,
    "row_wise": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "stock": {},
    "all off": {"pipeline": "five-stage"},
    "all on": ALL_ON,
    "compiled": {"pipeline": "five-stage", "compile_dense": True},
}


def config(precision: Precision = "fp32", **changes: Any) -> RunConfig:
    return run_config(
        preset="test",
        model=SMALL_MODEL,
        data=DataConfig(source="random", random_batches=2 * STEPS),
        optimizer=OptimizerConfig(learning_rate=0.02),
        local_batch_size=24,
        precision=precision,
        iterations=100,
        **changes,
    )


class Training:
    """A pipeline on its way through batches."""

    def __init__(self, ranks: Ranks, run: RunConfig, state: ModelState | None = None) -> None:
        self.pipeline: Any = build_pipeline(run, run.pipeline, ranks)
        assert type(self.pipeline) is (
            TorchRecFiveStagePipeline if run.pipeline.name == "five-stage" else StockPipeline
        )
        if state is not None:
            load_whole_state(self.pipeline, state)
        self._run, self._ranks = run, ranks
        self._batches = self._prepared()

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        self.pipeline.close()

    def train(self) -> list[float]:
        return [self.pipeline.train_step(self._batches).item() for _ in range(STEPS)]

    def train_and_evaluate(self) -> tuple[list[float], list[torch.Tensor]]:
        losses, logits = [], []
        self.pipeline.warm_up(evaluates=True)
        for step in range(STEPS):
            losses.append(self.pipeline.train_step(self._batches).item())
            if step % EVALUATED_EVERY == 0:
                logits += [values.float().cpu() for values, _ in self.pipeline.evaluate(islice(self._prepared(), 3))]
        return losses, logits

    def _prepared(self) -> Any:
        run, ranks = self._run, self._ranks
        dataset = RandomDataset(run.data, run.model, run.seed)
        return map(self.pipeline.prepare, dataset.train_batches(ranks.rank, ranks.world_size, run.local_batch_size))


@dataclass(slots=True)
class Trained:
    losses: list[float]
    evaluated: list[float]
    """Losses of a second training, warmed up before and evaluated in between."""
    logits: list[torch.Tensor]
    state: ModelState
    resumed: list[float]
    """Losses with which the other kind of pipeline goes on from the state."""
    bf16: list[float]
    described: dict[str, Any]
    obstacle: str | None
    """What would keep the model's dense part out of a graph on a GPU."""


@patch.object(model, "_COMPILER", "eager")  # which traces as any other does, and compiles nothing
def train_all(ranks: Ranks) -> dict[str, Trained]:
    results = {}
    for name, changes in VARIANTS.items():
        with Training(ranks, config(**changes)) as training:
            losses, state, described = training.train(), whole_state(training.pipeline), training.pipeline.describe()
            sharded = training.pipeline.model
            obstacle = why_not_graphed(sharded, sharded_modules(sharded), torch.device("cuda", 0))
        with Training(ranks, config(**changes)) as training:
            evaluated, logits = training.train_and_evaluate()
        with Training(ranks, config() if changes else config(**ALL_ON), state) as training:
            resumed = training.train()
        with Training(ranks, config("bf16", **changes)) as training:
            bf16 = training.train()
        results[name] = Trained(
            losses=losses,
            evaluated=evaluated,
            logits=logits,
            state=state,
            resumed=resumed,
            bf16=bf16,
            described=described,
            obstacle=obstacle,
        )
    return results


Run = Callable[[int, bool], list[dict[str, Trained]]]


@pytest.fixture(scope="module")
def trained(run_ranks: Callable[..., list[Any]]) -> Run:
    """trained(world_size, gpu)[rank][variant]"""
    return cache(lambda world_size, gpu: run_ranks(world_size, train_all, gpu=gpu))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all off", "all on", "compiled"])
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_trains_what_stock_trains(trained, world_size, gpu, name):
    for rank in trained(world_size, gpu):
        ours, stock = rank[name], rank["stock"]
        for losses in (ours.losses, ours.evaluated):
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(stock.losses), rtol=1e-5, atol=0)
        assert len(ours.logits) == len(stock.logits) == 3 * len(range(0, STEPS, EVALUATED_EVERY))
        torch.testing.assert_close(ours.logits, stock.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.tensor(ours.bf16), torch.tensor(stock.bf16), rtol=1e-3, atol=0)
        assert ours.bf16 != ours.losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all off", "all on", "compiled"])
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_state_is_that_of_stock_and_either_goes_on_from_it(trained, world_size, gpu, name):
    ranks = trained(world_size, gpu)
    ours, stock = ranks[0][name].state, ranks[0]["stock"].state
    assert ours.weights.keys() == stock.weights.keys()
    assert ours.optimizer.keys() == stock.optimizer.keys()
    for key in stock.optimizer:
        torch.testing.assert_close(ours.optimizer[key], stock.optimizer[key], rtol=1e-2, atol=1e-8)
    for rank in ranks:
        resumed = torch.tensor(rank[name].resumed)
        torch.testing.assert_close(resumed, torch.tensor(rank["stock"].resumed), rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_what_was_off_and_what_was_trimmed_is_described(trained, world_size, gpu):
    rank = trained(world_size, gpu)[0]
    assert rank["all off"].described.keys() == {"sharding_plan", "switched_off"}
    assert rank["all off"].described["switched_off"] == {}
    described = rank["all on"].described
    assert set(described["switched_off"]) <= ALL_ON.keys() - {"row_wise"}
    # With data-parallel tables in the plan the dense update stays eager.
    why = "the dense update: Adagrad has parameters" if gpu else "CUDA graphs need a GPU"
    assert described["switched_off"].get("cuda_graph", why if gpu else "").startswith(why)
    kinds = described["input_dist"].values()
    assert sorted(name for names in kinds for name in names) == sorted(SMALL_MODEL.feature_names)
    assert described["input_dist"]["static"]
    assert (described["graphed_dists"] == []) == (not gpu or world_size == 1)
    assert ("no CUDA graphs on cpu" in described["switched_off"].get("graph_dists", "")) == (not gpu)


@pytest.mark.slow
def test_nothing_keeps_the_model_out_of_a_graph(trained):
    """The hooks by which a loss that is not finite stops its weights are captured with it."""
    assert [variant.obstacle for variant in trained(2, False)[0].values()] == [None] * len(VARIANTS)


def test_reasons_of_all_ranks_in_one():
    everyone = [{"a": "x", "b": "y"}, {"a": "x"}, {"a": "x", "b": "y", "c": "z"}, {"b": "w", "a": "x"}]
    assert merged_reasons(everyone) == {"a": "x", "b": "rank 0, 2: y; rank 3: w", "c": "rank 2: z"}
    assert merged_reasons([{}]) == {}


def off_on_one_rank(ranks: Ranks) -> dict[str, str]:
    with Training(ranks, config(pipeline="five-stage")) as training:
        schedule = training.pipeline._train
        off = {"cuda_graph": "an error"} if ranks.rank == 1 else {}
        training.pipeline._train = SimpleNamespace(switched_off=off, describe=dict)
        described = training.pipeline.describe()["switched_off"]
        training.pipeline._train = schedule
    return described


def test_what_was_off_on_another_rank_only_is_described(run_ranks):
    assert run_ranks(2, off_on_one_rank) == [{"cuda_graph": "rank 1: an error"}] * 2
