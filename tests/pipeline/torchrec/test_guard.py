"""The guard's look runs beside the backward: whatever reads its flags waits, and all that follows comes after it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedTensor
from torchrec.distributed.types import NoWait

import dlrm_bench.pipeline.five_stage.pipeline
from dlrm_bench.dlrm.dense.loss_guard import LossGuard
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.build import build_pipeline
from dlrm_bench.pipeline.five_stage.cuda_graph import record
from dlrm_bench.pipeline.torchrec import guard
from dlrm_bench.pipeline.torchrec.guard import BesideBackward
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import Checked, iteration_graph_on_cpu
from tests.pipeline.five_stage.logical_streams import LogicalStreams, Order
from tests.pipeline.small_runs import batches_of
from tests.pipeline.test_non_finite import BAD, Trained, config_of, train

CPU = torch.device("cpu")
ONE = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=CPU)
STEPS = 10
DELAY = 300_000_000
"""Cycles, some 150 ms: longer than what is launched after the look, up to the end of the training."""
PIPELINES: dict[str, dict[str, Any]] = {
    "stock": {"pipeline": "torchrec"},
    "five-stage": {"pipeline": "five-stage"},
    "iteration": {"pipeline": "five-stage", "trim_input_dist": True, "pinned_d2h": True, "cuda_graph": "iteration"},
}
DENSE = {"pipeline": "five-stage", "pinned_d2h": True, "cuda_graph": "dense"}


# Streams of a GPU, on the CPU


@dataclass(frozen=True)
class Stream:
    """Stands for torch.cuda.Stream."""

    order: Order = field(compare=False)
    name: str

    def wait_stream(self, other: "Stream") -> None:
        named = self.order.named
        # What is current already has the name of its replay.
        mine, its = (of.name if of == current(self.order) else named(of.name) for of in (self, other))
        self.order.wait(self.order.times(its), mine)


def current(order: Order, device: torch.device | None = None) -> Stream:
    return Stream(order, order._current[-1])


def on(order: Order, stream: Stream | None) -> AbstractContextManager[None]:
    return nullcontext() if stream is None else order.on(order.named(stream.name))  # None: TorchRec's, on the CPU


@contextmanager
def streams_in(order: Order) -> Iterator[Stream]:
    """Yields the side stream on which guards that are built within launch."""
    side = Stream(order, "guard")
    with (
        patch.object(guard, "_side_stream", lambda device: side),
        patch.object(torch.cuda, "current_stream", partial(current, order)),
        patch.object(torch.cuda, "stream", partial(on, order)),
    ):
        yield side


class Flag:
    """A look whose flag is read by gradients on their way back, and by what follows."""

    def __init__(self) -> None:
        self.flag, self.weight = torch.zeros(1), torch.ones(3, requires_grad=True)
        self.looks = BesideBackward(self._raise, CPU)

    def _raise(self, loss: Tensor) -> None:
        self.flag.add_(loss)

    def forward(self, gate: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        vectors = self.weight * 2
        if gate is not None:
            vectors.register_hook(gate)
        loss = vectors.sum()
        self.looks.begin(loss)
        return loss

    def gate(self, gradient: Tensor) -> Tensor:
        self.looks.wait()
        return gradient * self.flag


def test_the_end_of_the_backward_waits_without_any_reader() -> None:
    with Order() as order, streams_in(order):
        of = Flag()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(of.forward(), [of.weight])
            of.flag.mul_(gradient[0])  # an update without a wait
            of.looks.wait()
    assert order.found == {}
    assert of.flag == 6 * 8 + 6 * 4 + 6 * 2


def test_without_that_wait_what_follows_is_found() -> None:
    with Order() as order, streams_in(order), patch.object(BesideBackward, "wait", lambda self: None):
        of = Flag()
        torch.autograd.grad(of.forward(), [of.weight])
        of.flag.mul_(2)
    assert any("guard uses by aten.add_" in found for found in order.found)


def test_the_look_is_beside_the_backward() -> None:
    """Until a reader waits, the current stream has not."""
    with Order() as order, streams_in(order) as side:
        of = Flag()
        loss = of.forward()
        assert "guard" not in order.times("main")
        torch.autograd.grad(loss, [of.weight])
        assert order.times("main")["guard"] == order.times(side.name)["guard"]


def test_each_stream_that_reads_waits_once() -> None:
    waits: list[tuple[str, str]] = []
    wait_stream = Stream.wait_stream

    def counted(stream: Stream, other: Stream) -> None:
        waits.append((stream.name, other.name))
        wait_stream(stream, other)

    with Order() as order, streams_in(order), patch.object(Stream, "wait_stream", counted):
        of = Flag()

        def gate(gradient: Tensor) -> Tensor:
            with order.on("other"):
                order.wait(order.times("main"))
                of.gate(gradient)
                of.gate(gradient)
            order.wait(order.times("other"))
            of.gate(gradient)
            return of.gate(gradient)

        for _ in range(2):
            torch.autograd.grad(of.forward(gate), [of.weight])
            of.looks.wait()
    assert order.found == {}
    assert waits == 2 * [("guard", "main"), ("other", "guard"), ("main", "guard")]


def test_a_stream_that_comes_after_a_part_of_the_backward_waits_itself() -> None:
    """As that of a dense update which begins when the last weight has its gradient."""
    marks: list[Any] = []
    with Order() as order, streams_in(order):
        of = Flag()
        for _ in range(3):
            loss = of.forward(lambda gradient: marks.append(dict(order.times())))
            torch.autograd.grad(loss, [of.weight])
            with order.on("update"):
                order.wait(marks[-1])
                of.looks.wait()
                of.flag.mul_(2)
            order.wait(order.times("update"))
    assert order.found == {}
    assert of.flag == 6 * 8 + 6 * 4 + 6 * 2


class Lossy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        loss = (self.weight * batch).sum().to(batch.dtype)
        return loss, loss.detach()


@pytest.mark.parametrize("early", [False, True])
def test_the_gate_of_dense_gradients_waits_on_the_stream_of_the_update(early: bool) -> None:
    with Order() as order, streams_in(order):
        model = Lossy()
        of_model = guard.TorchRecLossGuard(model, ONE)
        skip, gate = of_model.skip(), of_model.gate(model.parameters())
        for number, bad in ((1.0, 0), (torch.inf, 1), (1.0, 1)):
            loss, _ = model(torch.full((3,), number))
            (gradient,) = torch.autograd.grad(loss, [model.weight])
            model.weight.grad = torch.ones_like(gradient)
            made = {name: time for name, time in order.times().items() if name != "guard"}
            with order.on("update"):
                order.wait(made)
                if early:
                    gate.gradients_reduced([model.weight], [model.weight.grad])
                gate.step()
                assert model.weight.grad.tolist() == 3 * [1 - bad]
                assert skip == bad
            order.wait(order.times("update"))
    assert order.found == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_any_dtype_count_in_training_alone(dtype: torch.dtype) -> None:
    model = Lossy()
    gate = guard.TorchRecLossGuard(model, ONE).gate(model.parameters())
    for number, training, kept in ((torch.inf, False, 1.0), (1.0, True, 1.0), (torch.inf, True, 0.0)):
        model.train(training)(torch.full((3,), number, dtype=dtype))
        model.weight.grad = torch.ones(3)
        gate.step()
        assert model.weight.grad.tolist() == 3 * [kept]


class Lookup(nn.Module):
    """Stands for a sharded module with two features."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.weight, self._pooled = nn.Parameter(torch.ones(2, 3)), pooled

    def forward(self) -> NoWait[Any]:
        vectors = [vector.view(1, 3) * 1 for vector in self.weight]
        if self._pooled:
            return NoWait(KeyedTensor(["a", "b"], [3, 3], torch.cat(vectors, 1)))
        return NoWait({key: JaggedTensor.from_dense([of]) for key, of in zip("ab", vectors, strict=True)})


