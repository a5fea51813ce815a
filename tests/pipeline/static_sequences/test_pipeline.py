"""DLRMv4 in the static pipeline: losses and states of stock TorchRec on the same batches, whatever room these need."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlrm_bench.dlrm.tables.sequence.capacity
import dlrm_bench.pipeline.static_sequences.pipeline
import dlrm_bench.pipeline.static_sequences.room
from dlrm_bench.bench.config import PIPELINES, RunConfig
from dlrm_bench.bench.presets import preset
from dlrm_bench.dlrm.data.loader import Prefetcher
from dlrm_bench.dlrm.dlrmv4.data.dataset import WindowBatch
from dlrm_bench.dlrm.dlrmv4.data.generate import generate, smoke_config
from dlrm_bench.dlrm.dlrmv4.parts import open_data
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from tests.cases import PLACES
from tests.pipeline.cpu_graphs import capture_on_cpu
from tests.pipeline.whole_state import ModelState, load_whole_state, whole_state

STEPS = 26
"""Of each half: 52 in all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("days")
    generate(replace(smoke_config(folder), users=300, days=5))
    return folder


def small(folder: Path, pipeline: str, samples: int = 8, **options: Any) -> RunConfig:
    """The smoke preset without dropout, whose masks the pipelines draw in other orders."""
    config = preset("smoke-dlrmv4")
    return replace(
        config,
        model=replace(config.model, input_dropout=0.0, layer_dropout=0.0),
        data=replace(config.data, path=folder, drop_last_evaluation=False),
        optimizer=replace(config.optimizer, ramp_steps=20),
        local_batch_size=samples,
        pipeline=PIPELINES[pipeline](**options),
    )


@dataclass(slots=True)
class Trained:
    losses: list[float]
    state: ModelState
    later: list[float]
    """Losses with which it goes on."""
    logits: list[Tensor]
    """Of the evaluation between."""
    described: dict[str, Any]


def drawn(config: RunConfig, ranks: Ranks) -> list[WindowBatch]:
    """Batches of all windows, the one of most events not among the first."""
    batches = open_data(config).train_batches(ranks.rank, ranks.world_size, config.local_batch_size)
    assert len(batches) >= 2 * STEPS
    return [batches[(17 * i) % len(batches)] for i in range(2 * STEPS)][::-1]


def evaluated(config: RunConfig, ranks: Ranks) -> list[WindowBatch]:
    """The last batches of an evaluation: the very last has few samples, of some ranks none."""
    batches = open_data(config).eval_batches(ranks.rank, ranks.world_size, config.local_batch_size)
    return [batches[i] for i in range(max(0, len(batches) - 3), len(batches))]


def train(ranks: Ranks, config: RunConfig, state: ModelState | None = None, half: int = STEPS) -> Trained:
    """state: to go on from, with the second half of the batches. half: batches of each half."""
    torch.set_float32_matmul_precision("highest")
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    if config.pipeline.name == "static":
        pipeline.warm_up(evaluates=True)
    batches, first = drawn(config, ranks)[: 2 * half], 0
    if state is not None:
        load_whole_state(pipeline, state)
        batches, first = batches[half:], half
    prepared: Iterator[Any] = Prefetcher(batches, pipeline.prepare, 4, 2)  # beside what the training thread does

    def steps(begin: int) -> list[float]:
        losses = []
        for iteration in range(begin, begin + half):
            pipeline.set_learning_rate(config.optimizer.rate(iteration + 1))
            losses.append(pipeline.train_step(prepared).item())
        return losses

    losses = steps(first)
    after = whole_state(pipeline)
    logits = [of for of, _ in pipeline.evaluate(map(pipeline.prepare, evaluated(config, ranks)))]
    later = steps(half) if state is None else []
    with pytest.raises(StopIteration):
        pipeline.train_step(prepared)
    described = pipeline.describe()
    pipeline.close()
    return Trained(losses, after, later, logits, described)


def assert_equal(ours: Trained, theirs: Trained, gpu: bool = False) -> None:
    """gpu: sums of plain PyTorch have another order in each run there, and Adam makes steps of a rate of what rounding
    leaves of gradients that are nearly 0."""
    assert len(set(theirs.losses)) > len(theirs.losses) // 2
    for a, b in ((ours.losses, theirs.losses), (ours.later, theirs.later)):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-3 if gpu else 1e-5)
    for mine, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=5e-2 if gpu else 1e-4)
    for of_ours, of_theirs in (
        (ours.state.weights, theirs.state.weights),
        (ours.state.optimizer, theirs.state.optimizer),
    ):
        assert of_ours.keys() == of_theirs.keys()
        for key, of in of_theirs.items():
            near = {"rtol": 1e-3, "atol": 5e-3 if gpu else 1e-5}
            torch.testing.assert_close(of_ours[key], of, **near, msg=lambda m, key=key: f"{key}: {m}")


