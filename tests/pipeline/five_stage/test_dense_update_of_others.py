"""Cross-cutting: the dense update's graph with optimizers within others: clipping, accumulation, fused tables, none."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from dlrm_bench.pipeline.five_stage.dense_update import DenseUpdate
from tests.pipeline.five_stage.graphed_steps import ANEW, CPU, Twins, graphs_on_cpu


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)


class Clipping(GradientClippingOptimizer):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        named = {str(i): parameter for i, parameter in enumerate(parameters)}
        super().__init__(
            KeyedOptimizerWrapper(named, lambda params: Adagrad(params, lr=lr)), GradientClipping.NORM, max_gradient=0.1
        )


class EveryOther(torch.optim.Optimizer):
    """Accumulates two gradients, as a user's own does."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.inner, self.calls = SGD(parameters, lr=lr, momentum=0.9), 0
        super().__init__(self.inner.param_groups, {})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            self.inner.step()


@pytest.mark.usefixtures("graphed")
def test_the_step_of_an_optimizer_within_others_is_replayed():
    twins = Twins(Clipping)
    assert twins.run(10) == ANEW
    twins = Twins(EveryOther)
    assert twins.run(20) == ANEW


@pytest.mark.usefixtures("graphed")
def test_optimizers_that_cannot_be_captured_are_named():
    parameters = {"p": nn.Parameter(torch.ones(3)), "q": nn.Parameter(torch.ones(2))}
    own = torch.optim.LBFGS(parameters.values())
    assert "it is LBFGS's, which has no option `capturable`" in (
        DenseUpdate(own, parameters.values(), CPU).why_not or ""
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
