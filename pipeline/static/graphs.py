"""Work captured as CUDA graphs and replayed; the error of a failed capture names the op and its stage."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm_bench.dlrm.runtime.ranks import Ranks
from dlrm_bench.pipeline.five_stage.cuda_graph import destroy, record


class Pool:
    """Memory shared by graphs that run one after another: no graph may need its own tensors after another has run, and
    results that outlive a replay must be in memory outside the pool.

    The memory stays as large as the graphs needed it, until all of them are destroyed.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs = 0

    def handle(self) -> Any:
        """The pool for torch.cuda.graph: a new one if no graph is left."""
        if self._graphs == 0 and torch.cuda.is_initialized():
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def count(self, graphs: int) -> None:
        """Adds to the number of graphs: captured ones, or if negative, destroyed ones."""
        self._graphs += graphs
        assert self._graphs >= 0


class Graphs:
    """Functions that each run as one CUDA graph; all of them are captured before the first one runs, and a function
    added later before it runs."""

    def __init__(
        self,
        name: str,
        works: Sequence[Callable[[], None]],
        ranks: Ranks,
        stream: "torch.cuda.Stream | None",
        fallback: bool,
        pool: Pool | None = None,
    ) -> None:
        """name: of all of them, for messages. stream: the capturing stream. fallback: run the functions eagerly after a
        failed capture; otherwise a failure is an error. pool: default is a separate pool for these graphs."""
        self._name, self._works, self._ranks, self._stream = name, list(works), ranks, stream
        self._fallback = fallback
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = pool or Pool()
        self.captures = 0
        """Number of captures of the functions."""
        self.fell_back: str | None = None
        """Reason why the functions run eagerly; None if they do not."""

    def add(self, work: Callable[[], None]) -> int:
        """Adds a function; returns its number."""
        self._works.append(work)
        return len(self._works) - 1

    def run(self, i: int) -> None:
        """Runs function i by replay; captures it first if necessary."""
        self.capture()
        if self._graphs:
            self._graphs[i].replay()
        else:
            self._works[i]()

    def capture(self, attempt: bool = False) -> bool:
        """Captures all functions that are not yet captured, without running anything; collective in that case. Returns
        whether all are captured.

        RuntimeError, on every rank, if the capture fails on any rank and fallback is off. attempt: if the capture
        fails, there is no error and no fallback; all functions are forgotten.
        """
        if len(self._graphs) == len(self._works):
            return True
        return self.fell_back is None and self._capture(attempt)

    def forget(self, why: str) -> None:
        """Makes the next run capture again, if the functions were captured; rank 0 prints a message."""
        if not self._graphs:
            return
        self.close()
        if self._ranks.rank == 0:
            print(f"{why}: the {self._name} is captured again", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Destroys the graphs and forgets the functions."""
        self.close()
        self._works.clear()

    def close(self) -> None:
        """Destroys the graphs."""
        self._destroy(self._graphs)
        self._graphs.clear()

    def _destroy(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        destroy(graphs)
        self._pool.count(-len(graphs))

    def describe(self) -> dict[str, Any]:
        """Returns the graphs' facts for the record."""
        return {"captures": self.captures, "fell_back": self.fell_back}

    def _capture(self, attempt: bool) -> bool:
        graphs, own, error = [], None, None
        for work in self._works[len(self._graphs) :]:
            watch = _Watch(self._name)
            try:
                graphs.append(record(work, watch, self._pool.handle(), self._stream))
                self._pool.count(1)
            except Exception as caught:
                own, error = watch.says(caught) + _memory_left(self._ranks), caught
                break
        failures: list[str | None] = [None] * self._ranks.world_size
        dist.all_gather_object(failures, own)
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if not failed:
            self._graphs += graphs
            self.captures += 1
            return True
        self._destroy(graphs)
        # The lowest failing rank's, so that all ranks raise the same error.
        reason = f"{self._name} cannot be captured: {failures[failed[0]]} (on {len(failed)} rank(s), first {failed[0]})"
        if attempt:
            self.clear()
            return False
        if not self._fallback:
            raise RuntimeError(
                f"--cuda-graph iteration: {reason}; choose --cuda-graph none, or --cuda-graph try to continue eagerly"
            ) from error
        self.fell_back = reason
        self.close()  # all functions run eagerly from now on
        del error, watch  # their tracebacks hold the tensors of the failed capture
        if self._ranks.rank == 0:
            print(f"--cuda-graph try: {reason}; it runs eagerly", file=sys.stderr, flush=True)
        return False


def _memory_left(ranks: Ranks) -> str:
    """Returns the GPU's free memory, for a message: a capture that runs out of memory may end with another error."""
    if ranks.device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(ranks.device)
    return f" ({free / 1e9:.1f} of {total / 1e9:.1f} GB of the GPU's memory were free)"


class _Watch(TorchDispatchMode):
    """Remembers the last op, the record_function range around it, and the first error that an op raised.

    The mode is active during a graph's capture, but not during its replay. Backward passes pass it on to autograd's
    threads. Triton kernels are not dispatcher ops: their errors are reported as after the last op.
    """

    def __init__(self, outside: str) -> None:
        """outside: the name for code outside all ranges."""
        super().__init__()
        self._ranges = [outside]
        self._last: str | None = None
        self._error: Exception | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name == "profiler::_record_function_enter_new":
            self._ranges.append(args[0])
        elif name.startswith("profiler::_record_function_exit"):
            self._ranges.pop()
        elif self._error is None:
            self._last = f"{name} in {self._ranges[-1]}"
            try:
                return func(*args, **kwargs or {})
            except Exception as error:
                self._error = error
                raise
        return func(*args, **kwargs or {})

    def says(self, error: Exception) -> str:
        """Returns the location of `error`, which ended the capture, and its first line, or the op's own error if there
        was one."""
        where = f"at {self._last}" if self._error else f"after {self._last}" if self._last else "before any op"
        first = self._error or error
        return f"{where}: {type(first).__name__}: {(str(first).splitlines() or [''])[0]}"
