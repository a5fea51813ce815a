"""Stage 5 within the graph of a whole iteration: the step of the user's optimizer, if it only launches work.

A replay runs no Python. So every optimizer involved must be known to do nothing else in its step: TorchRec's wrappers,
torch's optimizers that StepWork supports, and types with a true attribute `runs_in_graphs`. These may have a method
`gradients_reduced(parameters, gradients)`, which launches work on the mean of some gradients as soon as it is known,
beside the backward that makes the others.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from . import reasons
from .dense_update import WATCHED, innermost, is_watched, others
from .step_graph import StepWork, is_marked, why_never


class CapturedUpdate:
    """`step()` for a capture, with the checks and counts that every replay needs."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """parameters: those whose gradients stay at their addresses."""
        self._optimizer: Any = optimizer
        own = set(map(id, parameters))
        used = [inner for inner in innermost(optimizer) if any(group["params"] for group in inner.param_groups)]
        whys = (why_never(inner) or _keeps(inner) or others(inner, own) for inner in used if not _steps_alone(inner))
        self.why_not: str | None = _does_more(optimizer) or next((why for why in whys if why is not None), None)
        """The obstacle that permanently keeps the step out of the iteration's graph; None without one."""
        self._works = [] if self.why_not else [(inner, _Work(inner)) for inner in used if not _steps_alone(inner)]
        self._all = list(_within(optimizer))
        self._fused = [of for of in self._all if isinstance(of, FusedOptimizer)]
        self._clipping = [of for of in self._all if isinstance(of, GradientClippingOptimizer)]
        self._early = [of.gradients_reduced for of in self._all if hasattr(of, "gradients_reduced")]
        self._norms: dict[Any, Tensor] = {}
        """Norms of the gradients in the last step, by clipping optimizer, in memory that all graphs write."""
        self._rates: list[float] = []

    def zero_grad(self) -> None:
        """Calls the optimizer's zero_grad, which also passes the tables' learning rates to the lookups."""
        self._optimizer.zero_grad()

    def set_rates(self, lookups_as_before: bool) -> None:
        """Passes only the tables' learning rates to the lookups. lookups_as_before: their rates are unchanged since
        the last call."""
        # Numbers, also of a tensor: schedulers change that in place, and it is always equal to itself.
        rates = [float(group["lr"]) for fused in self._fused for group in fused.param_groups]
        if rates == self._rates and lookups_as_before:
            return
        self._rates = rates
        for fused in self._fused:
            fused.zero_grad()

    def look(self) -> tuple[bool, str | None]:
        """Returns whether a graph with the last prepared step is still valid, and the obstacle to capturing the step
        now. Must be called before every step, with its gradients in place."""
        if self.why_not is not None:
            return True, None  # the step runs after the graph
        watched, scaled, prepared = any(map(is_watched, self._all)), False, True
        keeping = next(filter(_zeroes_as_told, self._all), None)
        for _, work in self._works:
            work.look()
            scaled = scaled or work.is_scaled
            prepared = prepared and work.prepared
        if watched or scaled:
            return False, WATCHED if watched else reasons.SCALED()
        if keeping is not None:
            return False, reasons.GIVEN_ZERO_GRAD(kind=type(keeping).__name__)
        if prepared:
            return True, None
        return False, next((why for _, work in self._works if (why := work.why_not_now()) is not None), None)

    def prepare(self) -> None:
        """Prepares the work that `step` launches, with the current numbers and memory. Launches a little, before a
        capture."""
        for _, work in self._works:
            work.prepare_once()

    def gradients_reduced(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Launches what optimizers do with gradients whose mean over the ranks is known, before `step`."""
        for early in self._early:
            early(parameters, gradients)

    def step(self) -> None:
        """Steps, with the prepared work instead of the inner steps: in a capture, or eagerly in the same way."""
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
        for clipping in self._clipping:
            if (norm := getattr(clipping, "_last_total_grad_norm", None)) is not None:
                self._norms.setdefault(clipping, torch.empty_like(norm)).copy_(norm)

    def before_replay(self) -> None:
        """See StepWork."""
        for _, work in self._works:
            work.before_replay()

    def after_replay(self) -> None:
        """See StepWork. Also counts the step as a learning rate scheduler's wrapper would, and gives clipping
        optimizers the norm that they report (last_total_grad_norm)."""
        for inner, work in self._works:
            work.after_replay()
            inner._opt_called = True
        for clipping, norm in self._norms.items():
            clipping._last_total_grad_norm = norm.clone()


class _Work(StepWork):
    prepared = False
    """Whether `launch` still does the work of a step."""

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
    """Replaces an inner optimizer's step."""
    assert closure is None, "TorchRec's wrappers pass on only closures that they were given"
    launch()


def _steps_alone(optimizer: Any) -> bool:
    """Whether a graph holds this optimizer's own step, unprepared: of a marked class, that is none of torch's kind."""
    return is_marked(optimizer) and "capturable" not in optimizer.defaults


def _keeps(inner: torch.optim.Optimizer) -> str | None:
    """Returns that an innermost optimizer may keep gradients for the next step."""
    own = type(inner).zero_grad is not torch.optim.Optimizer.zero_grad
    return reasons.OWN_ZERO_GRAD(kind=type(inner).__name__) if own and not is_marked(inner) else None


def _zeroes_as_told(optimizer: Any) -> bool:
    """Whether somebody has put a function in the place of an optimizer's zero_grad, which may keep gradients."""
    return "zero_grad" in vars(optimizer)


def _does_more(optimizer: Any) -> str | None:
    """Returns the name of an optimizer whose step may do more than launch work; None if no step does."""
    if is_watched(optimizer):
        return WATCHED
    if _zeroes_as_told(optimizer):
        return reasons.GIVEN_ZERO_GRAD(kind=type(optimizer).__name__)
    if type(optimizer) is CombinedOptimizer:
        return next((why for _, part in optimizer.optimizers if (why := _does_more(part)) is not None), None)
    if isinstance(optimizer, FusedOptimizer) or _steps_alone(optimizer):
        return None
    if type(optimizer) is KeyedOptimizerWrapper:
        return _does_more(optimizer._optimizer)
    if type(optimizer) is GradientClippingOptimizer and not optimizer._enable_global_grad_clip:
        return _does_more(optimizer._optimizer)
    if innermost(optimizer) == [optimizer] and any(group["params"] for group in optimizer.param_groups):
        return None
    return reasons.DOES_MORE(kind=type(optimizer).__name__)


def _within(optimizer: Any) -> Iterable[Any]:
    """Yields an optimizer, and those within TorchRec's wrappers."""
    yield optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _within(part)
    elif not isinstance(optimizer, FusedOptimizer) and isinstance(
        inner := getattr(optimizer, "_optimizer", None), torch.optim.Optimizer
    ):
        yield from _within(inner)
