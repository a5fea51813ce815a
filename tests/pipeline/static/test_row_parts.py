"""Cross-cutting: the static pipeline with tables split by rows trains what plain PyTorch does, whatever overflows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.dcnv2.state_keys import table_key
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.dlrm.tables.plan.plan import Plan, Shard
from dlrm_bench.dlrm.tables.pooled import row_parts
from dlrm_bench.pipeline.static import pipeline as static
from dlrm_bench.pipeline.static.graphs import Graphs
from tests.late_device import LateDevice
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.static.test_pipeline import batches_of, plain, small
from tests.pipeline.whole_state import load_whole_state, whole_state
from tests.pipelines import changed, static_pipeline

STEPS = 30
CONFIG = small("sharded", STEPS, presort_ids=True)


def plan_of(world_size: int) -> Plan:
    """Tables of 306, 257, 356 and 456 rows: one in three parts, one in two parts of two column shards, two whole. Of
    three ranks the second has no part of any rows."""
    last, second = world_size - 1, min(1, world_size - 1)
    shards = [Shard(rank, 2, 0, 32, part, 3) for part, rank in enumerate((0, last, last))]
    shards += [Shard(rank, 3, 0, 32, part, 2) for part, rank in enumerate((last, 0))]
    plan = Plan(world_size=world_size, shards=tuple(sorted([*shards, Shard(0, 0, 0, 32), Shard(second, 1, 0, 32)])))
    plan.check(CONFIG.model.tables)
    return plan


def train(ranks: Ranks, config: RunConfig, slack: float) -> dict[str, Any]:
    """Returns losses, logits of one evaluation, the whole state and the record's block."""
    torch.set_float32_matmul_precision("highest")
    static.plan_for = lambda *_, **__: plan_of(ranks.world_size)
    row_parts._SLACK, row_parts._LEAST_SLACK = slack, 1
    batches = batches_of(config, ranks.rank, ranks.world_size, pin=ranks.device.type == "cuda")
    trained = static_pipeline(config, ranks)
    training = map(trained.prepare, batches[:STEPS])
    losses = [trained.train_step(training).item() for _ in range(STEPS // 2)]
    evaluated = trained.evaluate(map(trained.prepare, batches))  # some of which overflow lists for training
    logits = torch.cat([values for values, _ in evaluated]).cpu()
    losses += [trained.train_step(training).item() for _ in range(STEPS - STEPS // 2)]
    described, state = trained.describe(), whole_state(trained)
    trained.close()
    again = static_pipeline(config, ranks)
    load_whole_state(again, state)
    reloaded = whole_state(again)
    again.close()
    return {
        "losses": losses,
        "logits": logits,
        "over": described["batches_over_capacity"],
        "plan": described["plan"],
        "weights": state.weights,
        "same": all(torch.equal(reloaded.weights[name], value) for name, value in state.weights.items()),
    }


def train_all(ranks: Ranks, config: RunConfig) -> dict[float, dict[str, Any]]:
    return {slack: train(ranks, config, slack) for slack in (2.0, 1.0)}


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), pytest.param(2, True, marks=pytest.mark.multi_gpu)])
def test_losses_equal_plain_dlrm_with_and_without_overflow(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    config = changed(CONFIG, cuda_graph="iteration", overlap=True) if gpu else CONFIG
    per_rank = run_ranks(world_size, train_all, config, gpu=gpu)
    reference = plain(small("sharded", STEPS), world_size)
    expected = torch.tensor(reference.losses, dtype=torch.float64)
    for slack in (2.0, 1.0):
        jobs = [results[slack] for results in per_rank]
        losses = torch.tensor([job["losses"] for job in jobs], dtype=torch.float64).mean(0)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        for table, expected_weights in enumerate(reference.model.tables):
            error = jobs[0]["weights"][table_key(CONFIG.model, table)] - expected_weights.detach()
            assert error.abs().max() < CONFIG.optimizer.learning_rate / 20
        assert jobs[0]["same"], "what is loaded is what was saved"
        over = jobs[0]["over"]
        assert (sum(over) > 0) == (slack < 2), over
        assert all(count < STEPS for count in over), "some batches fit"
    described = [shard for shards in per_rank[0][2.0]["plan"] for shard in shards]
    assert sorted(s["row_part"] for s in described if s.get("row_parts") == 3) == [0, 1, 2]
    assert sum("row_parts" not in shard for shard in described) == 2
    torch.testing.assert_close(per_rank[0][2.0]["logits"], per_rank[0][1.0]["logits"], rtol=1e-5, atol=1e-6)


SLACK = {0: 1.0, 1: 1.02, 2: 1.02}
"""Slack of tight lists, by rank: some batches overflow, and most do not."""
PLACES = [
    *((3, False, tight) for tight in ((), (0,), (2,), (0, 1, 2))),
    *(pytest.param(2, True, tight, marks=pytest.mark.multi_gpu) for tight in ((0,), (0, 1))),
]
"""Ranks, whether on GPUs, and the ranks whose lists are tight, whether they pick ids or not."""


def launches(
    ranks: Ranks, config: RunConfig, tight: tuple[int, ...]
) -> tuple[list[bool], list[bool], list[float], list[int]]:
    """Returns for each step whether a graph was replayed, and whether this rank's own lists took the batch; and the
    losses, and the record's number of batches that the lists did not take, by rank."""
    torch.set_float32_matmul_precision("highest")
    static.plan_for = lambda *_, **__: plan_of(ranks.world_size)
    row_parts._SLACK, row_parts._LEAST_SLACK = (SLACK[ranks.rank] if ranks.rank in tight else 2.0), 1
    cuda = ranks.device.type == "cuda"
    if not cuda:
        capture_on_cpu()
    replayed, fitted, losses = [], [], []
    run = Graphs.run

    def noted(graphs: Graphs, i: int) -> None:
        replayed[-1] = True
        run(graphs, i)

    Graphs.run = noted  # type: ignore[method-assign]
    trained = static_pipeline(config, ranks)
    batches = map(trained.prepare, batches_of(config, ranks.rank, ranks.world_size, pin=cuda)[:STEPS])
    for step in range(STEPS):
        replayed.append(False)
        losses.append(trained.train_step(batches).item())
        picked = trained._slots[step % 2].ids.picked
        fitted.append(picked is None or int(picked.count) <= picked.capacity)
    over = trained.describe()["batches_over_capacity"]
    trained.close()
    return replayed, fitted, losses, over


@pytest.mark.parametrize(("world_size", "gpu", "tight"), PLACES)
def test_a_batch_that_overflows_on_any_rank_is_launched_eagerly_by_all(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool, tight: tuple[int, ...]
) -> None:
    config = changed(CONFIG, cuda_graph="iteration", overlap=gpu)
    replayed, fitted, losses, over = zip(*run_ranks(world_size, launches, config, tight, gpu=gpu), strict=True)
    fits_all = [all(of_step) for of_step in zip(*fitted, strict=True)]
    eager_first = static._EAGER_ITERATIONS
    for of_rank in replayed:
        assert of_rank == [step >= eager_first and fits for step, fits in enumerate(fits_all)]
    overflowing = {rank for rank, of_rank in enumerate(fitted) if not all(of_rank[eager_first:])}
    assert overflowing == set(tight) & {0, world_size - 1}, "the ranks that have parts of rows"
    assert any(fits_all[eager_first:]), "some batches are replayed"
    assert list(over) == [[of_rank.count(False) for of_rank in fitted]] * world_size
    expected = torch.tensor(plain(small("sharded", STEPS), world_size).losses, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64).mean(0), expected, rtol=1e-5, atol=0)


@dataclass(frozen=True, slots=True)
class Overflowing:
    """A training after a warm-up, of batches of which none fits."""

    polls: list[int]
    """How often the host polls in each step."""
    captures: int
    """Of iterations, in the warm-up."""
    over: int
    """Batches that this rank's lists could not hold."""


def train_overflowing(ranks: Ranks, config: RunConfig) -> Overflowing:
    static.plan_for = lambda *_, **__: plan_of(ranks.world_size)
    row_parts._SLACK, row_parts._LEAST_SLACK = 0.5, 1
    capture_on_cpu()
    polls = []
    with LateDevice() as device:
        trained = static_pipeline(config, ranks)
        trained.warm_up(evaluates=True)
        assert trained._graphs is not None
        captures = trained._graphs.captures
        batches = iter(batches_of(config, ranks.rank, ranks.world_size)[:4])
        for _ in range(4):
            before = device.polls
            trained.train_step(batches)
            polls.append(device.polls - before)
    over = trained.describe()["batches_over_capacity"][ranks.rank]
    trained.close()
    return Overflowing(polls, captures, over)


def test_each_step_waits_for_the_agreement_on_its_own_batch(run_ranks: Callable[..., list[Any]]) -> None:
    """The first one too, after a warm-up has used its memory, and ranks that pick no ids."""
    first, second, third = run_ranks(3, train_overflowing, changed(CONFIG, cuda_graph="iteration"))
    for of_rank in (first, second, third):
        assert all(of_rank.polls), of_rank.polls
        assert of_rank.captures == 1, "although every batch of the warm-up ran eagerly"
    assert (first.over, second.over, third.over) == (4, 0, 4), "without the warm-up's"