def without_room() -> None:
    """In this process: rooms for ids are as small as batches, each known when it comes, and ranks exchange fewer rows
    than most have."""
    dlrm_bench.pipeline.static_sequences.pipeline.AHEAD = 1
    dlrm_bench.pipeline.static_sequences.room._IDS_MULTIPLE = 8
    dlrm_bench.pipeline.static_sequences.room._IDS_SLACK = 1.0
    dlrm_bench.dlrm.tables.sequence.capacity._SLACK = 0.45
    dlrm_bench.dlrm.tables.sequence.capacity._LEAST_SLACK = 1


def train_all(ranks: Ranks, folder: Path) -> dict[str, Trained]:
    results = {"stock": train(ranks, small(folder, "torchrec"))}
    if ranks.device.type == "cpu":
        capture_on_cpu()
    options = {"cuda_graph": "iteration", "overlap": True, "check_ids": True}
    results["static"] = train(ranks, small(folder, "static", **options))
    by_items = {"kernels": "fused", "content": "items"}
    stock = small(folder, "torchrec")
    results["stock by items"] = train(ranks, replace(stock, model=replace(stock.model, **by_items)))
    without_room()
    config = small(folder, "static")
    results["without room"] = train(ranks, replace(config, model=replace(config.model, **by_items)))
    return results


@pytest.mark.parametrize(("world_size", "gpu"), PLACES)
def test_trains_what_stock_trains(
    run_ranks: Callable[..., list[Any]], folder: Path, world_size: int, gpu: bool
) -> None:
    for rank in run_ranks(world_size, train_all, folder, gpu=gpu):
        assert_equal(rank["static"], rank["stock"], gpu)
        assert_equal(rank["stock by items"], rank["stock"], gpu)
        assert_equal(rank["without room"], rank["stock"], gpu)
        roomy, tight = (rank[name].described["rooms"] for name in ("static", "without room"))
        assert roomy["iteration"]["larger_rooms"] == roomy["iteration"]["batches_over_capacity"] == 0
        assert tight["iteration"]["larger_rooms"] >= 3
        assert tight["iteration"]["room_for_items"] < tight["iteration"]["room_for_events"]
        assert roomy["iteration"]["room_for_items"] == roomy["iteration"]["room_for_events"]
        assert (tight["iteration"]["batches_over_capacity"] > 10) == (world_size > 1)
        assert sum(roomy["iteration"]["batches_by_room_for_tokens"].values()) == 2 * STEPS
        captures = rank["static"].described["cuda_graphs"]["iteration"]["captures"]
        assert 1 <= captures <= len(roomy["iteration"]["batches_by_room_for_tokens"]) + 1


def with_one_row(folder: Path, pipeline: str) -> RunConfig:
    """Batches of one sample, and a table that has a row on the first rank alone."""
    config = small(folder, pipeline, 1)
    return replace(config, model=replace(config.model, context_rows=(*config.model.context_rows[:-1], 1)))


def from_state(ranks: Ranks, folder: Path) -> dict[str, Trained]:
    results = {name: train(ranks, with_one_row(folder, name), half=5) for name in ("torchrec", "static")}
    for name, other in (("torchrec", "static"), ("static", "torchrec")):
        results[f"from {name}"] = train(ranks, replace(with_one_row(folder, other), seed=1), results[name].state, 5)
    return results


def test_states_move_between_it_and_stock(run_ranks: Callable[..., list[Any]], folder: Path) -> None:
    """Of batches of one sample a rank, with a table of fewer rows than ranks."""
    for rank in run_ranks(2, from_state, folder):
        assert_equal(rank["static"], rank["torchrec"])
        for name in ("torchrec", "static"):
            found, expected = rank[f"from {name}"].losses, rank[name].later
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)


