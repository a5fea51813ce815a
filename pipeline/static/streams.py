"""The CUDA streams of an iteration of the static pipeline, and how far the host may run ahead of them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# CUDA priorities of streams, lower first. What everything waits for goes before what fills gaps. The table update is
# bound by memory and leaves the multiprocessors to nobody; small kernels must not queue behind it, nor those of a
# batch's first half behind the second one's lookup.
_HIGH = -2
_WEIGHT_GRADIENTS = -1
_LOW = {"input_dist": 0, "second lookup": 0, "tables": 0}
# Every so many iterations the host sleeps until the iteration as many before has ended. Further ahead it would gain
# nothing, and a launch that finds the GPU's queue full polls: a core at work for as long as the GPU is. A sleep costs
# CPU time, and so does its event: the interrupt takes the driver's event thread 35 us (host of an H200).
_RUN_AHEAD = 4
MAX_IN_FLIGHT = 2 * _RUN_AHEAD
"""Iterations that the host may have launched and that have not ended, the one that it launches next included."""


class IterationStreams:
    """The side streams of an iteration; on the CPU, or without overlap, everything is in order.

    A side stream comes into being when its name is first used; the stream "main" is the one that iterations are
    launched on.
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self._cuda = device.type == "cuda"
        self._overlap = self._cuda and overlap
        self._side: dict[str, torch.cuda.Stream] = {}
        self._forked: dict[str, torch.cuda.Stream] = {}
        self._iterations = 0
        self.main: torch.cuda.Stream | None = None
        if self._cuda:
            self.main = torch.cuda.Stream(priority=_HIGH)
            self._ended = torch.cuda.Event(blocking=True)  # on which the host sleeps instead of polling

    @contextmanager
    def beside(self, name: str, *after: str) -> Iterator[None]:
        """What is launched inside runs on side stream `name`, after all launched so far on the current stream, and on
        the side streams `after`, those of them that there are."""
        if not self._overlap or name == "main":
            yield
            return
        side = self._fork(name)
        side.wait_stream(torch.cuda.current_stream())
        for other in after:
            if other in self._forked:
                side.wait_stream(self._forked[other])
        with torch.cuda.stream(side):
            yield

    def on(self, name: str) -> AbstractContextManager[Any]:
        """What is launched inside goes on where side stream `name` is, which waits for nothing more."""
        return torch.cuda.stream(self._forked[name]) if name in self._forked else nullcontext()

    def join(self, name: str) -> None:
        """The current stream waits for side stream `name`."""
        if name in self._forked:
            torch.cuda.current_stream().wait_stream(self._forked[name])

    def join_all(self) -> None:
        """The current stream waits for every side stream that was used since the last call."""
        for side in self._forked.values():
            torch.cuda.current_stream().wait_stream(side)
        self._forked.clear()

    def _fork(self, name: str) -> torch.cuda.Stream:
        if name not in self._side:
            priority = _WEIGHT_GRADIENTS if name.endswith(" gradients") else _LOW.get(name, _HIGH)
            self._side[name] = torch.cuda.Stream(priority=priority)
        return self._forked.setdefault(name, self._side[name])

    def limit_run_ahead(self) -> None:
        """Every _RUN_AHEAD iterations the host waits for the one that it launched as many iterations ago."""
        if self._cuda and self._iterations % _RUN_AHEAD == 0:
            self._ended.synchronize()

    def end_iteration(self) -> None:
        """Marks the end of an iteration on the current stream, where it is one that the host will wait for."""
        if self._cuda and self._iterations % _RUN_AHEAD == 0:
            self._ended.record()
        self._iterations += 1
