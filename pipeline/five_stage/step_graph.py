"""The step of one torch optimizer as a CUDA graph.

The graph runs the step's work, on the memory of the user's parameters, gradients and state. Step counts that are on the
host stay there and the host counts them: code that reads or loads the optimizer's state sees no difference. The
learning rate is frozen with the other numbers until it changes; from then on the graph reads it from the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, NAdam, Optimizer
from torch.optim.adagrad import adagrad
from torch.optim.sgd import sgd

from . import reasons
from .adagrad_of_tensors import one_kernel
from .cuda_graph import destroy, record
from .host_counts import HostCounts

NATIVE = (Adagrad, SGD)
"""torch's optimizers whose functions are captured directly; others are captured with their option `capturable`."""
WARM_UP = 3
"""Eager steps with the same hyperparameters and memory before one is captured."""
CHANGED = (
    "the optimizer's hyperparameters, or the memory that holds its parameters, gradients and state, had changed within "
    f"{WARM_UP} steps"
)


def why_never(optimizer: Optimizer) -> str | None:
    """Returns the obstacle to capturing any step of this optimizer; None without one."""
    kind = type(optimizer).__name__
    # torch may have put a wrapper in the place of a step that a class inherits: it has the module of what it wraps.
    of_torch = type(optimizer).step.__module__.startswith("torch.optim.")
    if not of_torch and "capturable" in optimizer.defaults and not (is_marked(optimizer) or _capturable(optimizer)):
        return reasons.OWN_STEP(kind=kind)
    if isinstance(optimizer, NAdam) and not _capturable(optimizer):
        return reasons.HOST_STATE(kind=kind, state="mu_product")
    if type(optimizer) not in NATIVE and not all("capturable" in group for group in optimizer.param_groups):
        return reasons.NOT_CAPTURABLE(kind=kind)
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        return reasons.COMPLEX(kind=kind)
    return None


def is_marked(optimizer: Any) -> bool:
    """Whether the optimizer's class says that its step only launches kernels, on memory that stays."""
    return bool(getattr(type(optimizer), "runs_in_graphs", False))


def _capturable(optimizer: Optimizer) -> bool:
    return all(group.get("capturable") for group in optimizer.param_groups)


_GRAD = attrgetter("grad")
_NOT_FROZEN = {"params", "lr", "initial_lr"}
"""Entries of a parameter group that may change; the last one is a scheduler's own."""


