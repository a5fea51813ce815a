"""Adagrad's step as a graph is Adagrad's step, whatever happens to the optimizer on the way."""

import copy
import re
import signal
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import dlrm_bench.pipeline.five_stage.dense_update
import dlrm_bench.pipeline.five_stage.pipeline
from dlrm_bench.dlrm.ranks import Ranks
from dlrm_bench.pipeline.five_stage.dense_update import _CHANGED, _WATCHED, WARM_UP, DenseUpdate
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import Replayed
from tests.pipeline.five_stage.torchrec_models import Trained, batches, build, drain, state

CPU = torch.device("cpu")


class Recorded(Replayed):
    """A graph on the CPU that counts."""

    captures = replays = 0

    def __init__(self, work: Callable[[], None], *_: Any) -> None:
        def replay() -> None:
            Recorded.replays += 1
            with torch.no_grad():
                work()

        super().__init__(replay)
        Recorded.captures += 1


def graphs_on_cpu(patch: pytest.MonkeyPatch) -> None:
    Recorded.captures = Recorded.replays = 0
    patch.setattr(dlrm_bench.pipeline.five_stage.dense_update, "captures", lambda device: True)
    patch.setattr(dlrm_bench.pipeline.five_stage.dense_update, "record", Recorded)


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)


def optimizer_of(parameters: dict[str, nn.Parameter], **arguments: Any) -> tuple[CombinedOptimizer, Adagrad]:
    keyed = KeyedOptimizerWrapper(parameters, lambda params: Adagrad(params, **{"lr": 0.1, "eps": 1e-8} | arguments))
    return CombinedOptimizer([CombinedOptimizer([]), keyed]), keyed._optimizer


class Twins:
    """The same parameters under the plain optimizer and under DenseUpdate, with the same gradients."""

    def __init__(self, **arguments: Any) -> None:
        self.plain = {f"p{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate([(3, 4), (5,), ()])}
        self.graphed = copy.deepcopy(self.plain)
        self.grads = {name: torch.empty_like(p) for name, p in self.graphed.items()}
        self.optimizers = [optimizer_of(parameters, **arguments) for parameters in (self.plain, self.graphed)]
        self.update = DenseUpdate(self.optimizers[1][0], self.graphed.values(), CPU)

    def run(self, steps: int, unused: tuple[str, ...] = ()) -> tuple[int, int]:
        """Captures and replays meanwhile."""
        before = Recorded.captures, Recorded.replays
        for _ in range(steps):
            for name, grad in self.grads.items():
                grad.copy_(torch.randn(grad.shape))
                self.plain[name].grad = None if name in unused else grad.clone()
                self.graphed[name].grad = None if name in unused else grad
            self.optimizers[0][0].step()
            self.update.step()
            self.assert_equal()
        return Recorded.captures - before[0], Recorded.replays - before[1]

    def both(self, change: Callable[[Adagrad], Any]) -> None:
        for _, adagrad in self.optimizers:
            change(adagrad)

    def assert_equal(self) -> None:
        (one, _), (other, _) = self.optimizers
        assert all(torch.equal(self.plain[name], self.graphed[name]) for name in self.plain)
        for ours, theirs in zip(other.state_dict()["state"].values(), one.state_dict()["state"].values(), strict=True):
            assert ours.keys() == theirs.keys() == {"sum", "step"}
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


ANEW = (1, 10 - WARM_UP)
"""Captures and replays of ten steps, from the first one that is another."""


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("arguments", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"foreach": True}])
def test_a_replay_is_a_step(arguments):
    twins = Twins(**arguments)
    assert twins.run(10) == ANEW
    assert twins.run(10) == (0, 10)
    assert twins.optimizers[1][1].state[twins.graphed["p0"]]["step"] == 20
    assert twins.update.why_not is None
    twins.update.close()
    assert twins.update.why_not is None


def change_learning_rate(adagrad: Adagrad) -> None:
    adagrad.param_groups[0]["lr"] = 0.3


def load(adagrad: Adagrad) -> None:
    adagrad.load_state_dict(copy.deepcopy(adagrad.state_dict()))


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("change", [change_learning_rate, load])
def test_a_change_is_noticed(change):
    twins = Twins()
    twins.run(10)
    twins.both(change)
    assert twins.update.why_not is None
    assert twins.run(10) == ANEW
    assert twins.update.why_not == f"{WARM_UP} of 20 steps ran eagerly: {_CHANGED}"
    twins.update.close()
    assert twins.update.why_not is not None


@pytest.mark.usefixtures("graphed")
def test_parameters_come_and_go():
    twins = Twins()
    twins.run(10)
    assert twins.run(10, unused=("p1",)) == ANEW
    assert twins.run(10) == ANEW


@pytest.mark.usefixtures("graphed")
def test_state_that_is_written_in_place_is_read():
    twins = Twins()
    twins.run(10)
    twins.both(lambda adagrad: [state["sum"].fill_(7.0) for state in adagrad.state.values()])
    assert twins.run(10) == (0, 10)


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(
    ("arguments", "why"), [({"lr_decay": 0.1}, "lr_decay"), ({"lr": torch.tensor(0.1)}, "is a tensor")]
)
def test_what_changes_from_step_to_step_is_eager(arguments, why):
    twins = Twins(**arguments)
    assert twins.run(10) == (0, 0)
    assert re.match(rf"{10 - WARM_UP} of 10 steps ran eagerly: .*{why}", twins.update.why_not or "")


