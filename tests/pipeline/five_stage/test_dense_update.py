"""The step as a graph is the optimizer's step, whatever happens to the optimizer on the way."""

import copy
import gc
import re
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed import TrainPipelineSparseDist

import dlrm_bench.pipeline.five_stage.dense_update
import dlrm_bench.pipeline.five_stage.pipeline
import dlrm_bench.pipeline.five_stage.step_graph
from dlrm_bench.dlrm.dense.guarded_adam import GuardedAdam
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.captured_update import CapturedUpdate
from dlrm_bench.pipeline.five_stage.dense_update import WATCHED, DenseUpdate
from dlrm_bench.pipeline.five_stage.options import FiveStageOptions
from dlrm_bench.pipeline.five_stage.pipeline import FiveStagePipeline
from dlrm_bench.pipeline.five_stage.step_graph import CHANGED, WARM_UP, StepWork, why_never
from tests.cases import GPU_PLACES
from tests.pipeline.five_stage.graphed_steps import ANEW, CPU, Twins, graphs_on_cpu
from tests.pipeline.five_stage.torchrec_models import Trained, batches, build, drain, state


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)


class Lamb(torch.optim.Optimizer):
    """As people write their own, with the option `capturable`: the host reads its step count without it."""

    runs_in_graphs = True

    def __init__(self, params: Any, lr: float, capturable: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "capturable": capturable})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], **group)

    def _step(self, parameter: Tensor, state: dict[str, Any], lr: Any, betas: Any, eps: float, **of: Any) -> None:
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if of["capturable"] else CPU)
            state |= {"mean": torch.zeros_like(parameter), "var": torch.zeros_like(parameter)}
        state["step"] += 1
        count = state["step"] if of["capturable"] else state["step"].item()
        state["mean"].lerp_(parameter.grad, 1 - betas[0])
        state["var"].mul_(betas[1]).addcmul_(parameter.grad, parameter.grad, value=1 - betas[1])
        update = state["mean"] / (1 - betas[0] ** count) / ((state["var"] / (1 - betas[1] ** count)).sqrt() + eps)
        parameter -= lr * (parameter.norm() / update.norm()).clamp(0.01, 10) * update


MOMENTUM = {"momentum": 0.9, "weight_decay": 0.1}
KINDS = [
    *((Adagrad, 0, of) for of in ({}, {"weight_decay": 0.1}, {"maximize": True}, {"foreach": True})),
    *((SGD, 0, of) for of in ({}, MOMENTUM, MOMENTUM | {"nesterov": True}, {"momentum": 0.9, "dampening": 0.5})),
    (SGD, 0, {"fused": True}),
    # torch's own arithmetic differs with `capturable`, by rounding.
    *((Adam, 1e-5, of) for of in ({}, {"weight_decay": 0.1, "amsgrad": True}, {"foreach": True})),
    *((AdamW, 1e-5, of) for of in ({}, {"maximize": True})),
    (Lamb, 1e-5, {}),
    (Adam, 0, {"capturable": True}),
    (AdamW, 0, {"fused": True}),
    (Lamb, 0, {"capturable": True}),
]


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(("kind", "rtol", "arguments"), KINDS)
def test_a_replay_is_a_step(kind, rtol, arguments):
    twins = Twins(kind, rtol, **arguments)
    assert twins.run(10) == ANEW
    assert twins.run(10) == (0, 10)
    assert twins.optimizers[1][1].state[twins.graphed["p0"]].get("step", 20) == 20
    assert twins.update.why_not is None
    twins.update.close()
    assert twins.update.why_not is None


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(
    ("kind", "rtol", "arguments"), [(Adam, 1e-5, {}), (AdamW, 0, {"fused": True}), (Adagrad, 0, {})]
)
def test_state_that_is_loaded_in_place_is_that_of_the_next_step(kind, rtol, arguments):
    twins = Twins(kind, rtol, **arguments)
    twins.run(5)
    saved = [copy.deepcopy(combined.state_dict()) for combined, _ in twins.optimizers]
    twins.run(20)
    for (combined, _), of in zip(twins.optimizers, saved, strict=True):
        combined.load_state_dict(of)  # TorchRec's, which copies into what is there
    assert twins.run(10) == (0, 10)


