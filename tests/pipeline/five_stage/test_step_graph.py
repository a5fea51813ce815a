"""The learning rates of a captured step, which is captured again for other reasons too."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam

from tests.pipeline.five_stage.graphed_steps import ANEW, Twins, graphs_on_cpu

RTOL = 1e-5
"""Rates on the device, and Adam's bias corrections there, are rounded to fp32."""


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_on_cpu(monkeypatch)


def at(rate: float) -> Any:
    return lambda inner: [group.update(lr=rate) for group in inner.param_groups]


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize(("kind", "arguments"), [(Adagrad, {}), (SGD, {"momentum": 0.9}), (Adam, {})])
def test_a_rate_that_comes_with_other_state_is_that_of_the_next_graph(
    kind: type[torch.optim.Optimizer], arguments: dict[str, float]
) -> None:
    """As from a checkpoint, after the rate has moved to the device."""
    twins = Twins(kind, RTOL, **arguments)
    twins.run(6)
    saved = [copy.deepcopy(inner.state_dict()) for _, inner in twins.optimizers]
    twins.both(at(0.01))
    twins.run(6)
    for (_, inner), of in zip(twins.optimizers, saved, strict=True):
        inner.load_state_dict(of)
    assert twins.run(10)[1] > 0
    twins.both(at(0.02))
    assert twins.run(5)[1] == 5


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("kind", [Adagrad, SGD, Adam])
def test_a_group_may_come_after_the_rate_has_changed(kind: type[torch.optim.Optimizer]) -> None:
    twins = Twins(kind, RTOL)
    twins.run(6)
    twins.both(at(0.01))
    twins.run(6)
    for parameters, (_, inner) in zip((twins.plain, twins.graphed), twins.optimizers, strict=True):
        first = inner.param_groups[0]["params"].pop()
        assert first is parameters["p2"]
        inner.add_param_group({"params": [first], "lr": 0.5})
    assert twins.run(10)[1] > 0


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("arguments", [{}, {"weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}])
def test_an_ascent_stays_one_when_its_rate_has_changed(arguments: dict[str, Any]) -> None:
    twins = Twins(SGD, RTOL, maximize=True, **arguments)
    twins.run(6)
    twins.both(at(0.01))
    assert twins.run(6) == (1, 6)


@pytest.mark.usefixtures("graphed")
@pytest.mark.parametrize("kind", [Adagrad, SGD, Adam])
def test_gradients_that_move_are_noticed(kind: type[torch.optim.Optimizer]) -> None:
    twins = Twins(kind, RTOL)
    assert twins.run(6)[1] > 0
    twins.grads["p0"] = torch.empty_like(twins.grads["p0"])
    assert twins.run(10) == ANEW


@pytest.mark.usefixtures("graphed")
def test_the_first_group_may_be_empty() -> None:
    """As of parameters without weight decay, where a model has none."""

    def grouped(parameters: list[nn.Parameter], **of: Any) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": []}, {"params": parameters}]
        return Adagrad(groups, **of)

    twins = Twins(grouped, RTOL)  # type: ignore[arg-type]
    twins.run(6)
    twins.both(at(0.01))
    assert twins.run(6) == (1, 6)


@pytest.mark.usefixtures("graphed")
def test_a_scaler_that_comes_later_is_heard() -> None:
    """GradScaler leaves the scaling to a fused optimizer, by attributes for the time of a step."""
    twins = Twins(SGD, RTOL, fused=True)
    assert twins.run(6)[1] > 0
    twins.both(lambda inner: vars(inner).update(grad_scale=torch.tensor(4.0), found_inf=torch.tensor(0.0)))
    assert twins.run(1) == (0, 0)
    twins.both(lambda inner: [delattr(inner, name) for name in ("grad_scale", "found_inf")])
    assert twins.run(6) == (1, 6)
