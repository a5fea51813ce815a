"""CUDA graphs: capture, destruction, and functions of one tensor that are replayed as one."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

_CAPTURING = threading.Lock()
_EAGER_CALLS = 1
"""Number of calls before the capture, in which NCCL initializes itself, which it cannot do during a capture."""


def record(
    work: Callable[[], None],
    watch: AbstractContextManager[Any] | None = None,
    pool: Any = None,
    stream: "torch.cuda.Stream | None" = None,
    keep: bool = False,
    change: Callable[[torch.cuda.CUDAGraph], None] | None = None,
) -> torch.cuda.CUDAGraph:
    """Returns the graph of the launches of `work` on `stream`, under `watch`; runs nothing on the GPU. keep: keeps the
    nodes, so that they can be changed; the instantiated ones later, and with `change` before. Raises torch's error if
    the capture fails; the device, the current stream and the random numbers are then as before. Threads capture one
    after another."""
    graph, pool, device = (
        torch.cuda.CUDAGraph(keep_graph=keep),
        pool or torch.cuda.graph_pool_handle(),
        torch.cuda.current_device(),
    )
    generator = torch.cuda.default_generators[device]
    before = generator.clone_state()
    # torch.cuda.graph leaves its stream current if the end of the capture raises.
    with _CAPTURING, _no_collections(), torch.cuda.stream(torch.cuda.current_stream()):
        try:
            capturing = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with capturing, watch or nullcontext():
                work()
        except Exception:  # raised again below
            # Where cudaStreamEndCapture fails, CUDAGraph::capture_end skips this, and CUDAGraph::reset the release.
            torch.cuda.synchronize()
            with suppress(RuntimeError):  # the end did not fail: `work` itself raised, in a valid capture
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)
                generator.graphsafe_set_state(before)
            raise
    if keep:
        if change is not None:
            change(graph)
        graph.instantiate()
    return graph


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keeps Python from collecting cycles. These may hold CUDA memory, such as those of a closed pipeline, and a thread
    that captures must not unregister memory."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def destroy(graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
    """Destroys graphs once no replay uses their memory any more."""
    if graphs and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for graph in graphs:
        graph.reset()


def captures(device: torch.device) -> bool:
    """Returns whether CUDA graphs can be captured on this device."""
    return device.type == "cuda"


class GraphedFunction:
    """A function of one tensor that is replayed as a CUDA graph, including its collectives.

    The argument is copied into the graph's memory and the results are copied out, so callers get the same as from a
    plain call: new tensors of the current stream. An argument with a shape or dtype other than the captured one runs
    plainly, and so do all calls on the CPU and within another capture. One call at a time.

    If it contains collectives, the ranks agree on the capture: NCCL forbids some ranks to replay a collective that
    others launch, so all ranks run plainly if one cannot capture.
    """

    def __init__(
        self, function: Callable[[Tensor], tuple[Tensor, ...]], name: str, group: dist.ProcessGroup | None
    ) -> None:
        """function: its results must depend only on the argument and on memory that stays. name: for messages. group:
        of its collectives, on whose ranks calls have the same shapes and dtypes; None without collectives."""
        self._function, self._name, self._group = function, name, group
        self._calls, self._closed = 0, False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._argument: Tensor | None = None
        self._results: tuple[Tensor, ...] = ()
        self._stream: torch.cuda.Stream | None = None
        self.failure: str | None = None
        """Reason why the function could not be captured and runs plainly; None if there is none."""

    def __call__(self, argument: Tensor) -> tuple[Tensor, ...]:
        """Returns the function's results. The capturing call reads the device, once, if there is a group."""
        if argument.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._function(argument)  # into the graph that is being captured
        if self._graph is None and self.failure is None and not self._closed and captures(argument.device):
            self._capture(argument)
        if self._graph is None or self._argument is None or not _alike(argument, self._argument):
            return self._function(argument)
        stream = torch.cuda.current_stream(argument.device)
        if self._stream is not None and stream != self._stream:  # that stream may still use the graph's memory
            stream.wait_stream(self._stream)
        self._stream = stream
        with torch.no_grad():
            self._argument.copy_(argument)
            self._graph.replay()
            return tuple(result.clone() for result in self._results)

    def describe(self) -> dict[str, Any]:
        """Returns, for the record, its name, whether it is replayed, and why it could not be captured."""
        return {"name": self._name, "replayed": self._graph is not None, "failure": self.failure}

    def close(self) -> None:
        """Destroys the graph; later calls run plainly."""
        if self._graph is not None:
            destroy([self._graph])
        self._graph, self._argument, self._results, self._closed = None, None, (), True

    def _capture(self, argument: Tensor) -> None:
        self._calls += 1
        if self._calls <= _EAGER_CALLS:
            return
        # Memory that stays; also makes a plain block of a tensor that autograd passes in any layout.
        of_graph = torch.empty(argument.shape, dtype=argument.dtype, device=argument.device)
        results: list[tuple[Tensor, ...]] = []
        try:
            with torch.no_grad():
                graph = record(lambda: results.append(self._function(of_graph)))
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
        if self._any_failed(argument.device):
            if self.failure is None:
                destroy([graph])
                self.failure = "another rank could not capture it"
            logger.warning("%s cannot be captured and runs eagerly: %s", self._name, self.failure)
            return
        self._graph, self._argument, (self._results,) = graph, of_graph, results

    def _any_failed(self, device: torch.device) -> bool:
        """Whether the capture failed on any rank of the group. Collective over it."""
        if self._group is None or self._group.size() == 1:
            return self.failure is not None
        failed = torch.tensor(float(self.failure is not None), device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
        return bool(failed.item())


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
