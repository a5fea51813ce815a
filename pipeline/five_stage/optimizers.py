"""Facts about a user's optimizer that the pipeline needs before it runs the step in parallel with other work."""

from typing import Any

import torch
from torch import nn
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter


def steps_on(optimizer: torch.optim.Optimizer, sharded: nn.Module) -> bool:
    """Whether the optimizer updates tables itself, as it does with data-parallel ones."""
    own = {id(parameter) for _, parameter in in_backward_optimizer_filter(sharded.named_parameters())}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def communicates(optimizer: Any) -> bool:
    """Whether a step has collectives, as far as known for TorchRec's optimizers."""
    if isinstance(optimizer, CombinedOptimizer):
        return any(communicates(part) for _, part in optimizer.optimizers)
    if isinstance(optimizer, GradientClippingOptimizer) and optimizer._enable_global_grad_clip:
        return True
    return isinstance(optimizer, OptimizerWrapper) and communicates(optimizer._optimizer)
