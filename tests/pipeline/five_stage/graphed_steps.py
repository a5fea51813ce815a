"""Optimizers whose steps are graphs, on the CPU, each beside a plain twin."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import dlrm_bench.pipeline.five_stage.dense_update
import dlrm_bench.pipeline.five_stage.step_graph
from dlrm_bench.pipeline.five_stage.dense_update import DenseUpdate
from dlrm_bench.pipeline.five_stage.step_graph import WARM_UP
from tests.pipeline.cpu_graphs import Replayed

CPU = torch.device("cpu")
ANEW = (1, 10 - WARM_UP)
"""Captures and replays of ten steps, from the first one that is another."""


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
    patch.setattr(dlrm_bench.pipeline.five_stage.step_graph, "record", Recorded)
    patch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])


def optimizer_of(
    parameters: dict[str, nn.Parameter], kind: type[torch.optim.Optimizer], **arguments: Any
) -> tuple[CombinedOptimizer, Any]:
    keyed = KeyedOptimizerWrapper(parameters, lambda params: kind(params, **{"lr": 0.1} | arguments))
    return CombinedOptimizer([CombinedOptimizer([]), keyed]), keyed._optimizer


class Twins:
    """The same parameters under the plain optimizer and under DenseUpdate, with the same gradients."""

    def __init__(self, kind: type[torch.optim.Optimizer] = Adagrad, rtol: float = 0, **arguments: Any) -> None:
        self._rtol = rtol
        self.plain = {f"p{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate([(3, 4), (5,), ()])}
        self.graphed = copy.deepcopy(self.plain)
        self.grads = {name: torch.empty_like(p) for name, p in self.graphed.items()}
        self.optimizers = [optimizer_of(parameters, kind, **arguments) for parameters in (self.plain, self.graphed)]
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
        torch.testing.assert_close(dict(self.graphed), dict(self.plain), rtol=self._rtol, atol=self._rtol)
        for ours, theirs in zip(other.state_dict()["state"].values(), one.state_dict()["state"].values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=self._rtol, atol=self._rtol)
