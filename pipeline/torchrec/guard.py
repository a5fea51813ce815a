"""Keeps TorchRec's model as it is from the first iteration on in which any rank's loss is not finite.

Nothing waits for the host, and nothing of TorchRec is replaced: hooks on the model and one more optimizer turn the
gradients of such an iteration into zeros before any update, which change nothing under Adagrad, rowwise Adagrad and
SGD. The host learns of it when it reads the losses.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.models.dlrm import DLRMTrain
from torchrec.optim.keyed import KeyedOptimizer

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.graph_obstacles import runs_in_graphs


class TorchRecLossGuard:
    """Watches the losses of one DLRMTrain, before it is sharded."""

    def __init__(self, model: DLRMTrain, ranks: Ranks) -> None:
        """Collective."""
        self._worst = torch.zeros((), device=ranks.device)
        """0 while all losses of all ranks were finite, then NaN."""
        self._stopped = torch.zeros((), dtype=torch.bool, device=ranks.device)
        self._group = ranks.new_group() if ranks.world_size > 1 else None
        model.register_forward_hook(self._look)
        model.model.sparse_arch.register_forward_hook(self._gate_tables)

    def gate(self, parameters: Iterable[nn.Parameter]) -> KeyedOptimizer:
        """Returns an optimizer to step before the one that updates `parameters`, whose gradients it gates."""
        return _GradientGate(self._stopped, list(parameters))

    @runs_in_graphs
    def _look(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Collective in training. TorchRec's pipelines also trace the model, with stand-ins for tensors."""
        loss = output[0] if isinstance(output, tuple) else None
        if not model.training or not isinstance(loss, Tensor):
            return
        with torch.no_grad():
            self._worst.add_(loss, alpha=0)  # 0 times what is not finite is NaN, which stays through sums
            if self._group is not None:
                dist.all_reduce(self._worst, group=self._group)
            torch.ne(self._worst, self._worst, out=self._stopped)  # true of NaN alone

    @runs_in_graphs
    def _gate_tables(self, sparse_arch: nn.Module, arguments: Any, pooled: Any) -> None:
        """Through the gradient of the pooled vectors, by which the backward updates tables."""
        if isinstance(pooled, Tensor) and pooled.requires_grad:
            pooled.register_hook(lambda gradient: gradient.masked_fill(self._stopped, 0))


class _GradientGate(KeyedOptimizer):
    """Has no parameters of its own, so that it adds nothing to the state of those it is combined with."""

    def __init__(self, stopped: Tensor, parameters: list[nn.Parameter]) -> None:
        super().__init__({}, {}, [])
        self._stopped, self._gated = stopped, parameters

    def step(self, closure: Any = None) -> None:
        """Sets all gradients to zero where a loss was not finite."""
        # As integers, in a few launches: no product of floating point numbers makes NaN zero.
        bits = [parameter.grad.view(torch.int32) for parameter in self._gated if parameter.grad is not None]
        if bits:
            torch._foreach_mul_(bits, self._stopped.logical_not().int())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the gradients are another optimizer's."""
