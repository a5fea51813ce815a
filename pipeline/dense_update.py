"""Stage 5 beside a captured dense part: the step of torch.optim.Adagrad, where the user has it, as a CUDA graph too.

The eager step is Python that groups, checks and allocates, and a launch for every foreach op and chunk of parameters:
with the dense part captured, a third of the host's time of an iteration. The graph runs what the step runs, on the
memory of the user's parameters, gradients and state. Only adding one to each `step`, which are on the host, is done by
the host still; whoever reads or loads the optimizer's state sees no difference.
"""

import logging
from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad
from torch.optim import optimizer as torch_optimizer
from torch.optim.adagrad import adagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dlrm.cuda_graph import captures, destroy, record

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Eager steps with the same hyperparameters and memory before one is captured."""
_FROZEN = ("lr", "weight_decay", "eps", "maximize", "foreach", "lr_decay", "differentiable", "fused")


class DenseUpdate:
    """`step()` in the place of `optimizer.step()`, with the same effect.

    Adagrad is looked for behind TorchRec's CombinedOptimizer and KeyedOptimizerWrapper; all other optimizers step as
    they are. A change of its hyperparameters, or of the tensors that hold its parameters, gradients and state, is
    noticed: it steps eagerly then until nothing has changed WARM_UP times. It stays eager where something depends on
    its `step` being called, hooks or a learning rate scheduler, and with a decaying learning rate or fused kernels.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], device: torch.device
    ) -> None:
        """parameters: those whose gradients stay in their memory; an Adagrad with others is left alone."""
        self._optimizer = optimizer
        own = set(map(id, parameters))
        self._graphs: dict[int, _AdagradGraph] = {}
        for part in _parts(optimizer) if captures(device) else ():
            of_part = [p for group in part.param_groups for p in group["params"]] if type(part) is Adagrad else []
            if of_part and all(id(p) in own and not p.is_complex() for p in of_part):
                self._graphs[id(part)] = _AdagradGraph(part)

    def step(self) -> None:
        """On the current stream."""
        if self._graphs:
            self._step(self._optimizer)
        else:
            self._optimizer.step()

    def close(self) -> None:
        """Destroys the graphs."""
        for graph in self._graphs.values():
            graph.forget()
        self._graphs.clear()

    def _step(self, optimizer: Any) -> None:
        if _step_is_watched(optimizer):
            optimizer.step()
        elif type(optimizer) is CombinedOptimizer:
            for _, part in optimizer.optimizers:
                self._step(part)
        elif type(optimizer) is KeyedOptimizerWrapper:
            self._step(optimizer._optimizer)
        elif id(optimizer) in self._graphs:
            self._graphs[id(optimizer)].step()
        else:
            optimizer.step()


class _AdagradGraph:
    """The step of one Adagrad."""

    def __init__(self, optimizer: Adagrad) -> None:
        self._optimizer = optimizer
        self._frozen: list[Any] = []
        self._memory: list[Tensor | None] = []
        self._unchanged = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._counts: list[Tensor] = []
        self._one = torch.tensor(1.0)
        self._failed = False

    def step(self) -> None:
        self._look_for_changes()
        if self._graph is None and self._unchanged >= WARM_UP and not self._failed and self._can_be_captured():
            self._capture()
        if self._graph is None:
            self._optimizer.step()
            return
        self._graph.replay()
        torch._foreach_add_(self._counts, self._one, alpha=1.0)

    def forget(self) -> None:
        if self._graph is not None:
            destroy([self._graph])
            self._graph = None

    def _look_for_changes(self) -> None:
        state = self._optimizer.state
        frozen: list[Any] = []
        memory: list[Tensor | None] = []
        for group in self._optimizer.param_groups:
            frozen += [group[name] for name in _FROZEN]
            for parameter in group["params"]:
                of = state.get(parameter, {})
                memory += (parameter, parameter.grad, of.get("sum"), of.get("step"))
        constant = not any(isinstance(value, Tensor) for value in frozen) and frozen == self._frozen
        if constant and len(memory) == len(self._memory) and all(map(is_, memory, self._memory)):
            self._unchanged += 1
            return
        self.forget()
        self._unchanged, self._frozen, self._memory = 0, frozen, memory

    def _can_be_captured(self) -> bool:
        groups = self._optimizer.param_groups
        plain = all(g["lr_decay"] == 0 and not g["differentiable"] and not g["fused"] for g in groups)
        # GradScaler leaves these to optimizers.
        scaled = any(getattr(self._optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        _, grads, sums, counts = (self._memory[i::4] for i in range(4))
        state = zip(grads, sums, counts, strict=True)
        known = all(s is not None and n is not None and n.is_cpu for grad, s, n in state if grad is not None)
        return plain and not scaled and known and any(grad is not None for grad in grads)

    def _capture(self) -> None:
        """Runs nothing on the GPU, and counts nothing. Where it fails, steps stay eager."""
        groups = []
        self._counts = []
        for group in self._optimizer.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            sums, counts = ([self._optimizer.state[p][name] for p in used] for name in ("sum", "step"))
            grads = [p.grad for p in used]
            groups.append((used, grads, sums, counts, {name: group[name] for name in _FROZEN}))
            self._counts += counts

        def work() -> None:
            for parameters, grads, sums, counts, frozen in groups:
                adagrad(parameters, grads, sums, [count.clone() for count in counts], **frozen)

        try:
            with torch.no_grad():
                self._graph = record(work)
        except Exception as error:
            self._failed = True
            logger.warning("the dense update runs eagerly: its capture failed: %s: %s", type(error).__name__, error)


def _parts(optimizer: Any) -> list[Any]:
    """Optimizers behind TorchRec's."""
    if type(optimizer) is CombinedOptimizer:
        return [leaf for _, part in optimizer.optimizers for leaf in _parts(part)]
    return _parts(optimizer._optimizer) if type(optimizer) is KeyedOptimizerWrapper else [optimizer]


def _step_is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """By hooks, or by a learning rate scheduler, which puts a `step` of its own in the place of the optimizer's."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return any(hooks) or "step" in vars(optimizer)
