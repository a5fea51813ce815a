"""Adam that a flag on the device stops: with zero gradients alone, its momentum would still move the weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class GuardedAdam(torch.optim.Adam):
    """torch.optim.Adam(fused=True) whose step changes neither weights nor state if `skip` is 1.

    Its kernel reads the flag in place of a gradient scaler's (`found_inf`), eagerly or in a CUDA graph. The state
    (zeros) exists before the first step, so that checkpoints can be loaded into it.
    """

    runs_in_graphs = True
    """The step only launches kernels, on memory that stays."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], skip: Tensor, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        """skip: fp32 scalar [] on the parameters' device."""
        assert skip.dtype == torch.float32, "skip: fp32"
        assert skip.dim() == 0, "skip: a scalar"
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, fused=True)
        self._skip = skip
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See torch.optim.Adam."""
        self.found_inf = self._skip  # during the step only: other code takes this attribute as a sign of a scaler
        try:
            return super().step(closure)
        finally:
            del self.found_inf
