"""Obstacles to CUDA graphs of a model's dense part that are known before the first batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
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
_OF_GRADIENT = attrgetter("_backward_hooks")
_OF_ACCUMULATION = attrgetter("_post_accumulate_grad_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_not_graphed(model: DistributedModelParallel, modules: Sequence[Sharded], device: torch.device) -> str | None:
    """Returns an obstacle to a CUDA graph of the model's dense part, without its sharded `modules`; None without
    one."""
    wrapped = get_module(model)
    if device.type != "cuda":
        return reasons.NO_GPU(device=device)
    if not isinstance(wrapped, DistributedDataParallel):
        return reasons.NO_DDP(kind=type(wrapped).__name__)
    if (why := _of_ddp(wrapped, model.module, modules)) is not None:
        return why
    if getattr(model, "model_trackers", None):
        return reasons.TRACKED()
    return _shared(model.module, modules) or _hooked(model.module, modules)


class LateHooks:
    """Notices hooks that are added to modules or parameters after why_not_graphed has looked at them."""

    def __init__(
        self, model: nn.Module, sharded: Iterable[nn.Module], parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        """sharded: modules whose hooks run beside the graphs. parameters: those that gradients are made for."""
        inside = {id(module) for one in sharded for module in one.modules()}
        outside = [(name or "the model", module) for name, module in model.named_modules() if id(module) not in inside]
        self._found = [(name, getattr(module, hooks)) for name, module in outside for hooks in _HOOKS]
        self._none = [hooks for _, hooks in self._found if not hooks]
        self._some = [hooks for _, hooks in self._found if hooks]
        self._counts = [len(hooks) for hooks in self._some]
        self._unhooked = [(name, p) for name, p in parameters if not (_OF_GRADIENT(p) or _OF_ACCUMULATION(p))]
        self._parameters = [parameter for _, parameter in self._unhooked]

    def look(self) -> str | None:
        """Returns the first module with other hooks, as an obstacle to graphs; None without one. ValueError for a
        parameter with new hooks, which no gradient passes without graphs either. To be called before every batch."""
        if any(map(_OF_GRADIENT, self._parameters)) or any(map(_OF_ACCUMULATION, self._parameters)):
            name = next(name for name, p in self._unhooked if _OF_GRADIENT(p) or _OF_ACCUMULATION(p))
            raise ValueError(
                f"{name} was given a gradient hook after this pipeline was made, which cuda_graph does not call: "
                "change gradients in the optimizer's step, or make a new pipeline, which is then without graphs"
            )
        if not any(self._none) and [*map(len, self._some)] == self._counts:
            return None
        counts = dict(zip(map(id, self._some), self._counts, strict=True))
        changed = (name for name, hooks in self._found if len(hooks) != counts.get(id(hooks), 0))
        return reasons.LATE_HOOKS(module=next(changed))


def runs_in_graphs(hook: _Hook) -> _Hook:
    """Marks a module's hook as one that a CUDA graph may contain.

    It must only launch kernels, or collectives, on memory that stays: these are captured with the module's own and run
    at every replay, without the hook.
    """
    setattr(hook, _IN_GRAPHS, True)
    return hook


@contextmanager
def without_marked_hooks(model: nn.Module) -> Iterator[None]:
    """Takes the hooks that runs_in_graphs has marked off the model's modules within the block."""
    of_modules = [getattr(module, hooks) for module in model.modules() for hooks in _HOOKS]
    before = [(hooks, dict(hooks)) for hooks in of_modules if hooks]
    for hooks, was in before:
        for key, hook in was.items():
            if getattr(hook, _IN_GRAPHS, False):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, was in before:
            hooks.clear()
            hooks.update(was)


def marked_hooks(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """Returns the hooks of the model's modules that runs_in_graphs has marked."""
    for module in model.modules():
        for hooks in _HOOKS:
            yield from (hook for hook in getattr(module, hooks).values() if getattr(hook, _IN_GRAPHS, False))


def calls_for_python(module: nn.Module) -> bool:
    """Whether a module has hooks that a graph would not call."""
    return any(_calls_for_python(module, hooks) for hooks in _HOOKS)


def _calls_for_python(module: nn.Module, hooks: str) -> bool:
    return any(not getattr(hook, _IN_GRAPHS, False) for hook in (getattr(module, hooks, None) or {}).values())


def _of_ddp(wrapped: DistributedDataParallel, model: nn.Module, sharded: Sequence[Sharded]) -> str | None:
    """Returns the reason why options of DistributedDataParallel keep graphs off; None if they do not."""
    if wrapped.mixed_precision is not None:  # which also sets a communication hook
        return reasons.MIXED(option="mixed_precision")
    if wrapped._comm_hooks:
        return reasons.COMM_HOOK()
    if wrapped.find_unused_parameters:
        return reasons.UNUSED()
    if wrapped._delay_all_reduce_params:
        return reasons.MIXED(option="delay_all_reduce_named_params")
    tables = {id(parameter) for one in sharded for parameter in one.collection.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in tables and parameter.requires_grad and name in wrapped.parameters_to_ignore:
            return reasons.IGNORED(parameter=name)
    return None


def _shared(model: nn.Module, sharded: Iterable[Sharded]) -> str | None:
    """Returns an obstacle if a feature processor shares a parameter with another module, as its gradients would then
    come from two stages."""
    for one in (one for one in sharded if one.has_processors):
        own = {id(parameter) for parameter in one.module._feature_processors.parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in own and not name.startswith(f"{one.name}."):
                return reasons.SHARED_PARAMETER(parameter=name, module=one.name)
    return None


def _hooked(model: nn.Module, sharded: Sequence[Sharded]) -> str | None:
    """Returns the first module outside `sharded`, or non-table parameter, with hooks that a graph would not call, or a
    module that torch.jit.script has compiled."""
    inside = {id(module) for one in sharded for module in one.module.modules()}
    tables = {id(parameter) for one in sharded for parameter in one.collection.parameters()}
    for name, module in model.named_modules():
        if id(module) not in inside and isinstance(module, torch.jit.ScriptModule):
            return reasons.SCRIPTED(module=name or "the model")
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
