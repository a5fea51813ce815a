"""Gradients in flat buffers: of parameters without one, other ranks read zeros."""

import torch
import torch.distributed as dist
from torch import nn

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.gradients import FlatGradients


def unused(ranks: Ranks) -> None:
    assert dist.group.WORLD is not None
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    gradients = FlatGradients(parameters, ranks.device, dist.group.WORLD)
    gradients.keep([torch.ones(2), torch.ones(3)])
    gradients.keep([torch.full((2,), 2.0), None])
    assert gradients.used == [True, False]
    assert not gradients.views[1].any()
    gradients.publish()
    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == [2.0, 2.0]
    assert parameters[1].grad is None
    gradients.restore([False])
    gradients.publish()
    assert [p.grad for p in parameters] == [None, None]


def test_a_parameter_without_a_gradient_has_zeros_and_none(run_ranks):
    run_ranks(1, unused)
