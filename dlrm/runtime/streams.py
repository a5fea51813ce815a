"""Streams of an iteration as values, and the launch of work on them.

A Stream names its work, a Branch is the work of one iteration on it. A benchmark's dense stage launches on Streams: the
pipeline owns the CUDA streams, and decides when an iteration begins and ends.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch


class Priority(IntEnum):
    """CUDA priorities of streams, lower first: critical work runs before work that fills gaps."""

    CHAIN = -2
    WEIGHT_GRADIENTS = -1
    FILL = 0
    """Priority of the table update: it is memory-bound and occupies all multiprocessors; small kernels must not queue
    after it, nor those of a batch's first half after the second half's lookup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream that every iteration uses for the same work."""

    name: str
    """Unique name."""
    carries: str
    """The work that is launched on it, in order."""
    priority: Priority = Priority.CHAIN


MAIN = Stream(
    name="main", carries="the chain of the first part of the batch, from its lookup to its gradients' exchange"
)
"""The stream on which an iteration starts, and that waits for all others at its end."""


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Everything launched on one stream in one iteration: a handle for later work to wait for."""

    name: str
    stream: "torch.cuda.Stream | None"
    """The CUDA stream; None if all work is in order anyway."""


class Streams(Protocol):
    """The streams on which an iteration's work is launched."""

    def beside(self, stream: Stream, *after: Branch) -> AbstractContextManager[Branch]:
        """Launches the body on `stream`, after all work so far on the current stream and on the branches `after`;
        yields its branch. For MAIN, which is not a side stream, the body stays on the current stream."""
        ...

    def on(self, branch: Branch) -> AbstractContextManager[Any]:
        """Launches the body on a branch, after only its earlier work."""
        ...

    def join(self, *branches: Branch) -> None:
        """Makes the current stream wait for branches."""
        ...