@pytest.mark.usefixtures("graphed")
def test_a_learning_rate_set_before_every_step_is_said():
    twins = Twins()
    for step in range(10):
        twins.both(lambda adagrad, rate=0.1 * 0.9**step: adagrad.param_groups[0].update(lr=rate))
        assert twins.run(1) == (0, 0)
        assert twins.update.why_not == (
            f"{step + 1 - WARM_UP} of {step + 1} steps ran eagerly: {_CHANGED}" if step >= WARM_UP else None
        )


@pytest.mark.usefixtures("graphed")
def test_whoever_watches_steps_sees_them():
    twins, seen = Twins(), []
    twins.run(10)
    handle = twins.optimizers[1][1].register_step_post_hook(lambda *_: seen.append(1))
    assert twins.update.why_not == _WATCHED
    assert twins.run(10) == (0, 0)
    assert len(seen) == 10
    handle.remove()
    assert twins.run(10)[1] > 0
    assert twins.update.why_not == f"10 of 30 steps ran eagerly: {_WATCHED}"
    twins.both(lambda adagrad: torch.optim.lr_scheduler.ConstantLR(adagrad, factor=1.0))
    assert twins.run(10) == (0, 0)
    assert twins.update.why_not == f"20 of 40 steps ran eagerly: {_WATCHED}"


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("level", [0, 1])
def test_a_scheduler_of_before_is_known_at_once(level):
    twins = Twins()
    for optimizers in twins.optimizers:
        torch.optim.lr_scheduler.LambdaLR(optimizers[level], lambda step: 1.0)
    twins.update = DenseUpdate(twins.optimizers[1][0], twins.graphed.values(), CPU)
    assert twins.update.why_not == _WATCHED
    assert twins.run(10) == (0, 0)
    assert twins.update.why_not == f"10 of 10 steps ran eagerly: {_WATCHED}"


@pytest.mark.usefixtures("graphed")
def test_an_adagrad_with_parameters_of_others_is_left_alone():
    twins = Twins()
    twins.update = DenseUpdate(twins.optimizers[1][0], list(twins.graphed.values())[1:], CPU)
    assert "give these an optimizer of their own" in (twins.update.why_not or "")
    assert twins.run(10) == (0, 0)


class Clipping(GradientClippingOptimizer):
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        named = {str(i): parameter for i, parameter in enumerate(parameters)}
        super().__init__(KeyedOptimizerWrapper(named, lambda params: Adagrad(params, lr=0.1)), GradientClipping.NORM)


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, Clipping])
def test_other_optimizers_are_named(optimizer):
    parameters = {"p": nn.Parameter(torch.ones(3)), "q": nn.Parameter(torch.ones(2))}
    own = optimizer(parameters.values())
    assert DenseUpdate(own, parameters.values(), CPU).why_not == (
        f"it is {optimizer.__name__}'s, and only torch.optim.Adagrad's step is captured"
    )


class Fused(FusedOptimizer):
    def __init__(self) -> None:
        table = nn.Parameter(torch.ones(3))
        super().__init__({"table": table}, {}, [{"params": [table], "lr": 0.1}])

    def step(self, closure: Any = None) -> None:
        """The backward has done it."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """There is none."""


@pytest.mark.usefixtures("graphed")
def test_tables_that_step_in_the_backward_need_no_graph():
    fused = Fused()
    parameters = {"p": nn.Parameter(torch.ones(3))}
    warm_up = WarmupOptimizer(fused, [WarmupStage(WarmupPolicy.NONE)])
    keyed = KeyedOptimizerWrapper(parameters, lambda params: Adagrad(params, lr=0.1))
    for tables in (fused, warm_up):
        update = DenseUpdate(CombinedOptimizer([("tables", tables), ("dense", keyed)]), parameters.values(), CPU)
        assert update.why_not is None
        assert len(update._graphs) == 1


def test_without_a_gpu_nothing_is_captured():
    assert Twins().update.why_not == "there are no CUDA graphs on cpu"


@pytest.mark.usefixtures("graphed")
def test_a_capture_that_fails_leaves_steps_eager(monkeypatch):
    def record(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(dlrm_bench.pipeline.five_stage.dense_update, "record", record)
    twins = Twins()
    assert twins.run(10) == (0, 0)
    assert twins.update.why_not == f"{10 - WARM_UP} of 10 steps ran eagerly: its capture failed: RuntimeError: no"


def train(ranks: Ranks, options: FiveStageOptions | None, steps: int = 12) -> tuple[Trained, Any]:
    model, optimizer = build(ranks, "TW")
    trainer: Any = (
        TrainPipelineSparseDist(model, optimizer, ranks.device)
        if options is None
        else FiveStagePipeline(model, optimizer, ranks.device, options)
    )
    trained = drain(trainer, iter(batches(ranks, steps)))
    trained.state = state(model, optimizer)
    return trained, trainer


def pipelined(ranks: Ranks) -> None:
    signal.alarm(600)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.device.type == "cpu":
            graphs_on_cpu(patch)
            patch.setattr(dlrm_bench.pipeline.five_stage.pipeline, "why_not_graphed", lambda *_: None)
        exact = 0 if ranks.device.type == "cpu" else 1e-5
        for threads in (1, 2):
            theirs, _ = train(ranks, None)
            ours, trainer = train(ranks, FiveStageOptions(cuda_graph="dense", launch_threads=threads))
            (update,) = trainer._graphed_update._graphs.values()
            assert update._graph is not None
            torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=exact, atol=exact)
            torch.testing.assert_close(ours.state, theirs.state, rtol=10 * exact, atol=exact)
            del update
            trainer.close()


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), *GPU_PLACES])
def test_trains_what_torchrec_trains(run_ranks, world_size, gpu):
    run_ranks(world_size, pipelined, gpu=gpu)