def state_bits(pipeline: Any) -> list[Tensor]:
    return [
        block.local.clone()
        for of_kind in pipeline.state_blocks()
        for blocks in of_kind.values()
        for block in blocks
        if block.local is not None
    ]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def around(ranks: Ranks, folder: Path) -> dict[str, bool]:
    """Whether a warm-up leaves all bits, runs are equal to the bit, and a loss that is not finite on one rank stops
    the weights of all."""
    config = small(folder, "static")
    config = replace(config, model=replace(config.model, input_dropout=0.2))
    found, losses, states = {}, [], []
    for warm in (True, False):
        pipeline: Any = build_pipeline(config, config.pipeline, ranks)
        before = state_bits(pipeline)
        if warm:
            pipeline.warm_up(evaluates=True)
            found["warm-up leaves all"] = equal(before, state_bits(pipeline))
        batches = map(pipeline.prepare, drawn(config, ranks))
        losses.append([pipeline.train_step(batches).item() for _ in range(6)])
        states.append(state_bits(pipeline))
    found["runs are equal"] = losses[0] == losses[1] and equal(*states)
    found["masks differ"] = len(set(losses[0])) == 6
    if ranks.rank == ranks.world_size - 1:
        pipeline.dense.bucket.weights[:8] = float("nan")
    before = state_bits(pipeline)
    lost = [pipeline.train_step(batches).isfinite().item() for _ in range(2)]
    found["loss is lost on one rank"] = lost == [ranks.rank != ranks.world_size - 1] * 2
    after = state_bits(pipeline)
    found["nothing changes"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.isfinite().all())
    for _ in batches:
        pass
    list(islice(iter(lambda: pipeline._train.run(batches), None), 100))
    with pytest.raises(ValueError, match="give one iterator over all of them"):
        pipeline.train_step(map(pipeline.prepare, drawn(config, ranks)))
    return found


def test_around_the_training(run_ranks: Callable[..., list[Any]], folder: Path) -> None:
    for found in run_ranks(2, around, folder):
        assert found == dict.fromkeys(found, True)


def diverge(ranks: Ranks, folder: Path) -> tuple[bool, bool]:
    """Whether a warm-up at a rate at which the loss is lost leaves all bits, and whether weights change after it."""
    config = small(folder, "static")
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=1e30, ramp_steps=0))
    pipeline: Any = build_pipeline(config, config.pipeline, ranks)
    before, look, flags = state_bits(pipeline), pipeline._guard.look, []
    pipeline._guard.look = lambda losses: (look(losses), flags.append(int(pipeline._guard.watch.stopped)))
    pipeline.warm_up(evaluates=False)
    assert flags[0] == 0 < flags[-1]
    left = equal(before, state_bits(pipeline))
    pipeline.set_learning_rate(1e-3)
    pipeline.train_step(map(pipeline.prepare, drawn(config, ranks)))
    return left, not equal(before, state_bits(pipeline))


def test_a_warm_up_that_diverges_stops_no_training(run_ranks: Callable[..., list[Any]], folder: Path) -> None:
    assert run_ranks(1, diverge, folder) == [(True, True)]


def go_on(ranks: Ranks, folder: Path) -> tuple[list[float], list[float], Any, Any]:
    """Returns the losses of the second half of a training, and of one that resumes there, and both's rooms."""
    without_room()
    config = small(folder, "static")
    config = replace(config, model=replace(config.model, input_dropout=0.2))
    batches = drawn(config, ranks)
    straight: Any = build_pipeline(config, config.pipeline, ranks)
    later: Any = build_pipeline(config, config.pipeline, ranks)

    def steps(pipeline: Any, prepared: Iterator[Any], first: int, count: int) -> list[float]:
        losses = []
        for iteration in range(first, first + count):
            pipeline.set_learning_rate(config.optimizer.rate(iteration + 1))
            losses.append(pipeline.train_step(prepared).item())
        return losses

    straight.warm_up(evaluates=True)
    stream = map(straight.prepare, batches)
    steps(straight, stream, 0, STEPS)
    load_whole_state(later, whole_state(straight))
    later.go_on_after(STEPS, straight.capacities())
    later.warm_up(evaluates=True)
    began = later.describe()["rooms"], straight.describe()["rooms"]
    losses = steps(straight, stream, STEPS, STEPS), steps(later, map(later.prepare, batches[STEPS:]), STEPS, STEPS)
    assert later.capacities() == straight.capacities()
    with pytest.raises(ValueError, match="capacities that no version has: training "):
        later.go_on_after(STEPS, {"training": {"events": 8}})
    for pipeline in (straight, later):
        pipeline.close()
    return (*losses, *began)


def test_a_resumed_training_has_the_capacities_and_bits_of_an_uninterrupted_one(
    run_ranks: Callable[..., list[Any]], folder: Path
) -> None:
    for straight, later, began, before in run_ranks(2, go_on, folder):
        assert straight == later
        for name in ("iteration", "evaluation"):
            assert all(began[name][of] == before[name][of] for of in ("room_for_events", "room_for_rows"))
        assert before["iteration"]["larger_rooms"] > 0
