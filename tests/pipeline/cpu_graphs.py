"""Graphs on the CPU, for tests of what is around a capture."""

import linecache
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dlrm_bench.pipeline.five_stage.captured
import dlrm_bench.pipeline.five_stage.dense_graph
import dlrm_bench.pipeline.five_stage.iteration_graph
import dlrm_bench.pipeline.five_stage.iteration_obstacles
import dlrm_bench.pipeline.five_stage.pipeline
import dlrm_bench.pipeline.five_stage.table_rates
import dlrm_bench.pipeline.static.graphs
import dlrm_bench.pipeline.static.pipeline
import dlrm_bench.pipeline.static_sequences.pipeline
from dlrm_bench.pipeline.static.fetch import BatchFetcher


class Replayed:
    """Stands for a graph: replays by running."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work

    def reset(self) -> None:
        """There is nothing to free."""


class Unread(TorchDispatchMode):
    """Stands for a graph: replays by running, and asserts that no operator asks the device or copies from the host's
    pageable memory. Plain functions of kernels may: a GPU runs the kernels."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def replay(self) -> None:
        with self:
            self._work()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator)
        masks = "aten.index" in name and any(of.dtype == torch.bool for of in _indices(args))
        if masks or name in _READS or name in _MADE_OF_ANY_SIZE:
            assert in_plain_function(), f"{name}: the host reads, or copies, within a graph"
        return operator(*args, **(kwargs or {}))

    def reset(self) -> None:
        """There is nothing to free."""


def capture_on_cpu(
    fails: Callable[[], bool] = lambda: False, graph: Callable[[Callable[[], None]], Replayed | Unread] = Replayed
) -> None:
    """In this process. Capturing runs nothing, or, where `fails`, runs until something raises, and fetches no batch:
    a capture that fails runs nothing, and fetches count. graph: what replays."""

    def record(work: Callable[[], None], watch: Any, *_: Any) -> Replayed | Unread:
        if fails():
            with watch, patch.object(BatchFetcher, "fetch", lambda *_: None):
                work()
        return graph(work)

    for module in (dlrm_bench.pipeline.static.pipeline, dlrm_bench.pipeline.static_sequences.pipeline):
        module.check_device = lambda *_: None  # type: ignore[assignment]
    dlrm_bench.pipeline.static.graphs.record = record  # type: ignore[assignment]


class Rerun(TorchDispatchMode):
    """Stands for a graph: replays the operators that `work` calls, on the memory that it has called them with.

    A capture runs nothing: what `work` changes in place, on inputs that nobody has filled yet, is as before after it.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        random = torch.get_rng_state()
        with self:
            work()
        torch.set_rng_state(random)
        for changed, before in self._before.values():
            changed.data.copy_(before)
        self._before.clear()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True: compiled parts stay compiled."""
        return True

    def _keep(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Keeps what the operator is going to change."""
        for i, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, Tensor) and id(tensor) not in self._before:
                        self._before[id(tensor)] = tensor, tensor.detach().clone()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._keep(operator, args, kwargs or {})
        result = operator(*args, **(kwargs or {}))
        self._calls.append((operator, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for operator, args, kwargs, result in self._calls:
                again = operator(*args, **kwargs)
                for was, now in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                    if hasattr(now, "wait"):  # of a collective: what called it waited, which is no operator
                        now.wait()
                    elif isinstance(was, Tensor) and was.data_ptr() != now.data_ptr():
                        was.copy_(now)

    def reset(self) -> None:
        """There is nothing to free."""


def dense_graph_on_cpu() -> None:
    """In this process: the dense part is captured."""

    def record(work: Callable[[], None], **_: Any) -> Replayed | Rerun:
        return Replayed(work) if work.__name__ == "mean" else Rerun(work)  # a collective has no memory to be frozen

    dlrm_bench.pipeline.five_stage.pipeline.why_not_graphed = lambda *_: None
    dlrm_bench.pipeline.five_stage.dense_graph.captures = lambda device: True  # type: ignore[assignment]
    dlrm_bench.pipeline.five_stage.dense_graph.record = record  # type: ignore[assignment]
    dlrm_bench.pipeline.five_stage.captured.record = record  # type: ignore[assignment]


class Checked(TorchDispatchMode):
    """Stands for the graph of an iteration: replays by running, and asserts that a graph would do the same.

    Nothing may be read by the host, and every run has to launch the same operators, on the same memory as the first
    one, but for what it makes itself.
    """

    replaying = False
    """Whether one is: a GPU runs no Python then, and has run what `work` does in a capture."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._first: list[tuple[Any, ...]] = []
        self._calls: list[tuple[Any, ...]] = []
        self._made: dict[int, Any] = {}
        self.replays = 0

    def replay(self) -> None:
        with self, patch.object(Checked, "replaying", True):
            self._work()
        self._made.clear()
        if not self.replays:
            self._first = self._calls
        assert self._calls == self._first, next(
            pair for pair in zip(self._calls, self._first, strict=False) if pair[0] != pair[1]
        )
        self._calls, self.replays = [], self.replays + 1

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator)
        if name in _READS:
            assert _counts_steps(), f"{name}: the host reads within a graph"
        tensors = [of for of in pytree.tree_leaves((args, kwargs)) if isinstance(of, Tensor)]
        given = {of.untyped_storage().data_ptr() for of in tensors}
        outside = [(of.data_ptr(), of.shape, of.stride()) for of in tensors if not self._is_made(of)]
        if outside and _in_wait():
            outside = []
        self._calls.append((name, *outside))
        result = operator(*args, **(kwargs or {}))
        for of in pytree.tree_leaves(result):
            if isinstance(of, Tensor) and of.untyped_storage().data_ptr() not in given:
                self._made[of.untyped_storage().data_ptr()] = of  # kept, so that its memory is not another's
        return result

    def _is_made(self, of: Tensor) -> bool:
        """Whether this run has made it; what FBGEMM's lookups give comes from no operator that is seen here."""
        return of.numel() == 0 or of.grad_fn is not None or of.untyped_storage().data_ptr() in self._made

    def reset(self) -> None:
        """There is nothing to free."""


