"""Stage 5 beside a captured dense part: the step of the user's optimizer, as a CUDA graph too if possible.

The eager step is Python code that groups, checks and allocates, and a launch for every foreach op and chunk of
parameters: with the dense part captured, it takes a third of the host's time of an iteration.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, OptimizerWrapper

from . import reasons
from .cuda_graph import captures
from .step_graph import StepGraph, why_never

logger = logging.getLogger(__name__)

WATCHED = reasons.WATCHED()


class DenseUpdate:
    """`step()` in place of `optimizer.step()`, with the same effect.

    Searches for torch's optimizers inside all others, TorchRec's and the user's own, whose steps run unchanged: when
    they step an inner optimizer, its graph is replayed. A change of hyperparameters, or of the tensors that hold
    parameters, gradients and state, is detected: the optimizer then steps eagerly until nothing has changed WARM_UP
    times. Only the learning rate may change with every step. An optimizer with hooks on its steps stays eager.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], device: torch.device
    ) -> None:
        """parameters: those whose gradients stay at their addresses; an optimizer with others stays eager."""
        self._optimizer = optimizer
        own = set(map(id, parameters))
        self._graphs: list[tuple[torch.optim.Optimizer, StepGraph]] = []
        self._never = [] if captures(device) else [f"there are no CUDA graphs on {device}"]
        for inner in innermost(optimizer) if captures(device) else ():
            if not any(group["params"] for group in inner.param_groups):
                continue
            if (why := why_never(inner) or others(inner, own)) is not None:
                self._never.append(why)
            else:
                self._graphs.append((inner, StepGraph(inner)))
        self._steps = 0
        self._eager: dict[str, int] = {}

    @property
    def why_not(self) -> str | None:
        """The optimizers that step eagerly after their very first steps, and why; None if none does."""
        counted = dict(self._eager)
        if any(is_watched(inner) for inner, _ in self._graphs):
            counted.setdefault(WATCHED, 0)
        ran = {why: f"{count} of {self._steps} steps ran eagerly: " if count else "" for why, count in counted.items()}
        some = [numbers + why for why, numbers in ran.items()]
        return "; ".join([*self._never, *some]) or None

    @property
    def captured(self) -> bool:
        """Whether every step that can be replayed is replayed."""
        return bool(self._graphs) and all(graph.captured for _, graph in self._graphs)

    def step(self) -> None:
        """Steps on the current stream."""
        if not self._graphs:
            self._optimizer.step()
            return
        self._steps += 1
        reasons: set[str] = set()
        before = []
        for inner, graph in self._graphs:
            if is_watched(inner):
                reasons.add(WATCHED)
                continue
            before.append((inner, vars(inner).get("step")))
            vars(inner)["step"] = partial(_step, inner, graph, inner.step, reasons)
        try:
            self._optimizer.step()
        finally:
            for inner, own in before:
                if own is None:
                    del vars(inner)["step"]
                else:
                    vars(inner)["step"] = own
        for why in reasons:
            if why not in self._eager:
                logger.warning("the dense update runs eagerly: %s", why)
            self._eager[why] = self._eager.get(why, 0) + 1

    def close(self) -> None:
        """Destroys the graphs."""
        for _, graph in self._graphs:
            graph.forget()
        self._graphs.clear()


def _step(
    inner: Any,
    graph: StepGraph,
    eagerly: Callable[..., Any],
    reasons: set[str],
    closure: Callable[[], Any] | None = None,
) -> Any:
    """Replaces `inner.step`."""
    if closure is not None:
        reasons.add("the step is given a closure")
        return eagerly(closure)
    if (why := graph.step(eagerly)) is not None:
        reasons.add(why)
    inner._opt_called = True  # as a learning rate scheduler's own wrapper would set it
    return None


def innermost(optimizer: Any) -> list[Any]:
    """Returns the innermost optimizers, without those whose parameters backward updates."""
    if isinstance(optimizer, CombinedOptimizer):
        return [found for _, part in optimizer.optimizers for found in innermost(part)]
    if isinstance(optimizer, FusedOptimizer):
        return []  # backward updates tables; its step sets the learning rate
    if isinstance(optimizer, OptimizerWrapper):
        return innermost(optimizer._optimizer)
    inside = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    return [found for value in inside for found in innermost(value)] or [optimizer]


def others(inner: Any, own: set[int]) -> str | None:
    """Returns a message if an optimizer has parameters with ids other than these."""
    # TorchRec's parameter of a table that is looked up together with others is a slice of their joint parameter.
    if all(id(getattr(p, "_original_tensor", p)) in own for group in inner.param_groups for p in group["params"]):
        return None
    return (
        f"{type(inner).__name__} has parameters whose gradients do not stay in their memory, of data-parallel tables "
        "for example: give these an optimizer of their own"
    )


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anything observes calls of `step`, other than a scheduler, which only counts them."""
    hooks = (
        getattr(optimizer, "_optimizer_step_pre_hooks", ()),  # some of TorchRec's wrappers have none
        getattr(optimizer, "_optimizer_step_post_hooks", ()),
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    own = vars(optimizer).get("step")
    return any(hooks) or (own is not None and not hasattr(own, "_wrapped_by_lr_sched"))
