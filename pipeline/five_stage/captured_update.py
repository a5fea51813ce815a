"""Stage 5 within the graph of a whole iteration: the step of the user's optimizer, where all of it only launches.

A replay runs no Python. So each optimizer on the way must be known to do nothing else in its step: TorchRec's
wrappers, those of torch as StepWork has them, and types with a true attribute `runs_in_graphs`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from . import reasons
from .dense_update import WATCHED, innermost, is_watched, others
from .step_graph import StepWork, why_never


class CapturedUpdate:
    """`step()` for a capture, with what must be asked and counted around every replay."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """parameters: those whose gradients stay in their memory."""
        self._optimizer: Any = optimizer
        own = set(map(id, parameters))
        used = [inner for inner in innermost(optimizer) if any(group["params"] for group in inner.param_groups)]
        whys = (why_never(inner) or others(inner, own) for inner in used if not _is_marked(inner))
        self.why_not: str | None = _does_more(optimizer) or next((why for why in whys if why is not None), None)
        """The obstacle that keeps the step out of the iteration's graph for good; None without one."""
        self._works = [] if self.why_not else [(inner, _Work(inner)) for inner in used if not _is_marked(inner)]
        self._fused = list(_fused(optimizer))
        self._rates: list[Any] = []

    def zero_grad(self) -> None:
        """The optimizer's, which also brings the tables' learning rates to the lookups."""
        self._optimizer.zero_grad()

    def set_rates(self, lookups_as_before: bool) -> None:
        """Brings the tables' learning rates alone to the lookups. lookups_as_before: their rates are those that the
        last call has left."""
        rates = [group["lr"] for fused in self._fused for group in fused.param_groups]
        if rates == self._rates and lookups_as_before:
            return
        self._rates = rates
        for fused in self._fused:
            fused.zero_grad()

    def look(self) -> tuple[bool, str | None]:
        """Returns whether a graph with the last prepared step is as good as ever, and what keeps the step out of one
        now. To be called before every step, with its gradients in place."""
        for _, work in self._works:
            work.look()
        if any(is_watched(inner) for inner, _ in self._works):
            return False, WATCHED
        if any(work.is_scaled for _, work in self._works):
            return False, reasons.SCALED()
        if all(work.prepared for _, work in self._works):
            return True, None
        return False, next((why for _, work in self._works if (why := work.why_not_now()) is not None), None)

    def prepare(self) -> None:
        """Makes what `step` launches, of numbers and memory as they are. Launches a little, before a capture."""
        for _, work in self._works:
            work.prepare_once()

    def step(self) -> None:
        """Steps, with the prepared work in the place of the inner steps: in a capture, or as it will be captured."""
        before = []
        for inner, work in self._works:
            before.append((inner, vars(inner).get("step")))
            vars(inner)["step"] = partial(_run, work.launch)
        try:
            self._optimizer.step()
        finally:
            for inner, own in before:
                if own is None:
                    del vars(inner)["step"]
                else:
                    vars(inner)["step"] = own

    def before_replay(self) -> None:
        """See StepWork."""
        for _, work in self._works:
            work.before_replay()

    def after_replay(self) -> None:
        """See StepWork. What a learning rate scheduler's own wrapper notes is noted."""
        for inner, work in self._works:
            work.after_replay()
            inner._opt_called = True


class _Work(StepWork):
    prepared = False
    """Whether `launch` does what a step does now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._launch: Callable[[], None] | None = None

    def forget(self) -> None:
        self.prepared = False

    def prepare_once(self) -> None:
        if not self.prepared:
            self._launch, self.prepared = self.prepare(), True

    def launch(self) -> None:
        assert self._launch is not None, "prepared"
        with torch.no_grad():
            self._launch()


def _run(launch: Callable[[], None], closure: Callable[[], Any] | None = None) -> None:
    """Stands for an inner optimizer's step."""
    assert closure is None, "TorchRec's wrappers hand no closure on that they were not given"
    launch()


def _is_marked(optimizer: Any) -> bool:
    return bool(getattr(type(optimizer), "runs_in_graphs", False))


def _does_more(optimizer: Any) -> str | None:
    """Names an optimizer whose step may do more than launch; None where all are known not to."""
    if type(optimizer) is CombinedOptimizer:
        return next((why for _, part in optimizer.optimizers if (why := _does_more(part)) is not None), None)
    if isinstance(optimizer, FusedOptimizer) or _is_marked(optimizer):
        return None
    if type(optimizer) is KeyedOptimizerWrapper:
        return _does_more(optimizer._optimizer)
    if type(optimizer) is GradientClippingOptimizer and not optimizer._enable_global_grad_clip:
        return _does_more(optimizer._optimizer)
    if innermost(optimizer) == [optimizer] and any(group["params"] for group in optimizer.param_groups):
        return WATCHED if is_watched(optimizer) else None
    return reasons.DOES_MORE(kind=type(optimizer).__name__)


def _fused(optimizer: Any) -> Iterable[Any]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _fused(part)
    elif isinstance(optimizer, FusedOptimizer):
        yield optimizer
    elif isinstance(inner := getattr(optimizer, "_optimizer", None), torch.optim.Optimizer):
        yield from _fused(inner)
