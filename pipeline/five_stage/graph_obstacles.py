"""Obstacles to CUDA graphs of a model's dense part that are known before the first batch."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_module

from . import reasons
from .sharded_modules import Sharded

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_IN_GRAPHS = "runs_in_graphs"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_not_graphed(model: DistributedModelParallel, modules: Sequence[Sharded], device: torch.device) -> str | None:
    """Returns an obstacle to a CUDA graph of the model's dense part, without its sharded `modules`; None without
    one."""
    wrapped = get_module(model)
    if device.type != "cuda":
        return reasons.NO_GPU(device=device)
    if not isinstance(wrapped, DistributedDataParallel):
        return reasons.NO_DDP(kind=type(wrapped).__name__)
    if wrapped._comm_hooks:
        return reasons.COMM_HOOK()
    if getattr(model, "model_trackers", None):
        return reasons.TRACKED()
    return _shared(model.module, modules) or _hooked(model.module, modules)


def runs_in_graphs(hook: _Hook) -> _Hook:
    """Marks a hook of a module as one that a CUDA graph may hold.

    It only launches kernels, or collectives, on memory that stays: they are captured with the module's own and run at
    every replay, without the hook.
    """
    setattr(hook, _IN_GRAPHS, True)
    return hook


def calls_for_python(module: nn.Module) -> bool:
    """Returns whether a module has hooks that a graph would not call."""
    return any(_calls_for_python(module, hooks) for hooks in _HOOKS)


def _calls_for_python(module: nn.Module, hooks: str) -> bool:
    return any(not getattr(hook, _IN_GRAPHS, False) for hook in (getattr(module, hooks, None) or {}).values())


def _shared(model: nn.Module, sharded: Iterable[Sharded]) -> str | None:
    """A feature processor's parameter that another module has too, whose gradients come from two stages then."""
    for one in (one for one in sharded if one.has_processors):
        own = {id(parameter) for parameter in one.module._feature_processors.parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in own and not name.startswith(f"{one.name}."):
                return reasons.SHARED_PARAMETER(parameter=name, module=one.name)
    return None


def _hooked(model: nn.Module, sharded: Sequence[Sharded]) -> str | None:
    """The first module outside `sharded`, or parameter that is no table, whose hooks a graph would not call."""
    inside = {id(module) for one in sharded for module in one.module.modules()}
    tables = {id(parameter) for one in sharded for parameter in one.collection.parameters()}
    for name, module in model.named_modules():
        if id(module) not in inside and calls_for_python(module):
            return reasons.MODULE_HOOKS(module=name or "the model", kind=type(module).__name__)
    for name, parameter in model.named_parameters():
        if id(parameter) in tables:
            continue
        if getattr(parameter, "_in_backward_optimizers", None):
            return reasons.IN_BACKWARD(parameter=name)
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return reasons.GRADIENT_HOOKS(parameter=name)
    return None
