"""Adam with a flag that stops it: torch's steps where the flag is down, none where it is up."""

import pytest
import torch
from torch import nn

from dlrm_bench.dlrm.dense.guarded_adam import GuardedAdam

STEPS = 5
SHAPES = ((7, 3), (4,), (0, 3))


def made(device: torch.device) -> tuple[list[nn.Parameter], list[nn.Parameter], torch.Tensor, GuardedAdam]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    skip = torch.zeros((), device=device)
    return ours, theirs, skip, GuardedAdam(ours, skip, lr=0.01, betas=(0.9, 0.999), eps=1e-8)


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_are_those_of_torch_and_none_where_the_flag_is_up(device: str) -> None:
    ours, theirs, skip, guarded = made(torch.device(device))
    adam = torch.optim.Adam(theirs, lr=0.01, betas=(0.9, 0.999), eps=1e-8, fused=True)
    for step in range(STEPS):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        guarded.step()
        adam.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    before = [parameter.detach().clone() for parameter in ours]
    states = [{name: value.clone() for name, value in guarded.state[p].items()} for p in ours]
    assert all(state["step"] == STEPS for state in states)
    skip.fill_(1)
    for parameter in ours:
        parameter.grad = torch.zeros_like(parameter)
    guarded.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    for parameter, state in zip(ours, states, strict=True):
        assert all(torch.equal(guarded.state[parameter][name], value) for name, value in state.items())
    skip.fill_(0)
    guarded.step()  # zero gradients: momentum alone moves weights
    assert not torch.equal(ours[0], before[0])


def test_the_state_is_there_before_the_first_step_and_no_scalers_flag_after_it() -> None:
    ours, _, _, guarded = made(torch.device("cpu"))
    assert all(set(guarded.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in ours)
    set_gradients(ours, 0)
    guarded.step()
    assert not hasattr(guarded, "found_inf")
