"""Keeps TorchRec's model as it is from the first iteration on in which any rank's loss is not finite, or a gradient.

Nothing waits for the host, and nothing of TorchRec is replaced: hooks on the model and one more optimizer turn the
gradients of such an iteration into zeros before any update, which change nothing under Adagrad, rowwise Adagrad and
SGD; an optimizer with momentum reads a flag beside them. The host learns of it when it reads the losses.

The backward updates tables before the dense gradients are known: of an iteration whose dense gradients are not finite,
no dense weight changes, and tables do. Gradients by looked-up vectors are known on one rank alone: those that are not
finite become zeros, all else of their iteration changes, and from the next one on nothing does on any rank.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import KeyedTensor
from torchrec.distributed.types import Awaitable, ShardedModule
from torchrec.optim.keyed import KeyedOptimizer

from dlrm_bench.dlrm.dense.loss_guard import LossGuard
from dlrm_bench.dlrm.dense.tallies import GRADIENTS, Tallies
from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.kernels.non_finite import GradientTables, Watch, clear_gradients, clear_together
from dlrm_bench.pipeline.five_stage.graph_obstacles import runs_in_graphs

_DENSE = f"dense {GRADIENTS}"


class TorchRecLossGuard:
    """Watches losses and gradients of one model."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        """model: returns its loss first; not sharded yet. Collective."""
        self.tallies = Tallies((_DENSE,), ranks.device)
        """Tallies of this rank's gradients by looked-up vectors, and of the dense gradients, which are equal on all
        ranks."""
        self._skip: list[Tensor] = []
        self._guard = LossGuard(ranks, None, self.tallies)
        model.register_forward_hook(self._look)

    def watch_lookups(self, sharded: nn.Module) -> None:
        """Gates the tables of all sharded modules: the gradients of their outputs, by which the backward updates
        tables."""
        paths = [path for path, module in sharded.named_modules() if isinstance(module, ShardedModule)]
        for path in paths:
            if not any(path.startswith(f"{outer}.") for outer in paths):
                sharded.get_submodule(path).register_forward_hook(self._gate_tables)

    def skip(self) -> Tensor:
        """Returns a flag, fp32 [], that is 1 from the step on in which no dense weight may change, and 0 before; the
        gate writes it before that step."""
        if not self._skip:
            self._skip.append(torch.zeros((), device=self.tallies.counts.device))
        return self._skip[0]

    def gate(self, parameters: Iterable[nn.Parameter]) -> KeyedOptimizer:
        """Returns an optimizer to step before the one that updates `parameters`, whose gradients it gates."""
        watch = Watch(self._guard.watch.stopped, self.tallies.of(_DENSE)[1:])
        return _GradientGate(watch, list(parameters), self._skip)

    @runs_in_graphs
    def _look(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Collective in training. TorchRec's pipelines also trace the model, with stand-ins for tensors."""
        loss = output[0] if isinstance(output, tuple) else None
        if model.training and isinstance(loss, Tensor):
            self._guard.look(loss.detach().float().view(1))

    def _gate_tables(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Gates a module, of the drop-in too, whose forward runs within the capture of its graphs. Does not wait for
        work in flight."""
        if isinstance(output, Awaitable):
            output.callbacks.append(self._gate_vectors)

    def _gate_vectors(self, output: Any) -> Any:
        """Returns `output`, a KeyedTensor or a JaggedTensor for each feature."""
        for of in (output,) if isinstance(output, KeyedTensor) else output.values():
            if (vectors := of.values()).requires_grad:
                vectors.register_hook(self._gated)
        return output

    def _gated(self, gradient: Tensor) -> Tensor:
        # A copy: autograd's own may be another's too.
        usable = gradient.detach().clone(memory_format=torch.contiguous_format)
        clear_gradients(self._guard.watch, usable)
        return usable


class _GradientGate(KeyedOptimizer):
    """Has no parameters, so that it adds nothing to the state of the optimizers that it is combined with."""

    runs_in_graphs = True
    """Its step only launches kernels, on memory that stays."""

    def __init__(self, watch: Watch, parameters: list[nn.Parameter], skip: list[Tensor]) -> None:
        """skip: the flags to write; empty where no optimizer needs one."""
        super().__init__({}, {}, [])
        self._watch, self._gated, self._skip, self._tables = watch, parameters, skip, GradientTables()

    def step(self, closure: Any = None) -> None:
        """Sets all gradients to zero, and flags to one, where a loss or one of them was not finite."""
        clear_together(self._watch, [p.grad for p in self._gated if p.grad is not None], self._tables)
        for flag in self._skip:
            torch.maximum(self._watch.stopped[0], self._watch.bad[0], out=flag)  # one flag stands for all ranks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the gradients are another optimizer's."""
