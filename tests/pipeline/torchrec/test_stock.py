"""TorchRec's schedules train the same model as plain PyTorch does, and evaluating between steps changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.dcnv2.config import DataConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.torchrec import model, stock
from dlrm_bench.pipeline.torchrec.options import TorchRecOptions
from tests.cases import PLACES
from tests.pipelines import changed, stock_pipeline
from tests.plain_dlrm import PlainDLRM

STEPS = 15
EVALUATED_EVERY = 7
EXACT: dict[str, dict[str, Any]] = {
    "sparse-dist": {},
    "base": {"schedule": "base"},
    "sparse-dist in place": {"inplace_copy": True},
    "compiled in place": {"compile_dense": True, "inplace_copy": True},
    "fused": {"schedule": "fused-sparse-dist"},
    "fused in place": {"schedule": "fused-sparse-dist", "inplace_copy": True},
}
GPUS_DATA_PARALLEL = stock._data_parallel
IN_BF16 = "all-reduce in bf16"
QUANTIZED: dict[str, dict[str, Any]] = {"bf16": {"quantized_comms": "bf16"}, "fp16": {"quantized_comms": "fp16"}}


def small(**changes: Any) -> RunConfig:
    return changed(
        preset("smoke"),
        # With expanded ids the order of the samples alone changes the plain losses by 2e-4: Adagrad's first steps on
        # rows that always come together amplify rounding.
        data=DataConfig(source="random", random_batches=STEPS, random_ids="uniform"),
        target_auc=None,
        iterations=STEPS,
        warmup_iterations=0,
        local_batch_size=32,
        **changes,
    )


@dataclass(slots=True)
class Trained:
    losses: list[float]
    evaluated: list[float]
    """Losses of a second training, warmed up before and evaluated in between."""
    described: dict[str, Any]

    @property
    def sharding_types(self) -> set[str]:
        return {table["sharding_type"] for table in self.described["sharding_plan"].values()}


def data_parallel(options: TorchRecOptions, device: torch.device) -> DefaultDataParallelWrapper:
    """Returns what `stock` takes on GPUs."""
    return GPUS_DATA_PARALLEL(options, torch.device("cuda"))


# PyTorch refuses its bf16 hook where there is no NCCL; gloo can sum bf16.
@patch.object(DistributedDataParallel, "_check_comm_hook", lambda *_: None)
@patch.object(stock, "_data_parallel", data_parallel)
@patch.object(model, "_COMPILER", "eager")  # which traces as any other does, and compiles nothing
def train(ranks: Ranks, config: RunConfig, evaluate_every: int | None) -> tuple[list[float], dict[str, Any]]:
    dataset = RandomDataset(config.data, config.model, config.seed)
    place = (ranks.rank, ranks.world_size, config.local_batch_size)
    pipeline = stock_pipeline(config, ranks)
    batches = map(pipeline.prepare, islice(dataset.train_batches(*place), STEPS))
    losses = []
    if evaluate_every:
        pipeline.warm_up(evaluates=True)
    for step in range(1, STEPS + 1):
        losses.append(pipeline.train_step(batches).item())
        if evaluate_every and step % evaluate_every == 0:
            held_out = islice(dataset.train_batches(*place), 3)
            assert len(list(pipeline.evaluate(map(pipeline.prepare, held_out)))) == 3
    with pytest.raises(StopIteration):
        pipeline.train_step(batches)
    return losses, pipeline.describe()


def train_all(ranks: Ranks) -> dict[str, Trained]:
    trained = {}
    for name, changes in (EXACT | QUANTIZED | {IN_BF16: {"dense_all_reduce": "bf16"}}).items():
        if ranks.device.type == "cuda" or not name.startswith("fused"):
            losses, described = train(ranks, small(**changes), None)
            trained[name] = Trained(losses, train(ranks, small(**changes), EVALUATED_EVERY)[0], described)
    return trained


Run = Callable[[int, bool], list[dict[str, Trained]]]


@pytest.fixture(scope="module")
def trained(run_ranks: Callable[..., list[Any]]) -> Run:
    """trained(world_size, gpu)[rank][name]"""
    return cache(lambda world_size, gpu: run_ranks(world_size, train_all, gpu=gpu))


def plain_losses(config: RunConfig, world_size: int, rounded: bool) -> list[float]:
    """Losses of plain PyTorch. rounded: each rank's gradients of the dense weights are bf16, and so is their mean."""
    dataset = RandomDataset(config.data, config.model, config.seed)
    plain, losses = PlainDLRM(config), []
    batches = [dataset.train_batches(rank, world_size, config.local_batch_size) for rank in range(world_size)]
    for _ in range(STEPS):
        local = [next(of_rank) for of_rank in batches]
        if not rounded:
            losses.append(plain.train_step(local))
            continue
        of_ranks, gradients = [], []
        for batch in local:
            dense, blocks, labels = plain.gather([batch])
            loss = binary_cross_entropy_with_logits(plain.logits(dense, blocks), labels)
            of_ranks.append(loss.item())
            gradients.append(torch.autograd.grad(loss, [*plain.dense.parameters(), *plain.tables]))
        for parameter, *parts in zip([*plain.dense.parameters(), *plain.tables], *gradients, strict=True):
            in_bf16 = not any(parameter is table for table in plain.tables)
            shares = [part.bfloat16() if in_bf16 else part for part in parts]
            parameter.grad = sum(share / world_size for share in shares).float()
        plain.optimizer.step()
        losses.append(sum(of_ranks) / world_size)
    return losses


