"""CUDA streams of the five stages, and profiler ranges. On the CPU everything runs in order."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.profiler import record_function

LOOKUPS = tuple(f"lookup_{i}" for i in range(4))
"""Names of the side streams of FBGEMM's lookups, one for each of the first ones; see early_sorts.py."""


class StageStreams:
    """Side streams in addition to the caller's current stream."""

    def __init__(self, device: torch.device, records: bool = False) -> None:
        """records: whether `record` has an effect."""
        self._device, self.cuda = device, device.type == "cuda"
        self._records = records and self.cuda
        self._side = _side_streams(device) if self.cuda else {}

    def on(self, name: str, after: torch.cuda.Event | None = None) -> AbstractContextManager[None]:
        """Launches the body on side stream `name`, after `after`."""
        return _On(self._side[name], after) if self.cuda else nullcontext()

    def mark(self, name: str | None = None) -> torch.cuda.Event | None:
        """Records an event after all work launched on side stream `name`, or by default on the current stream."""
        if not self.cuda:
            return None
        return (self.current() if name is None else self._side[name]).record_event()

    def hold(self, name: str, after: torch.cuda.Event | None) -> None:
        """Makes side stream `name` wait for an event."""
        if after is not None:
            self._side[name].wait_event(after)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Makes the current stream wait for `event`."""
        if event is not None:
            self.current().wait_event(event)

    def record(self, *crossing: Any) -> None:
        """Tells the allocator that the current stream reads these batches or TorchRec objects."""
        if self._records:
            for one in crossing:
                one.record_stream(self.current())

    def stream(self, name: str) -> "torch.cuda.Stream | None":
        """Returns side stream `name`; None on the CPU."""
        return self._side.get(name)

    def current(self) -> torch.cuda.Stream:
        """Returns the current stream."""
        return torch.cuda.current_stream(self._device)


@cache
def _side_streams(device: torch.device) -> dict[str, torch.cuda.Stream]:
    """Returns the side streams, the same for all pipelines of a process: torch hands out 32 streams per priority in
    turn, and after these a new one would be shared with some communicator (see groups.own_group)."""
    # Small kernels that the next iteration waits for precede the large ones with which this iteration fills the GPU. So
    # does the dense part: the end of its backward runs beside the table update, and the dense update waits for it.
    priorities = {"copy": -1, "input_dist": -1, "dense": -1, "fetch": 0, "dense_update": 0, "iteration": 0}
    priorities |= dict.fromkeys(LOOKUPS, 0)
    return {name: torch.cuda.Stream(device, priority=priority) for name, priority in priorities.items()}


class _On:
    """A class, because a generator would take the host longer than switching the stream."""

    __slots__ = ("_after", "_context", "_stream")

    def __init__(self, stream: torch.cuda.Stream, after: torch.cuda.Event | None) -> None:
        self._stream, self._after, self._context = stream, after, torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._context.__enter__()
        if self._after is not None:
            self._stream.wait_event(self._after)

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class stage:  # noqa: N801 - a context manager, named as contextlib's
    """A range of torch.profiler and, on a GPU, of NVTX."""

    __slots__ = ("_cuda", "_name", "_recorded")

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._cuda = name, device.type == "cuda"
        self._recorded: record_function | None = None

    def __enter__(self) -> None:
        # record_function takes the host 10 us even without a profiler. The flag is for all threads, like profilers.
        if torch.autograd.profiler._is_profiler_enabled:
            self._recorded = record_function(self._name)
            self._recorded.__enter__()
        if self._cuda:
            torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *error: Any) -> None:
        if self._cuda:
            torch.cuda.nvtx.range_pop()
        if self._recorded is not None:
            self._recorded.__exit__(*error)