class StepWork:
    """Launches of one optimizer's step, with memory and numbers that are checked before every step. They may be part of
    its own graph (StepGraph) or of an iteration's."""

    def __init__(self, optimizer: Optimizer) -> None:
        """optimizer: one without an obstacle (why_never)."""
        self._optimizer, self._kind = optimizer, type(optimizer).__name__
        self._frozen: list[Any] = []
        self._rates: list[Any] = []
        self._memory: list[Any] = []
        self._tensors: list[Tensor] = []
        """The tensors in `_memory`."""
        self._layouts: list[Any] = []
        """Their addresses and layouts, after the size of each parameter's state: a parameter may move to other memory
        (`parameter.data = ...`)."""
        self._steps = self._unchanged = 0
        self._counts: list[Tensor] = []
        self._on_device: list[Tensor] = []
        self._counted: list[int] = []
        self._on_host = HostCounts([])
        self._rates_on_device: list[Tensor] | None = None

    def forget(self) -> None:
        """Called when a captured graph no longer matches the step."""

    def before_replay(self) -> None:
        """Copies step counts that were loaded on the host to the device."""
        if self._on_device and self._counted != [count._version for count in self._counts]:
            # Loaded in place, as by TorchRec's load_state_dict.
            torch._foreach_copy_(self._on_device, self._counts)
            self._counted = [count._version for count in self._counts]

    def after_replay(self) -> None:
        """Counts the step on the host."""
        self._on_host.add_one()

    @property
    def is_scaled(self) -> bool:
        """Whether a GradScaler leaves the scaling to the optimizer."""
        optimizer: Any = self._optimizer
        return getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None

    def why_not_now(self) -> str | None:
        """Returns the obstacle to capturing this step; None without one."""
        return self._obstacle() or (CHANGED if self._unchanged < WARM_UP else None)

    def prepare(self) -> Callable[[], None]:
        """Returns a function that launches a step, with the memory and numbers found by the last look. It holds memory
        that a graph of it reads."""
        work = {Adagrad: self._adagrad, SGD: self._sgd}.get(type(self._optimizer), self._capturable)()
        self._on_host = HostCounts(self._counts)
        self._counted = [count._version for count in self._counts]
        return work

    def look(self) -> None:
        """Looks for changes, and calls `forget` if there are any. Must be called before every step, with its gradients
        in place."""
        self._steps += 1
        frozen: list[Any] = []
        rates: list[Any] = []
        parameters: list[Tensor] = []
        for group in self._optimizer.param_groups:
            parameters += group["params"]
            frozen += [value for name, value in group.items() if name not in _NOT_FROZEN]
            if "lr" in group:
                rates.append(_number(group["lr"]))
        states = _states_of(parameters, self._optimizer.state)
        memory: list[Any] = [*parameters]
        for state in states:
            memory += state.values()
        same = _identical(memory, self._memory)
        if not same:
            self._tensors = [value for value in memory if isinstance(value, Tensor)]
        grads = [*map(_GRAD, parameters)]  # for a slice of tables, a different view each time
        present = [grad for grad in grads if grad is not None]
        absent = map(is_, grads, repeat(None)) if len(present) < len(grads) else ()
        of_tensors = [*map(Tensor.data_ptr, self._tensors), *map(Tensor.stride, parameters)]
        layouts = [*map(len, states), *of_tensors, *map(Tensor.data_ptr, present), *absent]
        if not same or layouts != self._layouts or not _equal(frozen, self._frozen):
            self.forget()
            # Most optimizers create their state in the very first step.
            self._unchanged = 1 if self._steps == 2 and _equal(frozen, self._frozen) else 0
            self._frozen, self._memory, self._layouts, self._rates = frozen, memory, layouts, rates
            self._rates_on_device = None  # of the groups, and with the values, before the change
            return
        self._unchanged += 1
        if not _equal(rates, self._rates):
            self._rates = rates
            self._move_rates()

    def _move_rates(self) -> None:
        """Moves the learning rate to the device, because it alone has changed."""
        if self._rates_on_device is None:
            self.forget()
            device = next(parameter.device for group in self._optimizer.param_groups for parameter in group["params"])
            self._rates_on_device = [torch.zeros((), device=device) for _ in self._rates]
        for on_device, rate in zip(self._rates_on_device, self._rates, strict=True):
            on_device.fill_(rate)

    def _obstacle(self) -> str | None:
        """Returns the reason why a step cannot be captured."""
        if any(isinstance(value, Tensor) for value in self._frozen):
            return f"a hyperparameter of {self._kind} besides lr is a tensor, whose value may change unnoticed"
        if any(group.get("lr_decay") or group.get("differentiable") for group in self._optimizer.param_groups):
            return f"{self._kind} has lr_decay or differentiable set"
        if type(self._optimizer) is Adagrad and any(group["fused"] for group in self._optimizer.param_groups):
            return "Adagrad has fused set, which is for the CPU"
        if self.is_scaled:
            return f"a gradient scaler leaves the scaling to {self._kind}"
        used = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not used:
            return f"no parameter of {self._kind} has a gradient"
        for parameter in used:
            if any(not isinstance(value, Tensor | None) for value in self._optimizer.state.get(parameter, {}).values()):
                return f"{self._kind} keeps state that is no tensor, such as a step count that Python adds to"
        return None

    def _rate(self, index: int) -> Any:
        return self._rates[index] if self._rates_on_device is None else self._rates_on_device[index]

    def _used(self, group: dict[str, Any], *names: str) -> tuple[list[Any], ...]:
        """Returns parameters with gradients, the gradients, and their state of these names."""
        used = [p for p in group["params"] if p.grad is not None]
        of_names = ([self._optimizer.state.get(p, {}).get(name) for p in used] for name in names)
        return (used, [p.grad for p in used], *of_names)

    def _adagrad(self) -> Callable[[], None]:
        names = ("weight_decay", "eps", "maximize", "foreach", "lr_decay", "differentiable", "fused")
        updates: list[Callable[[], None]] = []
        self._counts, self._on_device = [], []
        for i, group in enumerate(self._optimizer.param_groups):
            used, grads, sums, counts = self._used(group, "sum", "step")
            values = {name: group[name] for name in names} | {"lr": self._rate(i)}
            if self._rates_on_device is not None and self._rates_on_device[i].is_cuda:
                # Tensor by tensor, as it updates slices of tables, torch reads the rate on the host.
                used, values["foreach"] = [parameter.detach() for parameter in used], True
            by_torch = partial(_adagrad_uncounted, used, grads, sums, counts, **values)
            updates.append(one_kernel(used, grads, sums, values) or by_torch)
            self._counts += counts

        def work() -> None:
            for update in updates:
                update()

        return work

    def _sgd(self) -> Callable[[], None]:
        names = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
        groups = []
        self._counts, self._on_device = [], []
        for i, group in enumerate(self._optimizer.param_groups):
            used, grads, buffers = self._used(group, "momentum_buffer")
            frozen = {name: group[name] for name in names} | {"lr": self._rate(i)}
            if self._rates_on_device is None:
                frozen |= {"foreach": group["foreach"], "fused": group["fused"]}
            groups.append((used, grads, buffers, frozen))
        run = sgd if self._rates_on_device is None else _sgd_by_device_rate

        def work() -> None:
            for parameters, grads, buffers, frozen in groups:
                run(parameters, grads, buffers, **frozen)

        return work

    def _capturable(self) -> Callable[[], None]:
        """Returns the optimizer's own step with its option `capturable`, which keeps all changing numbers on the
        device."""
        optimizer, twins = self._optimizer, dict[int, Tensor]()
        self._counts, self._on_device = [], []
        for group in optimizer.param_groups:
            on_device = group["capturable"] or group.get("fused")
            for parameter in () if on_device else self._used(group)[0]:
                count = optimizer.state.get(parameter, {}).get("step")
                if isinstance(count, Tensor) and count.device.type == "cpu":
                    # Kept as long as the graph, which increments them at every replay.
                    twins[id(parameter)] = count.to(parameter.device, copy=True)
                    self._on_device.append(twins[id(parameter)])
                    self._counts.append(count)
        step = type(optimizer).step

        def work() -> None:
            with self._as_capturable(twins):
                step(optimizer)

        return work

    @contextmanager
    def _as_capturable(self, twins: dict[int, Tensor]) -> Iterator[None]:
        """Gives the optimizer, within the block, what a capture needs: the option, and step counts and learning rates
        on the device. twins: the counts, by parameter's id."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        before = [(group["capturable"], group["lr"]) for group in groups]
        counts = [(p, state[p]["step"]) for group in groups for p in group["params"] if id(p) in twins]
        try:
            for i, group in enumerate(groups):
                group["capturable"], group["lr"] = True, self._rate(i)
            for parameter, _ in counts:
                state[parameter]["step"] = twins[id(parameter)]
            yield
        finally:
            for group, (capturable, rate) in zip(groups, before, strict=True):
                group["capturable"], group["lr"] = capturable, rate
            for parameter, count in counts:
                state[parameter]["step"] = count


class StepGraph(StepWork):
    """`step()` that replaces the optimizer's own, with the same effect."""

    def __init__(self, optimizer: Optimizer) -> None:
        """optimizer: one without an obstacle (why_never)."""
        super().__init__(optimizer)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: Callable[[], None] | None = None
        """The captured work, for the memory that it holds."""
        self._failure: str | None = None

    @property
    def captured(self) -> bool:
        """Whether the next step is replayed, if nothing has changed."""
        return self._graph is not None

    def step(self, eagerly: Callable[[], Any]) -> str | None:
        """Steps; returns why it ran eagerly, except in the very first steps. eagerly: the optimizer's own step."""
        self.look()
        if self.is_scaled:  # from this step on, or once
            self.forget()
        why: str | None = None
        if self._graph is None:
            why = self._failure or self.why_not_now() or self._capture()
        if self._graph is None:
            eagerly()
            return why if self._steps > WARM_UP else None
        self.before_replay()
        self._graph.replay()
        self.after_replay()
        return None

    def forget(self) -> None:
        """Destroys the graph."""
        if self._graph is not None:
            destroy([self._graph])
            self._graph = self._captured = None

    def _capture(self) -> str | None:
        """Captures without running anything on the GPU, or counting. If it fails, steps stay eager; returns why."""
        work = self.prepare()
        try:
            with torch.no_grad():
                self._graph, self._captured = record(work), work
        except Exception as error:
            self._failure = f"its capture failed: {type(error).__name__}: {error}"
        return self._failure


