"""CUDA streams of the five stages, and the ranges by which profilers know them. On the CPU everything is in order."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


class StageStreams:
    """Side streams beside the caller's current one, which is not ours to choose."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.cuda = device, device.type == "cuda"
        # Small kernels that the next iteration waits for go before the large ones that this one fills the GPU with.
        priorities = {"copy": -1, "input_dist": -1, "dense_update": 0}
        self._side = {name: torch.cuda.Stream(device, priority=p) for name, p in priorities.items() if self.cuda}

    @contextmanager
    def on(self, name: str, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """What is launched within runs on side stream `name`, behind `after`."""
        if not self.cuda:
            yield
            return
        with torch.cuda.stream(self._side[name]):
            self.wait(after)
            yield

    def mark(self) -> torch.cuda.Event | None:
        """An event behind all that the current stream has been given."""
        return torch.cuda.current_stream(self._device).record_event() if self.cuda else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """The current stream goes on behind `event`."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def current(self) -> torch.cuda.Stream:
        """The current stream, for record_stream."""
        return torch.cuda.current_stream(self._device)


@contextmanager
def stage(name: str, device: torch.device) -> Iterator[None]:
    """A range of torch.profiler and, on a GPU, of NVTX."""
    with record_function(name):
        if device.type != "cuda":
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield
