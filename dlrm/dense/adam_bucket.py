"""All weights of a torch module in one flat buffer, updated by Adam; every rank updates all weights."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.dense.flat_adam import AdamOptions, AdamState, flat_adam
from dlrm_bench.kernels.non_finite import Watch

# Tensors in the flat buffers start at multiples of this many elements, for cuBLAS (buckets.py).
_ALIGN = 64


class AdamBucket:
    """Weights, gradient and Adam's state, all fp32. Gradients are averaged over the ranks by one all-reduce."""

    def __init__(self, module: nn.Module, options: AdamOptions, ranks: Ranks) -> None:
        """Moves the module's weights to the flat buffer; they remain its parameters. Collective: makes a process
        group."""
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
        for (name, parameter), weight in zip(self.parameters.items(), self._views(self.weights), strict=True):
            weight.copy_(parameter.detach())
            self.parameters[name].data = weight
        self._gradients = self._views(self._gradient)

    def update(self, gradients: list[Tensor], learning_rate: Tensor, watch: Watch) -> None:
        """Averages the gradients, one for each parameter, over all ranks, and takes a step. Collective.

        watch: a LossGuard's. If a flag is raised, or the average's norm is not finite, nothing changes.
        """
        self._gather(gradients)
        if self._group is not None:
            dist.all_reduce(self._gradient, group=self._group)
        flat_adam(self.weights, self.state, self._gradient, self._world_size, learning_rate, self._options, watch)

    def _gather(self, gradients: list[Tensor]) -> None:
        """Copies the gradients to the flat buffer: those with their part's strides in one launch, others (transposed
        products) in one each. In a single call, every tensor would need a separate launch."""
        pairs = list(zip(self._gradients, gradients, strict=True))
        for alike in (True, False):
            found = [(to, of) for to, of in pairs if (to.stride() == of.stride()) == alike]
            if found:
                torch._foreach_copy_([to for to, _ in found], [of for _, of in found])

    def tensors(self) -> list[Tensor]:
        """Returns all memory of the weights, their gradient and their state."""
        return [self.weights, self._gradient, *self.state]

    def state_views(self) -> dict[str, dict[str, Tensor]]:
        """Returns, for each parameter, views of its state by torch.optim.Adam's names: step, [1], shared by all
        parameters, exp_avg and exp_avg_sq."""
        means, squares = (self._views(of) for of in (self.state.mean, self.state.mean_square))
        return {
            name: {"step": self.state.step, "exp_avg": mean, "exp_avg_sq": square}
            for name, mean, square in zip(self.parameters, means, squares, strict=True)
        }

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Returns each parameter's part of a buffer with this layout, in the parameter's shape."""
        return [
            flat[self._starts[name] :][: parameter.numel()].view(parameter.shape)
            for name, parameter in self.parameters.items()
        ]