def mean_losses(ranks: list[dict[str, Trained]], name: str) -> torch.Tensor:
    return torch.tensor([rank[name].losses for rank in ranks]).mean(dim=0)


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_losses_equal_plain_dlrm(trained, world_size, gpu):
    config, ranks = small(), trained(world_size, gpu)
    expected = plain_losses(config, world_size, rounded=False)
    for name in EXACT.keys() & ranks[0].keys():
        losses = mean_losses(ranks, name)
        torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert expected[-1] < expected[0]


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_an_all_reduce_in_bf16_rounds_as_plain_pytorch_does(trained, world_size, gpu):
    config, ranks = small(), trained(world_size, gpu)
    exact, rounded = (torch.tensor(plain_losses(config, world_size, rounded)[:16]) for rounded in (False, True))
    # Later, a gradient that another order of additions rounds to the other side has had its effect.
    torch.testing.assert_close(mean_losses(ranks, IN_BF16)[:16], rounded, rtol=1e-4, atol=0)
    assert not torch.allclose(exact, rounded, rtol=3e-4, atol=0)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_quantized_collectives_train_nearly_alike(trained, world_size, gpu, name):
    exact, quantized = (mean_losses(trained(world_size, gpu), which) for which in ("sparse-dist", name))
    torch.testing.assert_close(quantized, exact, rtol=2e-2, atol=0)
    assert torch.equal(quantized, exact) == (world_size == 1 and gpu)  # a single rank on NCCL sends nothing


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_evaluation_leaves_training_as_it_was(trained, world_size, gpu):
    for rank in trained(world_size, gpu):
        for name, run in rank.items():
            # Atomic additions of a GPU come in any order.
            losses, evaluated = torch.tensor(run.losses), torch.tensor(run.evaluated)
            torch.testing.assert_close(evaluated, losses, rtol=1e-5 if gpu else 0, atol=0, msg=name)


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_plans_are_mixed_but_for_the_fused_schedule(trained, world_size, gpu):
    for name, run in trained(world_size, gpu)[0].items():
        if name.startswith("fused"):
            assert "data_parallel" not in run.sharding_types
        elif world_size > 1 and name in EXACT:  # quantised collectives make sharding cheaper
            assert {"table_wise", "data_parallel"} <= run.sharding_types


def test_what_the_cpu_changes_is_described(trained):
    (rank,) = trained(1, False)
    off = {name: list(run.described["switched_off"]) for name, run in rank.items()}
    switched_off = {IN_BF16: ["dense_all_reduce"]}
    assert off == {name: ["inplace_copy"] if "in place" in name else switched_off.get(name, []) for name in rank}
    assert "quantized_comms" not in rank["sparse-dist"].described
    for name in QUANTIZED:  # TorchRec takes fp16 for bf16
        assert rank[name].described["quantized_comms"] == {"forward": "float16", "backward": "float16"}


def by_rows(ranks: Ranks) -> list[Any]:
    """Trained on plans of the planner's choice between rows and whole tables; on CPUs TorchRec offers it no rows."""
    with patch.object(EmbeddingBagCollectionSharder, "sharding_types", lambda *_: ["row_wise", "table_wise"]):
        return [
            train(ranks, small(**changes), None) for changes in ({}, {"quantized_comms": "fp16"}, {"row_wise": False})
        ]


def test_row_wise_tables_can_be_left_out_and_their_collectives_quantized(run_ranks):
    ranks = run_ranks(2, by_rows)
    types = [{table["sharding_type"] for table in described["sharding_plan"].values()} for _, described in ranks[0]]
    assert "row_wise" in types[0] & types[1]
    assert types[2] == {"table_wise"}
    exact, quantized, by_tables = torch.tensor([[losses for losses, _ in rank] for rank in ranks]).mean(dim=0)
    torch.testing.assert_close(by_tables, exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(quantized, exact, rtol=2e-2, atol=0)
    assert not torch.equal(quantized, exact)


def fused_on_cpu(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="--schedule fused-sparse-dist needs a GPU"):
        stock_pipeline(small(schedule="fused-sparse-dist"), ranks)


def test_the_fused_schedule_is_refused_without_a_gpu(run_ranks):
    run_ranks(1, fused_on_cpu)
