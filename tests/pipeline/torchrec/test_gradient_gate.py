"""The gate looks once at each gradient, and opens for all or none."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.non_finite import GradientTables, Watch, report_together
from dlrm_bench.pipeline.five_stage import gradients
from dlrm_bench.pipeline.torchrec import gradient_gate
from dlrm_bench.pipeline.torchrec.guard import TorchRecLossGuard
from tests.cases import GPU_PLACES
from tests.pipeline.cpu_graphs import iteration_graph_on_cpu
from tests.pipeline.test_non_finite import STEPS, Trained, config_of, train

ONE = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
WHOLE: dict[str, Any] = {
    "pipeline": "five-stage",
    "trim_input_dist": True,
    "pinned_d2h": True,
    "cuda_graph": "iteration",
    "row_wise": False,
}


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_the_gate_looks_once_at_gradients_that_are_reduced_early(bad: int | None) -> None:
    """bad: gradient with a NaN."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(3))
    guard = TorchRecLossGuard(model, ONE)
    gate, skip = guard.gate(model), guard.skip()  # in the order in which pipelines ask
    other, seen = nn.Parameter(torch.ones(2)), list[int]()

    def report(watch: Watch, gradients: list[Tensor], tables: GradientTables) -> None:
        seen.extend(map(Tensor.data_ptr, gradients))
        report_together(watch, gradients, tables)

    of = [torch.ones(2) for _ in range(3)]
    if bad is not None:
        of[bad][1] = torch.nan
    gate.zero_grad()
    with patch.object(gradient_gate, "report_together", report):
        gate.gradients_reduced([model[2], other], [of[2], torch.full((2,), torch.inf)])
        gate.gradients_reduced([model[1]], [of[1]])
        for weight, gradient in zip(model, of, strict=True):
            weight.grad = gradient
        gate.step()
    assert seen == [gradient.data_ptr() for gradient in reversed(of)]
    assert [gradient.tolist() for gradient in of] == 3 * [2 * [float(bad is None)]]
    assert skip == float(bad is not None), "an optimizer with momentum skips the iteration"
    assert guard.tallies.counts.tolist() == [[0, 0], [0, int(bad is not None)]]
    of[2][:] = torch.nan  # at the same address, and not looked at early
    gate.step()
    assert not any(gradient.any() for gradient in of)


def test_without_zero_grad_an_iteration_that_was_given_up_would_hide_a_gradient() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2))])
    gate = TorchRecLossGuard(model, ONE).gate(model)
    gradient = model[0].grad = torch.ones(2)
    gate.gradients_reduced([model[0]], [gradient])  # and no step
    gradient.fill_(torch.nan)
    gate.zero_grad()
    gate.step()
    assert gradient.tolist() == [0, 0]


def test_parts_without_end_find_their_addresses_again() -> None:
    """A capture could not copy them to the device."""
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(3 * GradientTables._KEPT))
    gate, gradients = TorchRecLossGuard(model, ONE).gate(model), [torch.ones(2) for _ in model]
    made: list[int] = []

    def report(watch: Watch, gradients: list[Tensor], tables: GradientTables) -> None:
        before = set(tables._of)
        if gradients:
            tables.of(gradients)
        made.append(len(set(tables._of) - before))

    with patch.object(gradient_gate, "report_together", report):
        for iteration in range(2):
            gate.zero_grad()
            for parameter, gradient in zip(model, gradients, strict=True):
                gate.gradients_reduced([parameter], [gradient])
                parameter.grad = gradient
            gate.step()
            assert sum(made) == (0 if iteration else len(gradients))
            made.clear()


def test_a_parameter_without_a_gradient_has_nothing_to_gate() -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(2))
    gate = TorchRecLossGuard(model, ONE).gate(model)
    model[0].grad = torch.full((2,), torch.nan)
    gate.step()
    assert model[0].grad.tolist() == [0, 0]
    assert model[1].grad is None


def train_in_parts(ranks: Ranks) -> tuple[Trained, list[int]]:
    """Returns a training with a bad dense gradient, in a bucket for each weight, and how many each look has seen."""
    if ranks.device.type != "cuda":
        iteration_graph_on_cpu()
    seen: list[int] = []

    def report(watch: Watch, gradients: list[Tensor], tables: GradientTables) -> None:
        seen.append(len(gradients))
        report_together(watch, gradients, tables)

    with patch.object(gradients, "_BUCKET", 1), patch.object(gradient_gate, "report_together", report):
        return train(ranks, config_of(STEPS, **WHOLE), "gradient"), seen


@pytest.mark.parametrize(("world_size", "gpu"), [(2, False), *GPU_PLACES])
def test_a_bad_gradient_of_any_bucket_stops_the_dense_update(
    run_ranks: Callable[..., list[Any]], world_size: int, gpu: bool
) -> None:
    for trained, seen in run_ranks(world_size, train_in_parts, gpu=gpu):
        assert trained.learned
        assert trained.told
        assert not trained.dense_changed
        assert trained.changed == trained.spoilt == []
        weights = max(seen)  # as an iteration without a graph sees them, in its step
        assert seen.count(1) >= 2 * weights, "two graphs"
        assert seen.count(0) >= 2, "nothing is left to their steps"
