"""All weights of a torch module in one flat buffer, updated by Adam; every rank updates all weights."""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_bench.dlrm.dense.copy_together import copy_together
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.dense.flat_adam import AdamOptions, AdamState, flat_adam
from dlrm_bench.kernels.non_finite import Watch

# Tensors in the flat buffers start at multiples of this many elements, for cuBLAS (buckets.py).
_ALIGN = 64


class AdamBucket:
    """Weights, gradient and Adam's state, all fp32. Gradients are averaged over the ranks by one all-reduce.

    The update also writes the weights in bf16, if any of the module's parameters are in bf16: no iteration casts a
    weight.
    """

    def __init__(self, module: nn.Module, options: AdamOptions, ranks: Ranks, in_bf16: Collection[str] = ()) -> None:
        """Moves the module's weights to the flat buffer. They remain its parameters, except those named in `in_bf16`:
        in their place, the module gets their values in bf16. Collective: makes a process group."""
        self.parameters = dict(module.named_parameters())
        self._options, self._world_size = options, ranks.world_size
        self._group = ranks.new_group() if ranks.world_size > 1 else None
        self._starts, size = {}, 0
        for name, parameter in self.parameters.items():
            assert parameter.dtype == torch.float32, f"{name}: fp32"
            self._starts[name] = size
            size += -(-parameter.numel() // _ALIGN) * _ALIGN
        self.weights, self._gradient, mean, mean_square = torch.zeros(4, size, device=ranks.device).unbind()
        self.state = AdamState(torch.zeros(1, device=ranks.device), mean, mean_square)
        self.views = self._views(self.weights)
        """Each parameter's weights, fp32."""
        for name, weight in self.views.items():
            weight.copy_(self.parameters[name].detach())
        self._rounded = self.weights.bfloat16() if in_bf16 else None
        rounded = {} if self._rounded is None else self._views(self._rounded)
        for name, parameter in self.parameters.items():
            parameter.data = rounded[name] if name in in_bf16 else self.views[name]
        self._gradients = list(self._views(self._gradient).values())

    def update(self, gradients: list[Tensor], learning_rate: Tensor, watch: Watch) -> None:
        """Averages the gradients, one for each parameter and in its format, over all ranks, and takes a step.
        Collective.

        watch: a LossGuard's. If a flag is raised, or the average's norm is not finite, nothing changes.
        """
        copy_together(self._gradients, gradients)
        if self._group is not None:
            dist.all_reduce(self._gradient, group=self._group)
        numbers = self._world_size, learning_rate, self._options
        flat_adam(self.weights, self.state, self._gradient, *numbers, watch, self._rounded)

    def round_weights(self) -> None:
        """Gives the module the weights in bf16; call it after `weights` or `views` were written to."""
        if self._rounded is not None:
            self._rounded.copy_(self.weights)

    def memory(self) -> list[Tensor]:
        """Returns all memory of the weights and their state."""
        return [self.weights, *self.state, *([] if self._rounded is None else [self._rounded])]

    def state_views(self) -> dict[str, dict[str, Tensor]]:
        """Returns, for each parameter, views of its state by torch.optim.Adam's names: step, [1], shared by all
        parameters, exp_avg and exp_avg_sq."""
        means, squares = (self._views(of) for of in (self.state.mean, self.state.mean_square))
        return {
            name: {"step": self.state.step, "exp_avg": means[name], "exp_avg_sq": squares[name]}
            for name in self.parameters
        }

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns each parameter's part of a buffer with this layout, in the parameter's shape."""
        return {
            name: flat[self._starts[name] :][: parameter.numel()].view(parameter.shape)
            for name, parameter in self.parameters.items()
        }
