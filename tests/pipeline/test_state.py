"""Weights and optimizer state move between the stock and the static pipeline, whatever the plans and world sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch

import dlrm_bench.pipeline.static.pipeline
from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.data.batch import Batch, feature_blocks
from dlrm_bench.dlrm.dcnv2.config import DataConfig, OptimizerConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.dcnv2.torchrec import build_unsharded
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.pipeline.static.pipeline import StaticPipeline
from dlrm_bench.pipeline.torchrec.stock import StockPipeline
from tests.cases import SMALL_MODEL
from tests.pipeline.whole_state import ModelState, load_whole_state, whole_state
from tests.pipelines import changed, dense_of, static_pipeline, stock_pipeline

STEPS = 10
MODEL = SMALL_MODEL
CONFIG = RunConfig(
    preset="test",
    benchmark="dlrm_dcnv2",
    model=MODEL,
    data=DataConfig(source="random", random_batches=4 * STEPS),
    optimizer=OptimizerConfig(learning_rate=0.02),
    local_batch_size=24,
    precision="fp32",
    iterations=100,
)
STATIC = changed(CONFIG, "static", presort_ids=True, peer_memory=True)
# Every table but one in halves.
HALVES = Plan(
    world_size=2,
    shards=tuple(Shard(rank, table, 16 * rank, 16) for rank in range(2) for table in (0, 2, 3, 4, 5)),
    replicated=(1,),
)


def local_batches(rank: int) -> list[Batch]:
    dataset = RandomDataset(CONFIG.data, MODEL, CONFIG.seed)
    return list(islice(dataset.train_batches(rank, 2, CONFIG.local_batch_size), 3 * STEPS))


def joined(parts: tuple[Batch, ...]) -> Batch:
    """The samples of several ranks' batches in one."""
    batch = Batch.empty(sum(len(part.labels) for part in parts), MODEL)
    batch.dense.copy_(torch.cat([part.dense for part in parts]))
    batch.labels.copy_(torch.cat([part.labels for part in parts]))
    blocks = zip(*(feature_blocks(part.ids, MODEL.multi_hot_sizes) for part in parts), strict=True)
    for block, pieces in zip(feature_blocks(batch.ids, MODEL.multi_hot_sizes), blocks, strict=True):
        block.copy_(torch.cat(pieces))
    return batch


class Training:
    """A pipeline on its way through batches."""

    def __init__(self, trained: StockPipeline | StaticPipeline, batches: list[Batch]) -> None:
        self.pipeline, self._batches = trained, map(trained.prepare, batches)

    def train(self, steps: int = STEPS) -> list[float]:
        return [self.pipeline.train_step(self._batches).item() for _ in range(steps)]


@dataclass(slots=True)
class Moved:
    losses: dict[str, list[float]]
    states: dict[str, ModelState]


def move(ranks: Ranks) -> Moved:
    batches = local_batches(ranks.rank)
    losses, states = {}, {}
    stock = Training(stock_pipeline(CONFIG, ranks), batches)
    stock.train()
    states["stock"] = whole_state(stock.pipeline)

    dlrm_bench.pipeline.static.pipeline.plan_for = lambda *_, **__: HALVES  # type: ignore[assignment]
    config = changed(STATIC, cuda_graph="iteration", overlap=True) if ranks.device.type == "cuda" else STATIC
    static = Training(static_pipeline(config, ranks), batches[2 * STEPS :][:4] + batches[STEPS:])
    static.train(4)  # past the capture on a GPU; what it has learned is to be forgotten
    load_whole_state(static.pipeline, states["stock"])
    states["static"] = whole_state(static.pipeline)
    losses["stock trains on"], losses["static goes on from stock"] = stock.train(), static.train()
    states["static, later"] = whole_state(static.pipeline)

    again = Training(stock_pipeline(changed(CONFIG, seed=1), ranks), batches[STEPS:])
    again.train()
    load_whole_state(again.pipeline, states["static, later"])
    states["stock again"] = whole_state(again.pipeline)
    losses["stock trains on, still"], losses["stock goes on from static"] = stock.train(), again.train()
    return Moved(losses, states)