@pytest.mark.parametrize("feature", ["a", "b"])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", ["tables", "tables_of_items"])
def test_vectors_of_every_feature_and_module_are_gated(name: str, pooled: bool, feature: str) -> None:
    model = nn.ModuleDict({of: Lookup(pooled) for of in ("tables", "tables_of_items")})
    of_model = guard.TorchRecLossGuard(model, ONE)
    with patch.object(guard, "ShardedModule", Lookup):
        of_model.watch_lookups(model)
    of = model[name]().wait()[feature]
    ((of if pooled else of.values()) * torch.nan).sum().backward()
    assert model[name].weight.grad.tolist() == 2 * [3 * [0]]
    assert of_model.tallies.not_finite.tolist() == [1, 0]


def test_a_loss_without_a_gradient_is_waited_for_at_once() -> None:
    with Order() as order, streams_in(order), torch.no_grad():
        of = Flag()
        of.forward()
        of.flag.mul_(2)
    assert order.found == {}
    assert of.flag == 12


def test_after_a_backward_that_failed_readers_still_wait_and_the_loss_stays_allocated() -> None:
    def fail(gradient: Tensor) -> Tensor:
        raise RuntimeError("no gradient")

    with Order() as order, streams_in(order):
        of = Flag()
        with pytest.raises(RuntimeError, match="no gradient"):
            torch.autograd.grad(of.forward(fail), [of.weight])
        torch.zeros(1)  # would take the loss's memory
        of.looks.wait()
        of.flag.mul_(2)
        (gradient,) = torch.autograd.grad(of.forward(of.gate), [of.weight])
        torch.zeros(1)
    assert (order.found, of.looks._losses) == ({}, [])
    assert of.flag == 6 * 2 + 6
    assert gradient.tolist() == 3 * [2 * 18]


