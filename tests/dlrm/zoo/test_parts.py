"""Each model trains by stock TorchRec and by the drop-in with equal losses, and its state moves between them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlrm_bench.bench.config import RunConfig
from dlrm_bench.dlrm.benchmarks import named
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.dlrm.zoo.small import ALL_ON, DISTINCT, PRESETS, drawn, padded, small
from tests.pipeline.cpu_graphs import dense_graph_on_cpu
from tests.pipeline.whole_state import ModelState, load_whole_state, whole_state

STEPS = DISTINCT + 2


@dataclass(slots=True)
class Trained:
    losses: list[float]
    state: ModelState
    later: list[float]
    """Losses with which it goes on."""
    described: dict[str, Any]


def train(ranks: Ranks, config: RunConfig, state: ModelState | None = None) -> Trained:
    """state: to go on from, with the second half of the batches."""
    torch.set_float32_matmul_precision("highest")
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    batches = drawn(replace(config, seed=0), ranks, 2 * STEPS)
    if state is not None:
        load_whole_state(pipeline, state)
        batches = batches[STEPS:]
    prepared = map(pipeline.prepare, batches)
    losses = [pipeline.train_step(prepared).item() for _ in range(STEPS)]
    after = whole_state(pipeline)
    later = [pipeline.train_step(prepared).item() for _ in range(0 if state is not None else STEPS)]
    described = pipeline.describe()
    pipeline.close()
    return Trained(losses, after, later, described)


def train_all(ranks: Ranks) -> dict[str, dict[str, Trained]]:
    results = {}
    for name in PRESETS:
        of_preset = {"stock": train(ranks, small(name)), "all off": train(ranks, small(name, "five-stage"))}
        of_preset["all on"] = train(ranks, padded(small(name, "five-stage", **ALL_ON)))
        state = of_preset["stock"].state
        of_preset["from stock"] = train(ranks, small(name, "five-stage", seed=1), state)
        results[name] = of_preset
    return results


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.multi_gpu)])
def gpu(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def trained(run_ranks: Callable[..., list[Any]], gpu: bool) -> list[dict[str, dict[str, Trained]]]:
    return run_ranks(2, train_all, gpu=gpu)


def assert_equal(ours: ModelState, theirs: ModelState) -> None:
    for of_ours, of_theirs in ((ours.weights, theirs.weights), (ours.optimizer, theirs.optimizer)):
        assert of_ours.keys() == of_theirs.keys()
        assert [key for key in of_theirs if not torch.equal(of_ours[key], of_theirs[key])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_drop_in_trains_what_stock_trains(
    trained: list[dict[str, dict[str, Trained]]], gpu: bool, name: str
) -> None:
    for rank in trained:
        stock, off, on = (rank[name][variant] for variant in ("stock", "all off", "all on"))
        assert len(set(stock.losses)) == STEPS
        for ours in (off, on):
            losses = torch.tensor(ours.losses + ours.later), torch.tensor(stock.losses + stock.later)
            torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
            # A padded batch of HSTU has sums over more rows, made in another order.
            if not gpu and (ours is off or name != "hstu-tiny"):
                assert torch.equal(*losses)
                assert_equal(ours.state, stock.state)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_state_is_whole(trained: list[dict[str, dict[str, Trained]]], gpu: bool, name: str) -> None:
    """Tables with Adagrad's state, dense weights with all of Adam's; a pipeline with other initial weights goes on from
    it as if nothing had moved."""
    state = trained[0][name]["stock"].state
    tables = {key for key in state.weights if ".embedding_bags." in key or ".embeddings." in key}
    assert len(tables) == small(name).model.tables.count
    endings = ("", ".step", ".exp_avg", ".exp_avg_sq")
    dense = {key + ending for key in state.weights.keys() - tables for ending in endings[1:]}
    assert state.optimizer.keys() == tables | dense
    assert all(values.any() for key, values in state.optimizer.items() if key in tables or key.endswith(".step"))
    for rank in trained:
        resumed, stock = rank[name]["from stock"].losses, rank[name]["stock"].later
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(stock), rtol=1e-5 if gpu else 0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_described(trained: list[dict[str, dict[str, Trained]]], gpu: bool, name: str) -> None:
    described = trained[0][name]["all on"].described
    plan, tables = described["sharding_plan"], small(name).model.tables
    assert len(plan) == tables.count
    assert {of_table["ranks"][0] for of_table in plan.values()} == {0, 1}
    by_dist = described["input_dist"]
    assert by_dist["static"]
    assert not by_dist.get("torchrec")
    assert bool(described["graphed_dists"]) == gpu


@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_takes_the_memory_that_is_counted(name: str) -> None:
    config = padded(small(name))
    parts = named(config.benchmark).parts()
    ranks: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    most = 0
    for one in (parts.empty_batch(config, pin=False), *drawn(config, ranks, DISTINCT)):
        tensors = [
            tensor
            for part in one.batch.parts()
            for tensor in ((part,) if isinstance(part, Tensor) else (part.values(), part.lengths()))
        ]
        most = max(most, sum(tensor.nbytes for tensor in tensors))
    counted = parts.batch_bytes(config)
    assert most <= counted <= 2 * most


def test_random_labels_have_no_evaluation() -> None:
    config = small("zoo-dlrm")
    with pytest.raises(ValueError, match=r"--target-auc: random data have no evaluation samples: leave it out$"):
        replace(config, target_auc=0.8)
    with pytest.raises(ValueError, match="--target-auc"):
        named(config.benchmark).parts().open_data(config).eval_batches(0, 1, 4)


def test_the_static_pipeline_does_not_train_them() -> None:
    with pytest.raises(ValueError, match="--pipeline static does not train zoo-dlrm: choose one of torchrec, five-"):
        small("zoo-dlrm", "static")


GUARDED = ("zoo-two-towers", "zoo-sequence", "hstu-tiny")
"""Two EBCs; an EC beside one; an EC alone, of row-wise Adagrad. All with Adam."""
STOPPED, BAD = 2 * DISTINCT + 2, 2 * DISTINCT
"""Steps, and the first of them with something that is not finite, on the last rank; in a graph it is a replayed one."""


@dataclass(slots=True)
class Stopped:
    bad: list[bool]
    """Which losses were not finite."""
    changed: list[str]
    """Names of the tensors that the step after the bad one, or a later one, changed."""
    changed_by_bad: list[str]
    spoilt: list[str]
    told: bool
    learned: bool
    captured: bool | None
    """Whether a graph was replayed at the end; None where there was to be none."""
    off: dict[str, str]
    """Why something did not run as asked for."""


def own_state(pipeline: Any) -> dict[str, Tensor]:
    return {
        f"{kind} {key} {i}": block.local.clone()
        for kind, of_kind in zip(("weights", "state"), pipeline.state_blocks(), strict=True)
        for key, blocks in of_kind.items()
        for i, block in enumerate(blocks)
        if block.local is not None
    }


def stop(ranks: Ranks, what: str, name: str, kind: str) -> Stopped:
    config = small(name) if kind == "torchrec" else small(name, "five-stage")
    if kind == "captured":
        config = padded(small(name, "five-stage", trim_input_dist=True, cuda_graph="dense"))
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    prepared = map(pipeline.prepare, drawn(config, ranks, STOPPED + DISTINCT))
    plain, last = functional.binary_cross_entropy_with_logits, ranks.rank == ranks.world_size - 1
    of_loss, of_gradient = torch.ones((), device=ranks.device), torch.ones((), device=ranks.device)  # graphs read them

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        loss = plain(logits, labels) * of_loss
        if isinstance(loss, Tensor) and loss.requires_grad:  # TorchRec's trace has a stand-in
            loss.register_hook(lambda gradient: gradient * of_gradient)
        return loss

    states, losses = [own_state(pipeline)], []
    with patch.object(functional, "binary_cross_entropy_with_logits", loss_of):
        for step in range(STOPPED):
            poisoned = of_loss if what == "loss" else of_gradient
            poisoned.fill_(torch.nan if step == BAD and last else 1)
            losses.append(pipeline.train_step(prepared))
            states.append(own_state(pipeline))
    told = bool(pipeline.tallies().not_finite.any())
    captured = pipeline._train._graph.captured if kind == "captured" else None
    off = pipeline.describe().get("switched_off", {})
    pipeline.close()
    first, before, after_bad, end = states[0], states[BAD], states[BAD + 1], states[-1]
    return Stopped(
        bad=[not loss.isfinite().item() for loss in losses],
        changed=[key for key, value in after_bad.items() if not torch.equal(value, end[key])],
        changed_by_bad=[key for key, value in before.items() if not torch.equal(value, after_bad[key])],
        spoilt=[key for key, value in end.items() if not value.isfinite().all()],
        told=told,
        captured=captured,
        off=off,
        learned=any(not torch.equal(value, before[key]) for key, value in first.items() if key.startswith("weights")),
    )


def stop_all(ranks: Ranks) -> dict[tuple[str, str, str], Stopped]:
    stopped = {}
    for kind in ("torchrec", "five-stage", "captured"):
        if kind == "captured":
            dense_graph_on_cpu()  # the last kind, because that stays; it runs HSTU's indices before they are filled
        for what in ("loss", "gradient"):
            for name in GUARDED[: 2 if kind == "captured" else 3]:
                stopped[what, name, kind] = stop(ranks, what, name, kind)
    return stopped


@pytest.mark.slow
def test_nothing_changes_after_what_is_not_finite(run_ranks: Callable[..., list[Any]]) -> None:
    """Neither tables nor dense weights, nor Adam's momentum; of a bad gradient's own step tables alone change."""
    for rank, stopped in enumerate(run_ranks(2, stop_all)):
        for case, of_case in stopped.items():
            assert of_case.learned, case
            assert of_case.captured in (None, True), (case, of_case.off)
            assert of_case.changed == [], case
            assert of_case.spoilt == [], case
            if case[0] == "loss":
                assert of_case.bad == [rank == 1 and step == BAD for step in range(STOPPED)], case
                assert of_case.changed_by_bad == [], case
                assert not of_case.told, case
            else:
                assert of_case.told, case
                assert all(".embedding" in key for key in of_case.changed_by_bad), case
