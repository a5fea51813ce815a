"""Adam over a flat buffer: against torch.optim.Adam behind torch's clipping, Triton against the plain pass."""

import pytest
import torch

from dlrm_bench.kernels.dense.flat_adam import (
    AdamOptions,
    AdamState,
    flat_adam,
    plain_flat_adam,
    plain_step_numbers,
    triton_flat_adam,
    triton_step_numbers,
)
from dlrm_bench.kernels.non_finite import Watch
from tests.kernels.devices import DEVICE, needs_triton


def made_state(count: int) -> AdamState:
    return AdamState(*(torch.zeros(size, device=DEVICE) for size in (1, count, count)))


def made_watch() -> Watch:
    return Watch(torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE))


@pytest.mark.parametrize("clip_norm", [0.0, 1.0, 100.0])
def test_equals_torch_adam_after_a_ramp(clip_norm: float) -> None:
    torch.manual_seed(0)
    weights, state, watch = torch.randn(37, device=DEVICE), made_state(37), made_watch()
    rounded = torch.zeros(37, dtype=torch.bfloat16, device=DEVICE)
    parameter = torch.nn.Parameter(weights.clone())
    adam = torch.optim.Adam([parameter], lr=0.1, betas=(0.95, 0.999), eps=1e-8)
    rate, options = torch.zeros(1, device=DEVICE), AdamOptions((0.95, 0.999), 1e-8, clip_norm)
    for step in range(6):
        gradient = torch.randn(37, device=DEVICE)
        rate.fill_(0.02 * step)
        adam.param_groups[0]["lr"] = 0.02 * step
        parameter.grad = gradient / 3
        if clip_norm:
            torch.nn.utils.clip_grad_norm_([parameter], clip_norm)
        adam.step()
        flat_adam(weights, state, gradient, 3, rate, options, watch, rounded)
        torch.testing.assert_close(weights, parameter.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(rounded, weights.bfloat16())
    assert float(state.step) == 6
    assert int(watch.bad) == 0


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
def test_a_gradient_whose_norm_is_not_finite_changes_nothing_and_is_told(number: float) -> None:
    weights, state, watch = torch.randn(9, device=DEVICE), made_state(9), made_watch()
    options, rate = AdamOptions((0.9, 0.99), 1e-8, 1.0), torch.full((1,), 0.1, device=DEVICE)
    rounded = weights.bfloat16()
    flat_adam(weights, state, torch.ones(9, device=DEVICE), 1, rate, options, watch, rounded)
    kept = [tensor.clone() for tensor in (weights, rounded, *state)]
    gradient = torch.ones(9, device=DEVICE)
    gradient[4] = number
    flat_adam(weights, state, gradient, 1, rate, options, watch, rounded)
    assert int(watch.bad) == 1
    assert all(torch.equal(a, b) for a, b in zip((weights, rounded, *state), kept, strict=True))


def test_a_raised_flag_stops_it() -> None:
    weights, state, watch = torch.randn(9, device=DEVICE), made_state(9), made_watch()
    watch.stopped.fill_(1)
    kept = weights.clone()
    options, rate = AdamOptions((0.9, 0.99), 1e-8, 1.0), torch.full((1,), 0.1, device=DEVICE)
    flat_adam(weights, state, torch.ones(9, device=DEVICE), 1, rate, options, watch)
    assert torch.equal(weights, kept)
    assert float(state.step) == 0


@needs_triton
@pytest.mark.parametrize(("goes", "bad"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("count", [1, 2048, 5003])
def test_triton_equals_plain(count: int, goes: float, bad: float) -> None:
    torch.manual_seed(count)
    found = []
    options, numbers = AdamOptions((0.95, 0.999), 1e-8, 1.0), torch.tensor([goes, 0.3, 0.05, 0.2, bad], device=DEVICE)
    weights, gradient, mean, square = torch.randn(4, count, device=DEVICE)
    for update in (triton_flat_adam, plain_flat_adam):
        tensors = weights.clone(), mean.clone(), square.abs(), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        rounded = torch.full_like(weights, torch.nan if goes else 7, dtype=torch.bfloat16)
        update(tensors[0], AdamState(numbers, *tensors[1:3]), gradient, numbers, options, tensors[3], rounded)
        assert int(tensors[3]) == bad
        assert torch.equal(rounded, tensors[0].bfloat16()) or not goes
        found.append(tensors)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("clip_norm", [0.0, 0.7])
@pytest.mark.parametrize("norm", [0.0, 0.3, 5.0, float("inf"), float("nan")])
@pytest.mark.parametrize(("flags", "stopped"), [([0], False), ([0, 0, 1, 0], True)])
def test_tritons_numbers_of_a_step_equal_plain_ones(
    norm: float, clip_norm: float, flags: list[int], stopped: bool
) -> None:
    """To the last bit but one: PyTorch's square root on CPUs is not the nearest number."""
    options, rate = AdamOptions((0.95, 0.999), 1e-8, clip_norm), torch.full((1,), 1e-3, device=DEVICE)
    goes = norm < float("inf") and not stopped
    for taken in (0, 1, 2, 7, 30_000):
        found = []
        for numbers_of in (triton_step_numbers, plain_step_numbers):
            step = torch.tensor([float(taken)], device=DEVICE)
            words = torch.tensor(flags, dtype=torch.int32, device=DEVICE)
            numbers = numbers_of(torch.tensor(norm, device=DEVICE), step, 2, rate, options, words)
            assert float(step) == taken + goes
            found.append(numbers)
        ours, theirs = found
        assert [ours[0], ours[4]] == [theirs[0], theirs[4]] == [goes, not goes and not stopped]
        if goes:
            torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)
