"""The learning rates of fused tables in graphs of whole iterations: FBGEMM reads them on the host, at every lookup.

FBGEMM also reads the steps for Adam's update on the host: both may be arguments of one kernel, and are changed
together.
"""

from collections.abc import Sequence
from typing import Any

import torch

from . import reasons
from .node_parameters import MarkedArguments, int_marks, keeps_graphs, marks
from .table_steps import TableSteps

CAPTURES_IN_A_ROW = 4
"""Number of consecutive iterations with changed rates for which graphs are captured again, if that is needed."""


class TableRates:
    """Follows the rates of FBGEMM's kernels, and their steps, by changing their arguments in the captured graphs, or,
    if CUDA or torch does not support that, follows the rates by a new capture."""

    def __init__(self, kernels: Sequence[Any]) -> None:
        self._kernels = list(kernels)
        self._steps = TableSteps(kernels)
        self._counted: list[int] = []
        self._marks, self._step_marks = marks(len(self._kernels)), int_marks(len(self._steps))
        self._can_mark = bool(self._kernels) and keeps_graphs()
        self._marking = False
        self._rates: list[float] = []
        self._marked: dict[torch.cuda.CUDAGraph, MarkedArguments] = {}
        self._brought: dict[torch.cuda.CUDAGraph, list[float | int]] = {}
        self._moved_in_a_row = 0
        self.on_all_ranks = True
        """Whether every rank has kernels whose rates it follows, so that all ranks see the same changes."""
        self.failure: str | None = None
        """Reason why graphs cannot follow the rates, on all ranks; None if they can. A rank without kernels would
        replay the collectives that the others launch when they capture again for a change."""

    @property
    def followed(self) -> bool:
        """Whether captured graphs follow other rates without a new capture."""
        return bool(self._marked) or not self._kernels

    def begin_capture(self) -> bool:
        """Stores the rates, which captured graphs also contain, and the steps, which a capture counts although it runs
        nothing; returns whether to keep graphs so that they can be changed later."""
        self._rates, self._counted, self._marking = self._now(), self._steps.counted, self._can_mark
        return self._marking

    def mark(self) -> None:
        """Replaces the rates and steps by marks; called in a capture, before the lookups."""
        if self._marking:
            self._fill(self._marks)
            self._steps.set([mark - 1 for mark in self._step_marks])

    def end_capture(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> bool:
        """Restores the rates and steps. graphs: those captured since the beginning. Returns False if a mark has reached
        no kernel: drop all graphs and capture again, then without marks. RuntimeError in that case if some kernel
        receives its step, because no graph can then be left unchanged."""
        self._fill(self._rates)
        self._steps.set(self._counted)
        if not (self._marking and graphs):
            return True
        self._marking = False
        of = [*self._marks, *self._step_marks]
        marked = {graph: MarkedArguments(graph, of) for graph in graphs}
        self._can_mark = all(len(arguments.found) == len(of) for arguments in marked.values())
        if self._can_mark:
            self._marked |= marked
        elif len(self._steps):
            raise RuntimeError("the step or the rate of a fused update has come to none of the captured kernels")
        return self._can_mark

    def dropped(self) -> None:
        """Forgets the captured graphs, which are destroyed."""
        self._marked.clear()
        self._brought.clear()

    def are_as_before(self) -> bool:
        """Returns whether the lookups' rates are unchanged since the last look."""
        return self._now() == self._rates

    def follow(self) -> bool:
        """Reads the current rates, for `bring`; returns False if graphs must be captured again for them."""
        rates = self._now()
        moved, self._rates = rates != self._rates, rates
        if self._marked:
            return True
        self._moved_in_a_row = self._moved_in_a_row + 1 if moved else 0
        if self._moved_in_a_row >= CAPTURES_IN_A_ROW and self.on_all_ranks:
            self.failure = reasons.RATE_MOVES(steps=CAPTURES_IN_A_ROW)
        return not moved

    def bring(self, graph: torch.cuda.CUDAGraph) -> None:
        """Writes the rates and the next steps to a graph, before each of its replays, and counts the steps: of many
        graphs, only the replayed ones need them."""
        if graph not in self._marked:
            return
        steps = [count + 1 for count in self._steps.counted]
        if self._brought.get(graph) != (now := [*self._rates, *steps]):
            self._marked[graph].set(now)
            self._brought[graph] = now
        self._steps.set(steps)

    def _now(self) -> list[float]:
        return [kernel.learning_rate_tensor.item() for kernel in self._kernels]

    def _fill(self, rates: Sequence[float]) -> None:
        for kernel, rate in zip(self._kernels, rates, strict=True):
            kernel.learning_rate_tensor.fill_(rate)