def _adagrad_uncounted(
    parameters: list[Tensor], grads: list[Tensor], sums: list[Tensor], counts: list[Tensor], **options: Any
) -> None:
    """Computes torch's adagrad without counting the step."""
    adagrad(parameters, grads, sums, [count.clone() for count in counts], **options)


def _sgd_by_device_rate(
    parameters: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    *,
    lr: Tensor,
    weight_decay: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Computes torch.optim.sgd.sgd, which itself would read the learning rate on the host."""
    if maximize:
        grads = list(torch._foreach_neg(grads))
    if weight_decay != 0:
        grads = list(torch._foreach_add(grads, parameters, alpha=weight_decay))
    if momentum != 0:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads, alpha=1 - dampening)
        grads = list(torch._foreach_add(grads, buffers, alpha=momentum)) if nesterov else buffers
    torch._foreach_add_(parameters, torch._foreach_mul(grads, -lr))


def _states_of(parameters: list[Tensor], state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Returns each parameter's state; empty where it has none."""
    if len(state) == len(parameters) and all(map(is_, state, parameters)):
        return [*state.values()]  # without look-ups, which call a tensor's __hash__, in Python
    return [state.get(parameter, {}) for parameter in parameters]


def _number(rate: Any) -> Any:
    """Returns a learning rate as a number, unless it is a tensor on the device."""
    return rate.item() if isinstance(rate, Tensor) and rate.device.type == "cpu" else rate


def _equal(one: list[Any], other: list[Any]) -> bool:
    """Compares tensors by identity, because their values are on the device."""
    return _identical(one, other) or (
        len(one) == len(other)
        and all(
            a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
            for a, b in zip(one, other, strict=True)
        )
    )


def _identical(one: list[Any], other: list[Any]) -> bool:
    """Whether lists hold the same objects; compared in C, as for most steps."""
    return len(one) == len(other) and all(map(is_, one, other))
