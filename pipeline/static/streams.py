"""The CUDA streams of an iteration of the static pipeline, and the limit on how far the host runs ahead of them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from dlrm_bench.dlrm.runtime.streams import MAIN, Branch, Priority, Stream

# Every _RUN_AHEAD iterations the host sleeps until the iteration launched that many iterations ago has ended. Running
# further ahead would gain nothing, and a launch that finds the GPU's queue full polls, which keeps a core busy as long
# as the GPU. A sleep costs CPU time, and so does its event: the interrupt takes the driver's event thread 35 us (host
# of an H200).
_RUN_AHEAD = 4
MAX_IN_FLIGHT = 2 * _RUN_AHEAD
"""Maximum number of iterations that the host has launched and that have not ended, including the next one."""


class IterationStreams:
    """The streams of an iteration; on the CPU, or without overlap, all work runs in order.

    A CUDA stream is created when its Stream is first used, and serves all iterations. Dependencies are between the
    branches that `beside` yields; waiting for any other branch is an error, on any device.
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self._cuda = device.type == "cuda"
        self._overlap = self._cuda and overlap
        self._side: dict[Stream, torch.cuda.Stream] = {}
        self._branches: dict[str, Branch] = {}
        """The branches of the iteration being launched, by name."""
        self._iterations = 0
        self.main: torch.cuda.Stream | None = None
        """The stream that captures iterations."""
        if self._cuda:
            self.main = torch.cuda.Stream(priority=Priority.CHAIN)
            self._ended = torch.cuda.Event(blocking=True)  # the host sleeps on it instead of polling

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Launches an iteration from the current stream, its MAIN branch, which waits for all others at the end."""
        main = Branch(MAIN.name, torch.cuda.current_stream() if self._overlap else None)
        self._branches = {MAIN.name: main}
        try:
            yield
            for branch in self._branches.values():
                self.join(branch)
        finally:
            self._branches = {}

    @contextmanager
    def beside(self, stream: Stream, *after: Branch) -> Iterator[Branch]:
        """See dlrm_bench.dlrm.runtime.streams.Streams."""
        self._check(*after)
        assert self._branches, "side streams exist only within an iteration"
        if stream == MAIN:
            yield self._branches[MAIN.name]
            return
        branch = self._branches.get(stream.name) or Branch(stream.name, self._stream(stream))
        self._branches[stream.name] = branch
        if branch.stream is None:
            yield branch
            return
        current = torch.cuda.current_stream()
        branch.stream.wait_stream(current)
        for other in after:
            if other.stream is not None and other.stream != current:
                branch.stream.wait_stream(other.stream)
        with torch.cuda.stream(branch.stream):
            yield branch

    def on(self, branch: Branch) -> AbstractContextManager[Any]:
        """See dlrm_bench.dlrm.runtime.streams.Streams."""
        self._check(branch)
        return nullcontext() if branch.stream is None else torch.cuda.stream(branch.stream)

    def join(self, *branches: Branch) -> None:
        """See dlrm_bench.dlrm.runtime.streams.Streams."""
        self._check(*branches)
        for branch in branches:
            if branch.stream is not None and branch.stream != torch.cuda.current_stream():
                torch.cuda.current_stream().wait_stream(branch.stream)

    def _check(self, *branches: Branch) -> None:
        for branch in branches:
            known = isinstance(branch, Branch) and self._branches.get(branch.name) is branch
            assert known, f"{branch!r} is not a branch of this iteration"

    def _stream(self, stream: Stream) -> "torch.cuda.Stream | None":
        if not self._overlap:
            return None
        if stream not in self._side:
            self._side[stream] = torch.cuda.Stream(priority=stream.priority)
        return self._side[stream]

    @contextmanager
    def as_captured(self) -> Iterator[None]:
        """Launches eagerly on the stream that captures iterations, in order with the current stream. Autograd waits for
        the stream on which a weight was first used while its graph is still alive, and a capture may wait for no stream
        but its own."""
        if self.main is None:
            yield
            return
        current = torch.cuda.current_stream()
        self.main.wait_stream(current)
        with torch.cuda.stream(self.main):
            yield
        current.wait_stream(self.main)

    def limit_run_ahead(self) -> None:
        """Makes the host wait, every _RUN_AHEAD iterations, for the iteration launched _RUN_AHEAD iterations ago."""
        if self._cuda and self._iterations % _RUN_AHEAD == 0:
            self._ended.synchronize()

    def end_iteration(self) -> None:
        """Marks the end of an iteration on the current stream, if the host will wait for it."""
        if self._cuda and self._iterations % _RUN_AHEAD == 0:
            self._ended.record()
        self._iterations += 1
