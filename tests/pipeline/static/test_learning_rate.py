"""Cross-cutting: a learning rate that changes between steps acts as in plain PyTorch, captured or not."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dcnv2.data.random_batches import RandomDataset
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.planner import REPLICATED_ROWS
from tests.cases import GPU_PLACES, PLACES, SMALL_MODEL
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.small_runs import BATCHES, batches_of, equal_states, small
from tests.pipeline.whole_state import ModelState, whole_state
from tests.pipelines import static_pipeline
from tests.plain_dlrm import PlainDLRM

FIRST = 0.02
CHANGES = {5: 0.1, 9: 0.1, 12: 0.004}
"""Steps before which the rate changes, and the new rates; the second of them repeats the first."""


@dataclass(slots=True)
class Trained:
    losses: list[float]
    state: ModelState
    captures: int | None


def train(ranks: Ranks, config: RunConfig, changes: dict[int, float] = CHANGES) -> Trained:
    trained, batches, losses = static_pipeline(config, ranks), batches_of(config, ranks), []
    for step in range(BATCHES):
        if step in changes:
            trained.set_learning_rate(changes[step])
        losses.append(trained.train_step(batches).item())
    graphs, state = trained.describe()["cuda_graphs"], whole_state(trained)
    trained.close()
    return Trained(losses, state, graphs["iteration"]["captures"] if graphs else None)


def train_all(ranks: Ranks) -> dict[str, Trained]:
    results = {}
    if ranks.device.type != "cuda":
        capture_on_cpu()
    for presort in (False, True):
        rate = {"learning_rate": FIRST, "presort_ids": presort}
        results[f"eager {presort}"] = train(ranks, small(**rate))
        results[f"graph {presort}"] = train(ranks, small(**rate, cuda_graph="iteration", overlap=True))
        results[f"constant {presort}"] = train(ranks, small(**rate), {})
    for embedding in ("rowwise_adagrad", "sgd"):
        # From the start of the run, so that a step by the old rate shows.
        results[f"changed {embedding}"] = train(ranks, small(embedding, learning_rate=FIRST), {0: 0.1})
        results[f"from the start {embedding}"] = train(ranks, small(embedding, learning_rate=0.1), {})
    return results


Run = Callable[[int, bool], list[dict[str, Trained]]]


@pytest.fixture(scope="module")
def trained(run_ranks: Callable[..., list[Any]]) -> Run:
    return cache(lambda world_size, gpu: run_ranks(world_size, train_all, gpu=gpu))


@cache
def plain_losses(world_size: int) -> list[float]:
    config = small(learning_rate=FIRST)
    reference, dataset = PlainDLRM(config), RandomDataset(config.data, config.model, config.seed)
    batches = [dataset.train_batches(rank, world_size, config.local_batch_size) for rank in range(world_size)]
    losses = []
    for step in range(BATCHES):
        for group in reference.optimizer.param_groups:
            group["lr"] = CHANGES.get(step, group["lr"])
        losses.append(reference.train_step([next(of_rank) for of_rank in batches]))
    return losses


def mean_losses(per_rank: list[dict[str, Trained]], job: str) -> torch.Tensor:
    return torch.tensor([rank[job].losses for rank in per_rank], dtype=torch.float64).mean(dim=0)


@pytest.mark.parametrize("presort", [False, True])
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_losses_equal_plain_dlrm(trained: Run, world_size: int, gpu: bool, presort: bool) -> None:
    # Some tables are sharded and, on several ranks, some replicated: each has its own way to the rate.
    assert min(SMALL_MODEL.rows) <= REPLICATED_ROWS < max(SMALL_MODEL.rows)
    per_rank = trained(world_size, gpu)
    expected = torch.tensor(plain_losses(world_size), dtype=torch.float64)
    torch.testing.assert_close(mean_losses(per_rank, f"eager {presort}"), expected, rtol=1e-5, atol=0)
    constant = mean_losses(per_rank, f"constant {presort}")
    assert torch.equal(constant[:5], mean_losses(per_rank, f"eager {presort}")[:5])
    assert (constant[6:] - expected[6:]).abs().min() > 1e-4, "the change must show"


@pytest.mark.parametrize("embedding", ["rowwise_adagrad", "sgd"])
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_other_optimizers_take_it_too(trained: Run, world_size: int, gpu: bool, embedding: str) -> None:
    for rank in trained(world_size, gpu):
        changed, expected = rank[f"changed {embedding}"], rank[f"from the start {embedding}"]
        assert changed.losses == expected.losses
        assert equal_states(changed.state, expected.state)


@pytest.mark.parametrize("presort", [False, True])
@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_graph_equals_eager_and_is_captured_anew_only_for_fbgemm(
    trained: Run, world_size: int, gpu: bool, presort: bool
) -> None:
    for rank in trained(world_size, gpu):
        eager, graph = rank[f"eager {presort}"], rank[f"graph {presort}"]
        assert graph.losses == eager.losses
        assert equal_states(graph.state, eager.state)
        assert eager.captures is None
        assert graph.captures == (1 if presort else 3)


def bad_rates(ranks: Ranks) -> None:
    trained = static_pipeline(small(), ranks)
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"--optimizer\.learning-rate must be finite and positive"):
            trained.set_learning_rate(value)


@pytest.mark.parametrize(("world_size", "gpu"), [(1, False), GPU_PLACES[0]])
def test_bad_rates_are_refused(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    run_ranks(world_size, bad_rates, gpu=gpu)
