"""Keeps TorchRec's model as it is from the first iteration on in which any rank's loss is not finite, or a gradient.

Nothing waits for the host, and nothing of TorchRec is replaced: hooks on the model and one more optimizer turn the
gradients of such an iteration into zeros before any update, which change nothing under Adagrad, rowwise Adagrad and
SGD. The host learns of it when it reads the losses.

The backward updates tables before the dense gradients are known: of an iteration whose dense gradients are not finite,
no dense weight changes, and tables do. Gradients by pooled vectors are known on one rank alone: those that are not
finite become zeros, all else of their iteration changes, and from the next one on nothing does on any rank.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.models.dlrm import DLRMTrain
from torchrec.optim.keyed import KeyedOptimizer

from dlrm_bench.dlrm.ranks import Ranks
from dlrm_bench.dlrm.tallies import Tallies
from dlrm_bench.pipeline.five_stage.graph_obstacles import runs_in_graphs


class TorchRecLossGuard:
    """Watches losses and gradients of one DLRMTrain, before it is sharded."""

    def __init__(self, model: DLRMTrain, ranks: Ranks) -> None:
        """Collective."""
        self._worst = torch.zeros(2, device=ranks.device)
        """Of losses and of gradients: 0 while all of all ranks were finite, then NaN."""
        self._of_losses, self._of_gradients = self._worst.unbind()
        self._of_pooled = torch.zeros((), device=ranks.device)
        """The same of this rank's gradients by pooled vectors."""
        self._stopped = torch.zeros((), dtype=torch.bool, device=ranks.device)
        self._group = ranks.new_group() if ranks.world_size > 1 else None
        model.register_forward_hook(self._look)
        model.model.sparse_arch.register_forward_hook(self._gate_tables)

    def gate(self, parameters: Iterable[nn.Parameter]) -> KeyedOptimizer:
        """Returns an optimizer to step before the one that updates `parameters`, whose gradients it gates."""
        return _GradientGate(self, list(parameters))

    def tallies(self) -> Tallies:
        """Returns whether a gradient was not finite. See dlrm_bench.pipeline.interface.Pipeline."""
        told = Tallies((), self._worst.device)
        told.not_finite.copy_((self._of_gradients + self._of_pooled).isnan())
        return told

    def looks_at(self, gradients: list[Tensor]) -> Tensor:
        """Looks at the dense gradients, equal on all ranks; returns int32: 1 if the weights may change, else 0."""
        norm = torch.stack(torch._foreach_norm(gradients)).sum()
        self._of_gradients.add_(norm.masked_fill_(self._stopped, 0), alpha=0)
        worst = self._worst.sum()
        return worst.eq(worst).int()  # NaN is unlike itself

    @runs_in_graphs
    def _look(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Collective in training. TorchRec's pipelines also trace the model, with stand-ins for tensors."""
        loss = output[0] if isinstance(output, tuple) else None
        if not model.training or not isinstance(loss, Tensor):
            return
        with torch.no_grad():
            self._of_losses.add_(loss, alpha=0)  # 0 times what is not finite is NaN, which stays through sums
            self._of_gradients.add_(self._of_pooled)
            if self._group is not None:
                dist.all_reduce(self._worst, group=self._group)
            worst = self._worst.sum()
            torch.ne(worst, worst, out=self._stopped)  # true of NaN alone

    @runs_in_graphs
    def _gate_tables(self, sparse_arch: nn.Module, arguments: Any, pooled: Any) -> None:
        """Through the gradient of the pooled vectors, by which the backward updates tables."""
        if isinstance(pooled, Tensor) and pooled.requires_grad:
            pooled.register_hook(self._gated)

    def _gated(self, gradient: Tensor) -> Tensor:
        gradient = gradient.masked_fill(self._stopped, 0)
        self._of_pooled.add_(gradient.sum(), alpha=0)
        return gradient.nan_to_num_(0.0, 0.0, 0.0)


class _GradientGate(KeyedOptimizer):
    """Has no parameters of its own, so that it adds nothing to the state of those it is combined with."""

    def __init__(self, guard: TorchRecLossGuard, parameters: list[nn.Parameter]) -> None:
        super().__init__({}, {}, [])
        self._guard, self._gated = guard, parameters

    def step(self, closure: Any = None) -> None:
        """Sets all gradients to zero where a loss or one of them was not finite."""
        gradients = [parameter.grad for parameter in self._gated if parameter.grad is not None]
        if gradients:
            # As integers, in a few launches: no product of floating point numbers makes NaN zero.
            torch._foreach_mul_([gradient.view(torch.int32) for gradient in gradients], self._guard.looks_at(gradients))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the gradients are another optimizer's."""
