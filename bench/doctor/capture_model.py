"""Obstacles to a CUDA graph outside of the tables: hooks, and what is done with gradients in the backward."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NAMED = 3
"""Modules, or parameters, that are named; others are counted."""


def of_model(model: Any, root: Any, sharded: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """Yields the obstacles of a model. root: the model without its wrappers. sharded: by name, each sharded module and
    the module with its tables."""
    tables = {id(parameter) for _, collection in sharded.values() for parameter in collection.parameters()}
    dense = {name: parameter for name, parameter in root.named_parameters() if id(parameter) not in tables}
    if (wrapped := getattr(model, "_dmp_wrapped_module", None)) is not None:
        yield from _of_wrapper(wrapped, dense)
    if getattr(model, "model_trackers", None):
        yield "a model tracker counts the calls of the model, of which a graph makes none: leave it out"
    inside = {id(module) for one, _ in sharded.values() for module in one.modules()}
    outside = [(name or "the model", of) for name, of in root.named_modules() if id(of) not in inside]
    if scripted := [name for name, of in outside if isinstance(of, ScriptModule)]:
        yield f"torch.jit.script has compiled {_some(scripted)}: take torch.compile, or leave it uncompiled"
    if hooked := [name for name, of in outside if _has_hooks(of)]:
        yield f"hooks of {_some(hooked)} would run at captures only: remove them"
    for name, (module, _) in sharded.items():
        if (processors := getattr(module, "_feature_processors", None)) is not None:
            yield from _of_processors(name, processors, root)
    if updated := [name for name, of in dense.items() if getattr(of, "_in_backward_optimizers", None)]:
        yield f"the backward updates {_some(updated)} (apply_optimizer_in_backward): give them to the optimizer"
    watched = [
        name for name, of in dense.items() if of._backward_hooks or getattr(of, "_post_accumulate_grad_hooks", None)
    ]
    if watched:
        yield f"no graph calls the gradient hooks of {_some(watched)}: change gradients in the optimizer's step"


def _of_wrapper(wrapped: Any, dense: Mapping[str, Any]) -> Iterator[str]:
    """Yields the obstacles of DistributedDataParallel's options, which a graphed all-reduce would leave out."""
    if not isinstance(wrapped, DistributedDataParallel):
        yield f"the dense part is wrapped by {type(wrapped).__name__}: wrap it by DistributedDataParallel"
        return
    if wrapped.mixed_precision is not None:  # which also sets a communication hook
        yield "DistributedDataParallel has mixed_precision: leave it out"
    elif wrapped._comm_hooks:
        yield "DistributedDataParallel has a communication hook: leave it out"
    if wrapped.find_unused_parameters:
        yield "DistributedDataParallel has find_unused_parameters=True: use every parameter in every batch"
    if wrapped._delay_all_reduce_params:
        yield "DistributedDataParallel has delay_all_reduce_named_params: leave it out"
    ignored = [name for name, of in dense.items() if of.requires_grad and name in wrapped.parameters_to_ignore]
    if ignored:
        yield f"DistributedDataParallel ignores {_some(ignored)}: freeze them, or leave them out of params_to_ignore"


def _of_processors(name: str, processors: Any, root: Any) -> Iterator[str]:
    """Yields the obstacles of a sharded module's feature processors."""
    if any(map(_has_hooks, processors.modules())):
        yield f"hooks of the feature processors of {name} would run at captures only: remove them"
    own = {id(parameter) for parameter in processors.parameters()}
    named = root.named_parameters(remove_duplicate=False)
    if shared := [of for of, parameter in named if id(parameter) in own and not of.startswith(f"{name}.")]:
        yield f"the feature processors of {name} share {_some(shared)} with other modules: give each its own"


def _has_hooks(module: Any) -> bool:
    """Whether a module has hooks that are not marked as ones that only launch (the drop-in's runs_in_graphs)."""
    hooks = [hook for of in _HOOKS for hook in (getattr(module, of, None) or {}).values()]
    return not all(getattr(hook, "runs_in_graphs", False) for hook in hooks)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
