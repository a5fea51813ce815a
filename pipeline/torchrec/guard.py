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
from torch import Tensor, nn
from torchrec.models.dlrm import DLRMTrain
from torchrec.optim.keyed import KeyedOptimizer

from dlrm_bench.dlrm.dense.loss_guard import LossGuard
from dlrm_bench.dlrm.dense.tallies import GRADIENTS, Tallies
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.non_finite import GradientTables, Watch, clear_gradients, clear_together
from dlrm_bench.pipeline.five_stage.graph_obstacles import runs_in_graphs

_DENSE = f"dense {GRADIENTS}"


class TorchRecLossGuard:
    """Watches losses and gradients of one DLRMTrain, before it is sharded."""

    def __init__(self, model: DLRMTrain, ranks: Ranks) -> None:
        """Collective."""
        self.tallies = Tallies((_DENSE,), ranks.device)
        """Of this rank's gradients by pooled vectors, and of the dense gradients, which are equal on all ranks."""
        self._guard = LossGuard(ranks, None, self.tallies)
        model.register_forward_hook(self._look)
        model.model.sparse_arch.register_forward_hook(self._gate_tables)

    def gate(self, parameters: Iterable[nn.Parameter]) -> KeyedOptimizer:
        """Returns an optimizer to step before the one that updates `parameters`, whose gradients it gates."""
        return _GradientGate(Watch(self._guard.watch.stopped, self.tallies.of(_DENSE)[1:]), list(parameters))

    @runs_in_graphs
    def _look(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Collective in training. TorchRec's pipelines also trace the model, with stand-ins for tensors."""
        loss = output[0] if isinstance(output, tuple) else None
        if model.training and isinstance(loss, Tensor):
            self._guard.look(loss.detach().float().view(1))

    @runs_in_graphs
    def _gate_tables(self, sparse_arch: nn.Module, arguments: Any, pooled: Any) -> None:
        """Through the gradient of the pooled vectors, by which the backward updates tables."""
        if isinstance(pooled, Tensor) and pooled.requires_grad:
            pooled.register_hook(self._gated)

    def _gated(self, gradient: Tensor) -> Tensor:
        # A copy: autograd's own may be another's too.
        usable = gradient.detach().clone(memory_format=torch.contiguous_format)
        clear_gradients(self._guard.watch, usable)
        return usable


class _GradientGate(KeyedOptimizer):
    """Has no parameters of its own, so that it adds nothing to the state of those it is combined with."""

    def __init__(self, watch: Watch, parameters: list[nn.Parameter]) -> None:
        super().__init__({}, {}, [])
        self._watch, self._gated, self._tables = watch, parameters, GradientTables()

    def step(self, closure: Any = None) -> None:
        """Sets all gradients to zero where a loss or one of them was not finite."""
        clear_together(self._watch, [p.grad for p in self._gated if p.grad is not None], self._tables)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the gradients are another optimizer's."""
