"""Reasons why the dense update is in no CUDA graph of the iteration: it runs after the graph, or there is no graph."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import optimizer as torch_optimizer

NATIVE = ("Adagrad", "SGD")
"""torch's optimizers that need no option `capturable`."""
_MARK = "runs_in_graphs"
"""True in a class of optimizers whose step only launches kernels, on memory that stays."""
_MAY_CHANGE = ("params", "lr", "initial_lr")


def of_optimizer(optimizer: Any) -> Iterator[str]:
    """Yields the first reason why the step of a pipeline's optimizer is in no graph; nothing without one."""
    used = [one for one in _innermost(optimizer) if any(group["params"] for group in one.param_groups)]
    whys = [
        *map(_who_waits, _levels(optimizer)),
        *map(_zeroes_as_told, _levels(optimizer)),
        _does_more(optimizer),
        *map(_why_never, used),
        *map(_why_not_now, used),
    ]
    for why in [why for why in whys if why is not None][:1]:
        yield f"no graph takes the dense update: {why}"


def _levels(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer, and those within TorchRec's wrappers."""
    if not hasattr(optimizer, "param_groups"):
        return
    yield optimizer
    within = [part for _, part in optimizer.optimizers] if _is_combined(optimizer) else []
    if not _is_fused(optimizer):
        within += [value for value in vars(optimizer).values() if isinstance(value, torch_optimizer.Optimizer)]
    for inside in within:
        yield from _levels(inside)


def _innermost(optimizer: Any) -> list[Any]:
    """Returns the innermost optimizers, without those of the tables, which the backward updates."""
    if _is_fused(optimizer) or not hasattr(optimizer, "param_groups"):
        return []
    if _is_combined(optimizer):
        return [found for _, part in optimizer.optimizers for found in _innermost(part)]
    inside = [value for value in vars(optimizer).values() if isinstance(value, torch_optimizer.Optimizer)]
    return [found for value in inside for found in _innermost(value)] or [optimizer]


def _is_combined(optimizer: Any) -> bool:
    return type(optimizer).__name__ == "CombinedOptimizer"


def _is_fused(optimizer: Any) -> bool:
    return any(base.__name__ == "FusedOptimizer" for base in type(optimizer).__mro__)


def _is_marked(optimizer: Any) -> bool:
    return bool(getattr(type(optimizer), _MARK, False))


def _steps_alone(optimizer: Any) -> bool:
    return _is_marked(optimizer) and "capturable" not in optimizer.defaults


def _does_more(optimizer: Any) -> str | None:
    """Returns which optimizer around others may do more in its step than launch kernels."""
    if _is_combined(optimizer):
        return next((why for _, part in optimizer.optimizers if (why := _does_more(part)) is not None), None)
    if _is_fused(optimizer) or not hasattr(optimizer, "param_groups") or _steps_alone(optimizer):
        return None
    kind = type(optimizer).__name__
    clips = kind == "GradientClippingOptimizer" and not optimizer._enable_global_grad_clip
    if kind == "KeyedOptimizerWrapper" or clips:
        return _does_more(optimizer._optimizer)
    if _innermost(optimizer) == [optimizer] and any(group["params"] for group in optimizer.param_groups):
        return None
    return f"the step of {kind} may do more than launch kernels; if not, set {_MARK} = True in its class"


def _why_never(optimizer: Any) -> str | None:
    """Returns what of an innermost optimizer's kind no graph holds."""
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if _steps_alone(optimizer):
        return None
    capturable = all(group.get("capturable") for group in groups)
    of_torch = type(optimizer).step.__module__.startswith("torch.optim.")
    if not of_torch and "capturable" in optimizer.defaults and not (_is_marked(optimizer) or capturable):
        return f"{kind} has a step of its own: set capturable=True, or {_MARK} = True in its class"
    keeps = type(optimizer).zero_grad is not torch_optimizer.Optimizer.zero_grad
    if keeps and not _is_marked(optimizer):
        return f"{kind} has a zero_grad of its own, which no replay calls: leave it out, or set {_MARK} = True there"
    if any(base.__name__ == "NAdam" for base in type(optimizer).__mro__) and not capturable:
        return "NAdam keeps state on the host: set capturable=True"
    if not (of_torch and kind in NATIVE) and not all("capturable" in group for group in groups):
        return f"{kind} has no option `capturable`: take Adam, AdamW, SGD or Adagrad"
    if any(parameter.is_complex() for group in groups for parameter in group["params"]):
        return f"{kind} has complex parameters"
    return None


def _who_waits(optimizer: Any) -> str | None:
    """Returns that somebody waits for calls of the optimizer's step. Some of TorchRec's wrappers have no hooks."""
    hooks = [*torch_optimizer._global_optimizer_pre_hooks.values()]
    hooks += [*torch_optimizer._global_optimizer_post_hooks.values()]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks += getattr(optimizer, name, {}).values()
    own = vars(optimizer).get("step")
    replaced = own is not None and not hasattr(own, "_wrapped_by_lr_sched")
    if replaced or any(getattr(hook, "__module__", "") != f"{__package__}.hook" for hook in hooks):
        return f"hooks, or a step in the place of {type(optimizer).__name__}'s, wait for its calls: leave them out"
    return None


def _zeroes_as_told(optimizer: Any) -> str | None:
    """Returns that somebody has put a function in the place of the optimizer's zero_grad."""
    if "zero_grad" not in vars(optimizer):
        return None
    return f"{type(optimizer).__name__} was given another zero_grad, which no replay calls: leave it out"


def _why_not_now(optimizer: Any) -> str | None:
    """Returns what of an innermost optimizer's present state no graph holds."""
    if _steps_alone(optimizer):
        return None
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if any(isinstance(group.get(name), Tensor) for group in groups for name in group if name not in _MAY_CHANGE):
        return f"a hyperparameter of {kind} besides lr is a tensor: give a number"
    if any(group.get("lr_decay") or group.get("differentiable") for group in groups):
        return f"{kind} has lr_decay or differentiable set: leave it out"
    if kind == "Adagrad" and any(group["fused"] for group in groups):
        return "Adagrad has fused set, which is for the CPU: leave it out"
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        return f"a gradient scaler leaves the scaling to {kind}: scale without fused=True"
    return None
