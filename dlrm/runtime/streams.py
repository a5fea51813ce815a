"""Streams of an iteration as values, and what launches work on them.

A Stream says what it carries, a Branch is what one iteration has launched on it. Streams is what a benchmark's dense
stage is lent to launch on: the pipeline has the streams themselves, and decides when an iteration begins and ends.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch


class Priority(IntEnum):
    """CUDA priorities of streams, lower first: what everything waits for goes before what fills gaps."""

    CHAIN = -2
    WEIGHT_GRADIENTS = -1
    FILL = 0
    """The table update is bound by memory and leaves the multiprocessors to nobody; small kernels must not queue after
    it, nor those of a batch's first half after the second one's lookup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream that every iteration uses for the same work."""

    name: str
    """No other stream's."""
    carries: str
    """The work that is launched on it, in order."""
    priority: Priority = Priority.CHAIN


MAIN = Stream(
    name="main", carries="the chain of the first part of the batch, from its lookup to its gradients' exchange"
)
"""The stream that an iteration starts on, and that waits for all others at its end."""


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Everything launched on one stream in one iteration: a handle for later work to wait for."""

    name: str
    stream: "torch.cuda.Stream | None"
    """The CUDA stream; None where everything is in order anyway."""


class Streams(Protocol):
    """What work of one iteration is launched on."""

    def beside(self, stream: Stream, *after: Branch) -> AbstractContextManager[Branch]:
        """Launches what is inside on `stream`, after all launched so far on the current stream and on the branches
        `after`; gives its branch. MAIN is no side stream: what is inside stays on the current stream."""
        ...

    def on(self, branch: Branch) -> AbstractContextManager[Any]:
        """Launches what is inside on a branch, after nothing more than what is on it already."""
        ...

    def join(self, *branches: Branch) -> None:
        """Makes the current stream wait for branches."""
        ...