class Given(TorchDispatchMode):
    """Notes the tensors that work is given, without keeping them, as a graph of it does."""

    def __init__(self, work: Callable[[], None], *_: Any) -> None:
        super().__init__()
        self.given: list[weakref.ref[Tensor]] = []
        self._made: list[Tensor] = []
        with self:
            work()
        self._made.clear()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.given += [weakref.ref(leaf) for leaf in leaves if not any(leaf is made for made in self._made)]
        self._made += [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return result

    def replay(self) -> None:
        """The capture has run it."""

    def reset(self) -> None:
        """There is nothing to free."""


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("kind", [Adam, AdamW, SGD, Adagrad])
def test_what_a_graph_reads_is_not_freed(kind, monkeypatch):
    captured: list[Given] = []
    monkeypatch.setattr(
        dlrm_bench.pipeline.five_stage.step_graph, "record", lambda work: captured.append(Given(work)) or captured[-1]
    )
    twins = Twins(kind, rtol=1e-5)
    twins.run(WARM_UP + 1)
    gc.collect()
    (graph,) = captured
    assert len(graph.given) > 3
    assert all(tensor() is not None for tensor in graph.given)


@pytest.mark.usefixtures("graphed")
def test_other_tensors_are_noticed():
    twins = Twins()
    twins.run(10)
    twins.both(lambda adagrad: adagrad.load_state_dict(copy.deepcopy(adagrad.state_dict())))
    assert twins.update.why_not is None
    assert twins.run(10) == ANEW
    assert twins.update.why_not == f"{WARM_UP} of 20 steps ran eagerly: {CHANGED}"
    twins.update.close()
    assert twins.update.why_not is None or "3 of 20" in twins.update.why_not


@pytest.mark.usefixtures("graphed")
def test_states_belong_to_parameters_in_any_order():
    twins = Twins()
    twins.run(10)

    def reverse(adagrad: Adagrad) -> None:
        items = list(adagrad.state.items())
        adagrad.state.clear()
        adagrad.state.update(reversed(items))

    def replace(adagrad: Adagrad) -> None:
        last = adagrad.state[adagrad.param_groups[0]["params"][-1]]
        last["sum"] = last["sum"].clone()

    twins.both(reverse)
    assert twins.run(10) == (0, 10)
    twins.both(replace)
    assert twins.run(10) == ANEW


def test_state_that_goes_to_the_next_parameter_is_noticed():
    """All tensors together stay the same, in the same order."""
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    adagrad, forgotten = Adagrad([one, other]), []
    work = StepWork(adagrad)
    work.forget = lambda: forgotten.append(True)
    for _ in range(3):
        work.look()
    before = len(forgotten)
    name, value = adagrad.state[one].popitem()
    adagrad.state[other] = {f"last {name}": value, **adagrad.state[other]}
    work.look()
    assert len(forgotten) == before + 1


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("moves", ["a parameter", "its state", "a transposed parameter"])
def test_tensors_that_move_are_noticed(moves):
    """The graph would go on with the memory that they had."""
    twins = Twins()
    twins.run(10)

    def move(adagrad: Adagrad) -> None:
        parameter = adagrad.param_groups[0]["params"][0]
        of = adagrad.state[parameter]["sum"] if moves == "its state" else parameter
        of.data = of.data.view(4, 3).t() if moves == "a transposed parameter" else of.data * 0.5

    twins.both(move)
    assert twins.run(10) == ANEW
    assert twins.update.why_not == f"{WARM_UP} of 20 steps ran eagerly: {CHANGED}"


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(("kind", "rtol", "arguments"), KINDS)
def test_the_learning_rate_is_read_from_the_device_once_it_has_changed(kind, rtol, arguments):
    twins = Twins(kind, max(rtol, 1e-6), **arguments)
    for step in range(10):
        twins.both(lambda inner, rate=0.1 * 0.9**step: inner.param_groups[0].update(lr=rate))
        assert twins.run(1) == (step == WARM_UP, step >= WARM_UP)
    assert twins.update.why_not is None


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


class CountsInPython(Adam):
    """Its state has a number that no graph would count."""

    runs_in_graphs = True  # which is wrong

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for of in self.state.values():
            of["calls"] = of.get("calls", 0) + 1


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(
    ("kind", "arguments", "why"),
    [
        (Adagrad, {"lr_decay": 0.1}, "lr_decay"),
        (Adagrad, {"weight_decay": torch.tensor(0.1)}, "besides lr is a tensor"),
        (CountsInPython, {}, "state that is no tensor"),
    ],
)
def test_what_a_graph_would_freeze_is_eager(kind, arguments, why):
    twins = Twins(kind, **arguments)
    assert twins.run(10) == (0, 0)
    assert re.search(rf"\d of 10 steps ran eagerly: .*{why}", twins.update.why_not or "")


class Halves(Adam):
    """Does more than Adam."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 0.5)


class Renamed(Adam):
    """Does what Adam does."""


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(
    ("kind", "arguments", "why"),
    [
        (Halves, {}, "Halves has a step of its own"),
        (Halves, {"capturable": True}, None),
        (Renamed, {}, None),
        (torch.optim.NAdam, {}, "NAdam keeps its state mu_product on the host: set capturable=True"),
        (torch.optim.NAdam, {"capturable": True}, None),
    ],
)
def test_steps_that_do_more_or_keep_state_on_the_host_are_named(kind, arguments, why):
    for _ in range(2):  # torch puts a wrapper in the place of a step when the class is first used
        found = why_never(kind([torch.nn.Parameter(torch.ones(2))], **arguments))
        assert (found or "").startswith(why or "")
        assert (found is None) is (why is None)


def test_the_projects_own_optimizer_says_that_it_runs_in_graphs():
    guarded = GuardedAdam([torch.nn.Parameter(torch.ones(2))], torch.zeros(()), lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    assert why_never(guarded) is None
    update = CapturedUpdate(guarded, guarded.param_groups[0]["params"])
    assert update.why_not is None
    assert [inner for inner, _ in update._works] == [guarded]


@pytest.mark.usefixtures("graphed")
def test_whoever_watches_steps_sees_them():
    twins, seen = Twins(), []
    twins.run(10)
    handle = twins.optimizers[1][1].register_step_post_hook(lambda *_: seen.append(1))
    assert twins.update.why_not == WATCHED
    assert twins.run(10) == (0, 0)
    assert len(seen) == 10
    handle.remove()
    assert twins.run(10)[1] > 0
    assert twins.update.why_not == f"10 of 30 steps ran eagerly: {WATCHED}"


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("level", [0, 1])
def test_schedulers_see_the_steps_of_a_graph(level, recwarn):
    twins = Twins(rtol=1e-6)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(of[level], 0.9) for of in twins.optimizers]
    twins.update = DenseUpdate(twins.optimizers[1][0], twins.graphed.values(), CPU)
    for step in range(10):
        assert twins.run(1) == (step == WARM_UP, step >= WARM_UP)
        for scheduler in schedulers:
            scheduler.step()
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@pytest.mark.usefixtures("graphed")
def test_an_adagrad_with_parameters_of_others_is_left_alone():
    twins = Twins()
    twins.update = DenseUpdate(twins.optimizers[1][0], list(twins.graphed.values())[1:], CPU)
    assert "give these an optimizer of their own" in (twins.update.why_not or "")
    assert twins.run(10) == (0, 0)


def test_without_a_gpu_nothing_is_captured():
    assert Twins().update.why_not == "there are no CUDA graphs on cpu"


@pytest.mark.usefixtures("graphed")
def test_a_capture_that_fails_leaves_steps_eager(monkeypatch):
    def record(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(dlrm_bench.pipeline.five_stage.step_graph, "record", record)
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
            assert trainer._graphed_update.captured
            torch.testing.assert_close(ours.outputs, theirs.outputs, rtol=exact, atol=exact)
            torch.testing.assert_close(ours.state, theirs.state, rtol=10 * exact, atol=exact)
            trainer.close()


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), *GPU_PLACES])
def test_trains_what_torchrec_trains(run_ranks, world_size, gpu):
    run_ranks(world_size, pipelined, gpu=gpu)
