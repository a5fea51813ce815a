"""The doctor's changes in a process: it waits for modules to be imported, and wraps a few of their functions.

Imports nothing of torch: this module is loaded at the start of every Python process of the examined command, most of
which are no ranks. A wrapped function costs one more call until the rank reaches its marked iterations.
"""

import functools
import os
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .process_state import OPTIMIZER, PROGRESS, recorded, state
from .site_folder import settings_of

_PIPELINES = "torchrec.distributed.train_pipeline."
_FIVE_STAGE = "five_stage.pipeline"
# Functions that torch's own override protocol does not pass on, by module: they wait for the device, for other ranks,
# or make process groups. The names that they are recorded by are those in the module.
_FUNCTIONS = {
    "torch.cuda": ("synchronize", "empty_cache"),
    "torch.cpu": ("synchronize",),
    "torch.accelerator": ("synchronize",),
    "torch.cuda.streams": ("Stream.synchronize", "Event.synchronize"),
    "torch.distributed.distributed_c10d": (
        "init_process_group",
        "new_group",
        "destroy_process_group",
        "barrier",
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
    ),
}
_BACKWARD = "torch.autograd.graph"
_OPTIMIZERS = "torch.optim.optimizer"


def install() -> None:
    """Watches for the modules to come, if this process belongs to an examined command."""
    state.settings = settings_of(os.environ)
    if state.settings is not None:
        sys.meta_path.insert(0, _Watcher())
        _watch_alarm()


def boundary(found_by: str) -> None:
    """Tells this rank's examination that an iteration begins; makes the examination with the first one."""
    if state.settings is None:
        return
    if state.examination is None:
        from .rank import Examination

        state.examination = Examination(state.settings)
    state.examination.boundary(found_by)


def _watch_alarm() -> None:
    """Notes whether the script uses the sampler's signal: after a limit of time, nothing else shows it."""
    set_handler = signal.signal

    @functools.wraps(set_handler)
    def noting(signalnum: int, handler: Any) -> Any:
        state.alarmed |= signalnum == signal.SIGALRM
        return set_handler(signalnum, handler)

    signal.signal = noting


class _Watcher(MetaPathFinder):
    """Finds the modules to be changed as the other finders do, and changes them as soon as they have run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = _change_of(fullname)
        if change is None:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _run_after(spec.loader, change)
                return spec
        return None


def _run_after(loader: Loader, change: Callable[[ModuleType], None]) -> None:
    """Changes a module once this loader has run it; the loader stays the same for all who ask it for sources."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        change(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _change_of(module: str) -> Callable[[ModuleType], None] | None:
    if module in _FUNCTIONS:
        return functools.partial(_wrap_functions, names=_FUNCTIONS[module])
    if module == _BACKWARD:
        return _wrap_backward
    if module == _OPTIMIZERS:
        return _watch_optimizers
    return _wrap_pipelines if module.startswith(_PIPELINES) or module.endswith(_FIVE_STAGE) else None


def _wrap_functions(module: ModuleType, names: Sequence[str]) -> None:
    for name in names:
        *classes, last = name.split(".")
        owner = functools.reduce(lambda value, part: getattr(value, part, None), classes, module)  # type: ignore[arg-type,return-value]
        if owner is not None and hasattr(owner, last):
            setattr(owner, last, recorded(f"{module.__name__}.{name}", getattr(owner, last)))


def _wrap_backward(module: ModuleType) -> None:
    run = module._engine_run_backward  # torch.autograd takes it from here when it is imported, after this

    @functools.wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        around = state.around_backward
        if around is None:
            return run(*args, **kwargs)
        with around():
            return run(*args, **kwargs)

    module._engine_run_backward = run_backward  # type: ignore[attr-defined]


def _watch_optimizers(module: ModuleType) -> None:
    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if getattr(state.inside_progress, "depth", 0) == 0:
            if state.leader is None:
                state.leader = id(optimizer)
            if state.leader == id(optimizer):
                boundary(OPTIMIZER)

    module.register_optimizer_step_post_hook(after_step)


def _wrap_pipelines(module: ModuleType) -> None:
    for value in list(vars(module).values()):
        ours = isinstance(value, type) and value.__module__ == module.__name__ and not value.__name__.startswith("Eval")
        if ours and "progress" in vars(value):
            value.progress = _progress(value.progress)


def _progress(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a pipeline's progress(), at the end of whose outermost call an iteration begins: one pipeline may call
    another's, and a call that ends an epoch (StopIteration) trains no batch."""

    @functools.wraps(function)
    def progress(*args: Any, **kwargs: Any) -> Any:
        inside = state.inside_progress
        depth = getattr(inside, "depth", 0)
        if depth == 0:
            state.pipeline = weakref.ref(args[0]) if args else None
        inside.depth = depth + 1
        try:
            result = function(*args, **kwargs)
        finally:
            inside.depth = depth
        if depth == 0:
            boundary(PROGRESS)
        return result

    return progress