_READS = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.nonzero.default", "aten.is_nonzero.default")


_MADE_OF_ANY_SIZE = (
    "aten.masked_select.default",
    "aten.repeat_interleave.Tensor",
    "aten.unique_consecutive.default",
    "aten._unique2.default",
    "aten.lift_fresh.default",
)
"""Operators whose results have a size that the host reads; the last one makes a tensor of the host's numbers."""


def _indices(args: Any) -> list[Any]:
    return (
        [of for of in args[1] if isinstance(of, Tensor)] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    )


def in_plain_function() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if "/kernels/" in frame.f_code.co_filename and frame.f_code.co_name.startswith("plain"):
            return True
        frame = frame.f_back
    return False


def _in_wait() -> bool:
    """Whether a collective is waited for: gloo's reduce-scatter then copies from memory of its own."""
    frame: Any = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip().endswith("req.wait()")


def _counts_steps() -> bool:
    """Whether FBGEMM reads, which has its step counts on the host, or an optimizer, which on CPUs asks for numbers that
    its kernels for GPUs read themselves."""
    frame: Any = sys._getframe(2)
    while frame is not None and "torch/" in frame.f_code.co_filename:
        if "torch/optim/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return frame is not None and "fbgemm_gpu" in frame.f_code.co_filename


class Numbered(Checked):
    """One whose kernels have their own rates and steps, as of the capture or as set since. Its replays leave those of
    the host as they are, as they run no Python."""

    def __init__(self, work: Any) -> None:
        super().__init__(work)
        self._rates = work.func.__self__._rates
        self.numbers: list[Any] = []

    def replay(self) -> None:
        rates, steps = self._rates, self._rates._steps
        before, counted = rates._now(), steps.counted

        def put() -> None:
            rates._fill(self.numbers[: len(before)])
            steps.set([step - 1 for step in self.numbers[len(before) :]])

        with patch.object(rates, "mark", put):  # where a capture has put marks
            super().replay()
        rates._fill(before)
        steps.set(counted)


class Numbers:
    """Stands for MarkedArguments."""

    def __init__(self, graph: Numbered, of: list[Any]) -> None:
        self._graph, self.found = graph, set(range(len(of)))
        self.set(of)

    def set(self, values: list[Any]) -> None:
        self._graph.numbers = list(values)


def iteration_graph_on_cpu(numbered: bool = False) -> list[Checked]:
    """In this process: whole iterations are captured. Returns the graphs. numbered: they have nodes to be changed."""
    graphs: list[Checked] = []

    def record(work: Callable[[], None], **_: Any) -> Checked:
        graphs.append(Numbered(work) if numbered else Checked(work))
        return graphs[-1]

    if numbered:
        for module in (
            dlrm_bench.pipeline.five_stage.iteration_obstacles,
            dlrm_bench.pipeline.five_stage.table_rates,
        ):
            module.keeps_graphs = lambda: True
        dlrm_bench.pipeline.five_stage.table_rates.MarkedArguments = Numbers  # type: ignore[assignment,misc]
    dlrm_bench.pipeline.five_stage.pipeline.why_not_graphed = lambda *_: None
    dlrm_bench.pipeline.five_stage.iteration_graph.record = record  # type: ignore[assignment]
    sys.modules["torch.optim.adam"]._get_capturable_supported_devices = lambda *_, **__: ["cpu"]  # type: ignore[attr-defined]
    return graphs
