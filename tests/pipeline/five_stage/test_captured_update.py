"""What people read of a step, and who sees it, where a graph holds the step."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dlrm_bench.pipeline.five_stage.captured_update import CapturedUpdate
from dlrm_bench.pipeline.five_stage.dense_update import WATCHED
from dlrm_bench.pipeline.five_stage.step_graph import WARM_UP
from tests.pipeline.cpu_graphs import Rerun


@pytest.mark.parametrize("kind", [GradientClipping.NORM, GradientClipping.NONE])
def test_the_norm_of_the_gradients_is_that_of_the_last_step(kind: GradientClipping) -> None:
    """As people log it: graphs of two turns each have a norm of their own, and eager steps come in between."""
    parameter = nn.Parameter(torch.randn(4))
    parameter.grad = torch.zeros(4)
    dense = KeyedOptimizerWrapper({"p": parameter}, lambda params: SGD(params, lr=0.1))
    clipping = GradientClippingOptimizer(dense, kind, max_gradient=0.1, track_grad_norm=True)
    update = CapturedUpdate(CombinedOptimizer([clipping]), [parameter])
    assert update.why_not is None
    graphs: list[Rerun] = []
    reported, expected = [], []
    for step in range(8):
        parameter.grad.copy_(torch.randn(4))
        expected.append(parameter.grad.norm())
        update.look()
        if step in (0, 5):
            clipping.step()
        elif step == 1:
            update.prepare()
            update.step()
            update.after_replay()
        else:
            graphs = graphs or [Rerun(update.step) for _ in range(2)]
            graphs[step % 2].replay()
            update.after_replay()
        assert clipping.last_total_grad_norm is not None
        reported.append(clipping.last_total_grad_norm)
    torch.testing.assert_close(reported, expected)


class Tables(FusedOptimizer):
    """Passes its rate to a lookup."""

    def __init__(self, rate: Any) -> None:
        super().__init__({}, {}, [{"params": [], "lr": rate}])
        self.passed: list[float] = []

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.passed.append(round(float(self.param_groups[0]["lr"]), 6))

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def test_rates_are_passed_to_the_lookups_whenever_they_or_those_of_the_lookups_have_changed() -> None:
    tables, rate = Tables(0.5), torch.tensor(0.1)
    others = Tables(rate)
    update = CapturedUpdate(CombinedOptimizer([("tables", tables), ("others", others)]), [])
    update.set_rates(True)
    update.set_rates(True)
    assert (tables.passed, others.passed) == ([0.5], [0.1])
    update.set_rates(False)
    tables.param_groups[0]["lr"] = 0.25
    update.set_rates(True)
    assert (tables.passed, others.passed) == ([0.5, 0.5, 0.25], [0.1, 0.1, 0.1])
    rate.fill_(0.2)  # as torch's schedulers change a tensor
    update.set_rates(True)
    assert others.passed == [0.1, 0.1, 0.1, 0.2]


def _counted(step: Any, seen: list[int], closure: Any = None) -> None:
    step(closure)
    seen.append(1)


@pytest.mark.parametrize(("level", "hooked"), [(0, True), (3, True), *((level, False) for level in range(4))])
def test_who_waits_for_a_step_on_any_level_sees_it(level: int, hooked: bool) -> None:
    """As for averages of weights, with the optimizer that the pipeline is given or one within. hooked: by a hook, which
    TorchRec calls for these only; otherwise by another step in the place of its own."""
    parameter, seen = nn.Parameter(torch.ones(2)), list[int]()
    parameter.grad = torch.ones(2)
    dense = KeyedOptimizerWrapper({"p": parameter}, lambda params: SGD(params, lr=0.1))
    clipping = GradientClippingOptimizer(dense, GradientClipping.NORM)
    levels: list[Any] = [CombinedOptimizer([clipping]), clipping, dense, dense._optimizer]
    update, watched = CapturedUpdate(levels[0], [parameter]), levels[level]
    assert update.why_not is None
    for _ in range(2 * WARM_UP):
        assert update.look()[1] != WATCHED
    if hooked:
        handle = watched.register_step_post_hook(lambda *_: seen.append(1))
    else:
        watched.step = partial(_counted, watched.step, seen)
    levels[0].step()
    assert seen == [1]
    assert update.look() == (False, WATCHED)
    assert CapturedUpdate(levels[0], [parameter]).why_not == WATCHED
    handle.remove() if hooked else vars(watched).pop("step")
    assert update.look()[1] != WATCHED


@pytest.mark.parametrize("level", range(4))
def test_another_zero_grad_on_any_level_is_seen(level: int) -> None:
    """As people accumulate gradients under a pipeline that calls zero_grad for every batch: no replay would call it."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    dense = KeyedOptimizerWrapper({"p": parameter}, lambda params: SGD(params, lr=0.1))
    clipping = GradientClippingOptimizer(dense, GradientClipping.NORM)
    levels: list[Any] = [CombinedOptimizer([clipping]), clipping, dense, dense._optimizer]
    update, told = CapturedUpdate(levels[0], [parameter]), levels[level]
    told.zero_grad = lambda set_to_none=True: None
    what = f"{type(told).__name__} was given another zero_grad"
    valid, why = update.look()
    assert not valid
    assert (why or "").startswith(what)
    after_the_graph = CapturedUpdate(levels[0], [parameter])
    assert (after_the_graph.why_not or "").startswith(what)
    assert after_the_graph.look() == (True, None)
    del told.zero_grad
    assert not (update.look()[1] or "").startswith(what)


def test_a_step_after_the_graph_keeps_no_iteration_out_of_it() -> None:
    parameter = nn.Parameter(torch.ones(2))
    dense = KeyedOptimizerWrapper({"p": parameter}, lambda params: SGD(params, lr=0.1))
    dense._optimizer.register_step_pre_hook(lambda *_: None)
    update = CapturedUpdate(CombinedOptimizer([dense]), [parameter])
    assert update.why_not == WATCHED
    assert update.look() == (True, None)
