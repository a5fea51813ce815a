"""Cross-cutting: the static pipeline over two nodes, peer memory inside and collectives between, trains as plainly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dcnv2.state_keys import table_key
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.pipeline.static import pipeline as static
from tests.cases import WAYS
from tests.pipeline import test_non_finite as non_finite
from tests.pipeline.static.test_pipeline import EVALUATION_BATCHES, batches_of, plain, small
from tests.pipeline.whole_state import whole_state
from tests.pipelines import changed, static_pipeline

STEPS, LARGE_BATCH, LARGE_STEPS = 20, 2048, 3
JOBS: dict[str, tuple[RunConfig, int]] = {
    "small": (small("sharded", STEPS, presort_ids=True, peer_memory=True), STEPS),
    "rows": (small("sharded", STEPS, presort_ids=True, peer_memory=True), STEPS),
    # In two halves, whose exchanges run in parallel.
    "large": (
        small("tiny tables", LARGE_STEPS, local_batch_size=LARGE_BATCH, presort_ids=True, peer_memory=True),
        LARGE_STEPS,
    ),
}


def plan_in_rows(world_size: int) -> Plan:
    """The hottest table in a part of its rows on each rank, the others whole."""
    shards = [Shard(rank, 2, 0, 32, rank, world_size) for rank in range(world_size)]
    shards += [Shard(table % world_size, table, 0, 32) for table in (0, 1, 3)]
    return Plan(world_size=world_size, shards=tuple(sorted(shards)))


def train(ranks: Ranks, name: str, config: RunConfig, steps: int) -> dict[str, Any]:
    planner = static.plan_for
    if name == "rows":
        static.plan_for = lambda *_, **__: plan_in_rows(ranks.world_size)
    trained = static_pipeline(config, ranks)
    static.plan_for = planner
    batches = batches_of(config, ranks.rank, ranks.world_size, pin=ranks.device.type == "cuda")
    training = map(trained.prepare, batches[:steps])
    losses = [trained.train_step(training).item() for _ in range(steps - 1)]
    evaluated = trained.evaluate(map(trained.prepare, batches[-EVALUATION_BATCHES:]))
    logits = torch.stack([values for values, _ in evaluated]).cpu()
    losses.append(trained.train_step(training).item())
    state = whole_state(trained)
    trained.describe()
    trained.close()
    return {"losses": losses, "logits": logits, "weights": state.weights}


def train_all(ranks: Ranks, jobs: dict[str, tuple[RunConfig, int]]) -> dict[str, dict[str, Any]]:
    torch.set_float32_matmul_precision("highest")
    return {name: train(ranks, name, *job) for name, job in jobs.items()}


@pytest.mark.parametrize(
    ("world_size", "gpu"),
    [
        (4, False),
        pytest.param(2, True, marks=pytest.mark.multi_gpu),
        pytest.param(4, True, marks=pytest.mark.multi_gpu),
    ],
)
def test_losses_and_weights_equal_plain_dlrm(run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool) -> None:
    jobs = JOBS
    if gpu:
        jobs = {name: (changed(c, cuda_graph="iteration", overlap=True), steps) for name, (c, steps) in JOBS.items()}
    per_rank = run_ranks(world_size, train_all, jobs, gpu=gpu, nodes=2)
    for name, (config, steps) in JOBS.items():
        reference = plain(changed(config, presort_ids=False, peer_memory=False), world_size)
        losses = torch.tensor([results[name]["losses"] for results in per_rank], dtype=torch.float64).mean(0)
        expected = torch.tensor(reference.losses[:steps], dtype=torch.float64)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        weights = per_rank[0][name]["weights"]
        for table, of_table in enumerate(reference.model.tables):
            error = weights[table_key(config.model, table)] - of_table.detach()
            assert error.abs().max() < config.optimizer.learning_rate / 20
    same = [results["small"]["logits"] - results["rows"]["logits"] for results in per_rank]
    assert max(float(difference.abs().max()) for difference in same) < 1e-5


def train_to_a_bad_loss(ranks: Ranks) -> non_finite.Trained:
    return non_finite.train(ranks, non_finite.config_of(non_finite.STEPS, "static", **WAYS["peer memory"]), "loss")


@pytest.mark.parametrize(("world_size", "gpu"), [(4, False), pytest.param(2, True, marks=pytest.mark.multi_gpu)])
def test_a_bad_loss_on_one_node_stops_the_updates_on_both(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    for rank, trained in enumerate(run_ranks(world_size, train_to_a_bad_loss, gpu=gpu, nodes=2)):
        finite = [torch.tensor(loss).isfinite().item() for loss in trained.losses]
        assert finite.count(False) == (rank == world_size - 1)
        assert trained.learned
        assert trained.changed == []
