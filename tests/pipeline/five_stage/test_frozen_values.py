"""Values by which Python decides in a model: what somebody changes is told apart from what the forward does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlrm_bench.pipeline.five_stage.frozen_values import FrozenValues


class Annealed(nn.Module):
    """Has values of several kinds, of which its forward sets two."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.mode, self.nothing = 1.0, "sum", float("nan")
        self.weights, self.of_tasks, self.shape = [1.0, 0.5], {"click": 1.0}, (1, 2)
        self.kept: list[Tensor] = []
        self.calls = self.size = 0
        self.inner = nn.ModuleList([nn.Dropout(0.5), nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [x]
        self.size = len(x)
        return x * self.rate


class Counting(Annealed):
    """Counts its calls too."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def watched(kind: type[Annealed] = Annealed) -> tuple[Any, FrozenValues]:
    model = nn.ModuleDict({"a": kind()})
    return model["a"], FrozenValues([*model.named_modules()])


def run(of: Any, values: FrozenValues, *sizes: int) -> None:
    """Runs the forward with batches of these sizes."""
    for size in sizes:
        of(torch.ones(size))
        values.ran(size)


CHANGES: list[tuple[Callable[[Any], Any], str | None]] = [
    (lambda of: None, None),
    (lambda of: setattr(of, "rate", 2.0 / 2.0), None),  # another object of the same value
    (lambda of: setattr(of, "rate", 0.5), "another value is a.rate"),
    (lambda of: setattr(of, "rate", torch.ones(3)), "another value is a.rate"),
    (lambda of: setattr(of, "mode", "mean"), "another value is a.mode"),
    (lambda of: setattr(of, "nothing", 1), "another value is a.nothing"),
    (lambda of: of.weights.__setitem__(1, 0.25), "another value is a.weights"),
    (lambda of: of.weights.append(0.25), "another value is a.weights"),
    (lambda of: setattr(of, "weights", [1.0, 0.5]), None),
    (lambda of: of.of_tasks.update(click=0.5), "another value is a.of_tasks"),
    (lambda of: of.of_tasks.update(like=1.0), "another value is a.of_tasks"),
    (lambda of: setattr(of, "shape", (1, 3)), "another value is a.shape"),
    (lambda of: setattr(of.inner[0], "p", 0.1), "another value is a.inner.0.p"),
    (lambda of: of.inner.__setitem__(1, nn.GELU()), "another module is a.inner.1"),
    (lambda of: of.train(False), None),  # modes are watched elsewhere
    (lambda of: setattr(of, "later", 1), None),
]


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_a_change_is_named_once(change: Callable[[Any], Any], what: str | None) -> None:
    of, values = watched()
    change(of)
    assert values.change() == what
    assert values.change() is None


def test_what_a_run_changes_is_no_change_of_somebody() -> None:
    of, values = watched(Counting)
    for size in (3, 2, 3):
        run(of, values, size)
        assert values.change() is None
    of(torch.ones(9))  # by an evaluation, outside of the pipeline
    assert values.change() is None


@pytest.mark.parametrize("size", [2, 3, 4])
def test_values_that_follow_from_the_batch_may_be_captured(size: int) -> None:
    """size: of the captured batch, also one that no run has seen."""
    of, values = watched()
    run(of, values, 3, 2, 3)
    values.before_capture()
    of(torch.ones(size))
    assert values.put_back(size) is None
    assert of.size == size
    assert values.change() is None


def test_values_that_every_run_changes_may_not() -> None:
    of, values = watched(Counting)
    run(of, values, 3, 2, 3)
    values.before_capture()
    of(torch.ones(3))
    assert values.put_back(3) == "a.calls"
    assert of.calls == 3
    assert values.change() is None


def test_what_follows_from_a_changed_value_may_be_captured() -> None:
    of, values = watched()
    of.register_forward_pre_hook(lambda of, _: setattr(of, "shape", (of.rate,)))
    for rate in (1.0, 0.5):
        of.rate = rate
        values.change()
        run(of, values, 3)
    of.rate = 0.25
    assert values.change() == "another value is a.rate"
    values.before_capture()
    of(torch.ones(3))
    assert values.put_back(3) is None
    assert of.shape == (0.25,)