def launched(ranks: Ranks, name: str, gates_wait: bool) -> tuple[dict[str, int], dict[str, Any]]:
    """Returns the guard's accesses, in a training with an evaluation, that are in no order with those of other streams.
    gates_wait: whether the gates within the backward do."""
    whole = name == "iteration"
    if whole:
        iteration_graph_on_cpu()
    order, replay = Order(), Checked.replay
    config = config_of(STEPS, row_wise=False, **PIPELINES[name])

    def in_graph(graph: Checked) -> None:
        with order.replay():
            replay(graph)

    def end(looks: BesideBackward) -> None:
        wait(looks)
        looks._losses.clear()

    with ExitStack() as patches:
        patches.enter_context(streams_in(order))
        stage_streams: Any = lambda device, records: LogicalStreams(order)  # noqa: E731
        patches.enter_context(patch.object(dlrm_bench.pipeline.five_stage.pipeline, "StageStreams", stage_streams))
        patches.enter_context(patch.object(Checked, "replay", in_graph))
        wait = BesideBackward.wait
        if not gates_wait:
            patches.enter_context(patch.object(BesideBackward, "wait", lambda looks: None))
            patches.enter_context(patch.object(BesideBackward, "_end", end))
        with order:  # which knows the memory that is made within
            pipeline: Any = build_pipeline(config, config.pipeline, ranks)
        batches = [pipeline.prepare(batch) for batch in batches_of(config, ranks, STEPS)]
        training = iter(batches)
        for step in range(STEPS):
            with order:
                pipeline.train_step(training)
                if step == STEPS // 2:
                    assert len(list(pipeline.evaluate(iter(batches[:2])))) == 2
        described = pipeline.describe()
        pipeline.close()
    return {said: count for said, count in order.found.items() if "guard" in said}, described


def order_of_all(ranks: Ranks) -> dict[tuple[str, bool], tuple[dict[str, int], dict[str, Any]]]:
    return {(name, waits): launched(ranks, name, waits) for name in PIPELINES for waits in (True, False)}


def test_all_that_reads_flags_comes_after_the_look(run_ranks: Callable[..., list[Any]]) -> None:
    for of_rank in run_ranks(2, order_of_all):
        for name in PIPELINES:
            assert of_rank[name, True][0] == {}, name
            without = of_rank[name, False][0]
            assert any("aten.any.default" in said and "reads what guard" in said for said in without), name
        assert of_rank["iteration", True][1]["iteration_graph"]["replays"] > 3


# On GPUs


def late(look: Callable[..., None]) -> Callable[..., None]:
    def delayed(*args: Any) -> None:
        torch.cuda._sleep(DELAY)
        look(*args)

    return delayed


def train_late(ranks: Ranks, waits: bool) -> dict[str, Trained]:
    trained = {}
    for name, options in {**PIPELINES, "dense": DENSE}.items() if waits else [("stock", PIPELINES["stock"])]:
        with ExitStack() as patches:
            patches.enter_context(patch.object(LossGuard, "look", late(LossGuard.look)))
            if not waits:
                patches.enter_context(patch.object(BesideBackward, "wait", lambda looks: None))
            trained[name] = train(ranks, config_of(STEPS, row_wise=False, **options), "loss")
    return trained


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_no_weight_changes_however_late_the_flag_is(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    for rank, of_rank in enumerate(run_ranks(world_size, train_late, True, gpu=gpu)):
        assert of_rank.keys() == {*PIPELINES, "dense"}
        for name, trained in of_rank.items():
            bad = [i for i, loss in enumerate(trained.losses) if not torch.tensor(loss).isfinite()]
            assert bad == ([BAD] if rank == world_size - 1 else []), name
            assert trained.learned, name
            assert trained.changed == [], name


@pytest.mark.parametrize(("world_size", "gpu"), GPU_PLACES)
def test_weights_change_where_nothing_waits_for_a_late_flag(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    """So the test above can fail."""
    for of_rank in run_ranks(world_size, train_late, False, gpu=gpu):
        assert of_rank["stock"].changed != []


@pytest.mark.gpu
def test_a_graph_joins_the_look_and_one_that_fails_leaves_it_usable() -> None:
    device = torch.device("cuda", 0)
    flag, weight = torch.zeros(1, device=device), torch.ones(3, device=device, requires_grad=True)

    def look(loss: Tensor) -> None:
        torch.cuda._sleep(DELAY)
        flag.add_(loss)

    looks = BesideBackward(look, device)

    def step(fails: bool = False) -> None:
        loss = (weight.detach().requires_grad_() * 2).sum()
        looks.begin(loss)
        if fails:
            raise ValueError("between the look and the backward")
        loss.backward()

    step()
    flag.mul_(2)
    assert flag == 12
    with pytest.raises((ValueError, RuntimeError)):
        record(partial(step, fails=True))
    step()
    flag.mul_(2)
    assert flag == 36
    graph = record(step)
    assert flag == 36
    graph.replay()
    flag.mul_(2)
    assert flag == 84