def through_bf16(ranks: Ranks, state: ModelState) -> ModelState:
    static = static_pipeline(changed(STATIC, precision="bf16", presort_ids=False, peer_memory=False, seed=3), ranks)
    load_whole_state(static, state)
    working = dense_of(static).working["cross.0.w"].float()
    torch.testing.assert_close(working, dense_of(static).state_dict()["cross.0.w"], rtol=0.01, atol=1e-6)
    return whole_state(static)


def go_on_alone(ranks: Ranks, state: ModelState) -> list[float]:
    static = static_pipeline(changed(STATIC, local_batch_size=2 * CONFIG.local_batch_size, seed=2), ranks)
    load_whole_state(static, state)
    batches = [joined(parts) for parts in zip(*map(local_batches, range(2)), strict=True)]
    return Training(static, batches[2 * STEPS :]).train()


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.multi_gpu)])
def gpu(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def moved(run_ranks: Callable[..., list[Any]], gpu: bool) -> list[Moved]:
    return run_ranks(2, move, gpu=gpu)


def mean_losses(moved: list[Moved], name: str) -> torch.Tensor:
    return torch.tensor([rank.losses[name] for rank in moved]).mean(dim=0)


@pytest.mark.parametrize(
    ("stock", "resumed"),
    [
        ("stock trains on", "static goes on from stock"),
        ("stock trains on, still", "stock goes on from static"),
    ],
)
def test_training_goes_on_as_if_nothing_had_moved(moved, stock, resumed):
    torch.testing.assert_close(mean_losses(moved, resumed), mean_losses(moved, stock), rtol=1e-5, atol=0)


def test_two_ranks_to_one(moved, run_ranks, gpu):
    (losses,) = run_ranks(1, go_on_alone, moved[0].states["static, later"], gpu=gpu)
    expected = mean_losses(moved, "stock trains on, still")
    torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("before", "after"), [("stock", "static"), ("static, later", "stock again")])
def test_moving_changes_no_bit(moved, before, after):
    state, copy = moved[0].states[before], moved[0].states[after]
    for full, copied in ((state.weights, copy.weights), (state.optimizer, copy.optimizer)):
        assert full.keys() == copied.keys()
        assert [key for key in full if not torch.equal(full[key], copied[key])] == []
    assert all(values.any() for values in state.optimizer.values())


def test_bf16_keeps_fp32_masters(moved, run_ranks, gpu):
    state = moved[0].states["stock"]
    (copy,) = run_ranks(1, through_bf16, state, gpu=gpu)
    for full, copied in ((state.weights, copy.weights), (state.optimizer, copy.optimizer)):
        assert [key for key in full if not torch.equal(full[key], copied[key])] == []


def test_keys_and_shapes_are_those_of_torchrecs_model(moved):
    theirs = build_unsharded(MODEL, 0, torch.device("cpu")).state_dict()
    for state in (moved[0].states["stock"], moved[0].states["static"]):
        for full in (state.weights, state.optimizer):
            assert {key: value.shape for key, value in full.items()} == {k: v.shape for k, v in theirs.items()}


def test_only_rank_0_holds_it(moved):
    assert all(state == ModelState() for state in moved[1].states.values())


def refused(ranks: Ranks, weights: dict[str, torch.Tensor]) -> list[str]:
    errors = []
    for pipeline in (stock_pipeline(CONFIG, ranks), static_pipeline(STATIC, ranks)):
        with pytest.raises(ValueError, match="--model") as raised:
            load_whole_state(pipeline, ModelState(weights) if ranks.rank == 0 else ModelState())
        errors.append(str(raised.value))
    return errors


def test_another_models_state_is_refused_on_every_rank(moved, run_ranks, gpu):
    weights = dict(moved[0].states["stock"].weights)
    key = "sparse_arch.embedding_bag_collection.embedding_bags.t_cat_3.weight"
    weights[key] = weights[key][1:]
    stock, static = zip(*run_ranks(2, refused, weights, gpu=gpu), strict=True)
    assert {*stock, *static} == {
        f"the state is of another model: {key}: it has (89999, 32), but (90000, 32) is needed; give both runs the same "
        "--model flags and the same --optimizer.embedding"
    }
