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
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from ..cuda_graph import captures, destroy, record

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Eager steps with the same hyperparameters and memory before one is captured."""
_FROZEN = ("lr", "weight_decay", "eps", "maximize", "foreach", "lr_decay", "differentiable", "fused")
_WATCHED = "hooks or a learning rate scheduler wait for calls of the optimizer's step"
_CHANGED = (
    "Adagrad's hyperparameters, or the tensors that hold its parameters, gradients and state, had changed within "
    f"{WARM_UP} steps"
)


class DenseUpdate:
    """`step()` in the place of `optimizer.step()`, with the same effect.

    Adagrad is looked for inside TorchRec's CombinedOptimizer and KeyedOptimizerWrapper; all other optimizers step as
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
        self._above: dict[int, torch.optim.Optimizer] = {}
        self._never = [] if captures(device) else [f"there are no CUDA graphs on {device}"]
        for chain in _chains(optimizer) if captures(device) else ():
            part = chain[-1]
            if (why := _why_never(part, own)) is not None:
                self._never.append(why)
            elif type(part) is Adagrad:
                self._graphs[id(part)] = _AdagradGraph(part)
                self._above |= {id(above): above for above in chain}
        self._steps = 0
        self._eager: dict[str, int] = {}

    @property
    def why_not(self) -> str | None:
        """Says which optimizer steps eagerly, beyond its very first steps, and why; None if none does."""
        counted = dict(self._eager)
        if any(map(_step_is_watched, self._above.values())):
            counted.setdefault(_WATCHED, 0)
        ran = {why: f"{count} of {self._steps} steps ran eagerly: " if count else "" for why, count in counted.items()}
        some = [numbers + why for why, numbers in ran.items()]
        return "; ".join([*self._never, *some]) or None

    def step(self) -> None:
        """Steps on the current stream."""
        if not self._graphs:
            self._optimizer.step()
            return
        self._steps += 1
        for why in self._step(self._optimizer):
            if why not in self._eager:
                logger.warning("the dense update runs eagerly: %s", why)
            self._eager[why] = self._eager.get(why, 0) + 1

    def close(self) -> None:
        """Destroys the graphs."""
        for graph in self._graphs.values():
            graph.forget()
        self._graphs.clear()
        self._above.clear()

    def _step(self, optimizer: Any) -> set[str]:
        """Why something stepped eagerly that is to be replayed."""
        if _step_is_watched(optimizer):
            optimizer.step()
            return {_WATCHED} if id(optimizer) in self._above else set()
        if type(optimizer) is CombinedOptimizer:
            reasons: set[str] = set()
            for _, part in optimizer.optimizers:
                reasons |= self._step(part)
            return reasons
        if type(optimizer) is KeyedOptimizerWrapper:
            return self._step(optimizer._optimizer)
        if id(optimizer) not in self._graphs:
            optimizer.step()
            return set()
        why = self._graphs[id(optimizer)].step()
        return set() if why is None else {why}


class _AdagradGraph:
    """The step of one Adagrad."""

    def __init__(self, optimizer: Adagrad) -> None:
        self._optimizer = optimizer
        self._frozen: list[Any] = []
        self._memory: list[Tensor | None] = []
        self._steps = self._unchanged = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._counts: list[Tensor] = []
        self._one = torch.tensor(1.0)
        self._failure: str | None = None

    def step(self) -> str | None:
        """Why it ran eagerly, if so and the very first steps are over."""
        self._steps += 1
        self._look_for_changes()
        why: str | None = None
        if self._graph is None:
            why = self._failure or self._obstacle() or (_CHANGED if self._unchanged < WARM_UP else self._capture())
        if self._graph is None:
            self._optimizer.step()
            return why if self._steps > WARM_UP else None
        self._graph.replay()
        torch._foreach_add_(self._counts, self._one, alpha=1.0)
        return None

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

    def _obstacle(self) -> str | None:
        """Raised where a step cannot be captured."""
        if any(isinstance(value, Tensor) for value in self._frozen):
            return "a hyperparameter of Adagrad is a tensor, whose value may change unnoticed"
        if any(g["lr_decay"] != 0 or g["differentiable"] or g["fused"] for g in self._optimizer.param_groups):
            return "Adagrad has lr_decay, differentiable or fused set"
        # GradScaler leaves these to optimizers.
        if any(getattr(self._optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            return "a gradient scaler leaves the scaling to Adagrad"
        _, grads, sums, counts = (self._memory[i::4] for i in range(4))
        state = [(s, n) for grad, s, n in zip(grads, sums, counts, strict=True) if grad is not None]
        if not state:
            return "no parameter of Adagrad has a gradient"
        if not all(s is not None and n is not None and n.is_cpu for s, n in state):
            return "Adagrad's state is not what torch.optim.Adagrad makes: a sum, and a step on the host"
        return None

    def _capture(self) -> str | None:
        """Runs nothing on the GPU, and counts nothing. Where it fails, steps stay eager, and it says why."""
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
            self._failure = f"its capture failed: {type(error).__name__}: {error}"
        return self._failure


def _chains(optimizer: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the optimizers wrapped by TorchRec's, each at the end of a chain of those through which its steps
    come."""
    chain = (*above, optimizer)
    if type(optimizer) is CombinedOptimizer:
        return [found for _, part in optimizer.optimizers for found in _chains(part, chain)]
    return _chains(optimizer._optimizer, chain) if type(optimizer) is KeyedOptimizerWrapper else [chain]


def _why_never(part: Any, own: set[int]) -> str | None:
    """Says what keeps an optimizer's steps out of a graph for good. own: ids of the parameters that may be in one."""
    parameters = [p for group in part.param_groups for p in group["params"]]
    if not parameters or _steps_in_backward(part):
        return None
    if type(part) is not Adagrad:
        return f"it is {type(part).__name__}'s, and only torch.optim.Adagrad's step is captured"
    if not all(id(p) in own for p in parameters):
        return (
            "Adagrad has parameters whose gradients do not stay in their memory, of data-parallel tables for example: "
            "give these an optimizer of their own"
        )
    return "Adagrad has complex parameters" if any(p.is_complex() for p in parameters) else None


def _steps_in_backward(optimizer: Any) -> bool:
    """Returns whether backward updates the parameters, as those of tables; `step` then only sets the learning rate."""
    if isinstance(optimizer, OptimizerWrapper):
        return _steps_in_backward(optimizer._optimizer)
    if isinstance(optimizer, CombinedOptimizer):
        return all(_steps_in_backward(part) for _, part in optimizer.optimizers)
    return isinstance(optimizer, FusedOptimizer)


def _step_is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `step` is watched: by hooks, or by a learning rate scheduler, which replaces the optimizer's."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    return any(hooks) or "step" in vars(optimizer)
