"""The choice of a batch's graph: one for each form that repeats, with a capacity for tokens, bounded in number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batch_signature import Form
from .captured import Captured, Room, Run
from .embedding_outputs import EmbeddingOutputs

WARM_UP = 3
"""Batches that run eagerly before the first capture, in which cuBLAS and the autograd thread initialize themselves."""
MOST_GRAPHS = 16
"""Maximum number of graphs, over all forms and numbers of tokens."""
_MOST_FORMS = 256  # that are distinguished; forms that do not recur are forgotten
_WASTE = 1.25  # maximum ratio of a graph's capacity to the batch's tokens, as long as another may be captured
_WASTE_LATER = 2.0  # the same after half of all graphs are captured: the rest are for batches that fit none
_STEPS = 8  # number of capacities between a power of two and the next
_LEAST_STEP = 32  # tokens: their computation takes a GPU no noticeable time


class Plan(NamedTuple):
    """Plan for a batch that no graph has captured."""

    rows: list[int] | None
    """The capacity of a graph to rehearse or to capture, for each of the outputs' values."""
    eager: str | None
    """Reason why it runs eagerly; None if its form only has to recur first."""


@dataclass(slots=True)
class _OfForm:
    seen: int = 0
    most: list[int] = field(default_factory=list)
    least: list[int] = field(default_factory=list)
    graphs: list[Captured] = field(default_factory=list)
    never_pads: str | None = None


class GraphPool:
    """The graphs of a dense part. They share their memory and that of their inputs, because only one is replayed at a
    time and its memory is not read after the next replay."""

    def __init__(self) -> None:
        self._forms: dict[Form, _OfForm] = {}
        self._batches = self._count = 0
        self._memory: Any = None
        self._rooms: dict[tuple[Any, ...], Room] = {}

    def __len__(self) -> int:
        """Returns the number of graphs, with those that are only rehearsed."""
        return self._count

    def graphs(self) -> list[torch.cuda.CUDAGraph]:
        """Returns all graphs that are captured."""
        of_forms = (captured.graph for of in self._forms.values() for captured in of.graphs)
        return [graph for graph in of_forms if graph is not None]

    def clear(self, but: Captured | None = None) -> None:
        """Drops all graphs, which the caller has destroyed, and their memory. Forms that recur get new graphs. but: a
        rehearsed graph that stays."""
        for of in self._forms.values():
            of.graphs = [graph for graph in of.graphs if graph is but]
        if but is None:
            self._rooms.clear()
        self._count = sum(len(of.graphs) for of in self._forms.values())
        self._memory = None  # torch does not reuse a pool that has lost all its graphs

    def asks_for_padding(self, form: Form, counts: Sequence[int]) -> bool:
        """Returns whether a batch of this form has other numbers of tokens than earlier ones."""
        of = self._forms.get(form)
        return of is not None and of.most != [] and (of.most != list(counts) or of.least != list(counts))

    def never_pad(self, form: Form, why: str) -> None:
        """Restricts replays of batches of this form to exactly the captured numbers of tokens."""
        self._forms[form].never_pads = why

    def find(
        self, form: Form, counts: Sequence[int], jagged: Sequence[bool], pads: bool
    ) -> tuple[Captured | None, Plan]:
        """Returns the graph for a batch, or how to run it without one; a plan with rows for one that is only rehearsed.
        pads: whether the batch may be padded with tokens."""
        of = self._forms.get(form)
        if of is None:
            self._forget()
            of = self._forms[form] = _OfForm(most=list(counts), least=list(counts))
        of.seen += 1
        self._batches += 1
        exact = of.most == of.least == list(counts)
        of.most = [max(pair) for pair in zip(of.most, counts, strict=True)]
        of.least = [min(pair) for pair in zip(of.least, counts, strict=True)]
        fitting = [graph for graph in of.graphs if _fits(graph.rows, counts, pads)]
        best = min(fitting, key=lambda graph: sum(graph.rows), default=None)
        waste = _WASTE if self._count < MOST_GRAPHS // 2 else _WASTE_LATER
        if self._count == MOST_GRAPHS - 1:
            waste = math.inf  # the last graph has capacity for the most tokens seen so far
        if best is not None and (sum(best.rows) <= waste * sum(counts) or self._count >= MOST_GRAPHS - 1):
            return best, _plan_of(best)
        if self._batches <= WARM_UP or of.seen == 1:
            return best, _plan_of(best)
        if self._count >= MOST_GRAPHS:
            return None, Plan(None, f"{MOST_GRAPHS} graphs are captured, the most that there may be")
        if not pads and not exact and any(jagged):
            return None, Plan(None, of.never_pads)
        rows = [_room(n, most, waste, exact or not j) for n, most, j in zip(counts, of.most, jagged, strict=True)]
        if best is not None and sum(best.rows) <= sum(rows):
            return best, _plan_of(best)
        return None, Plan(rows, None)

    def new(
        self, form: Form, batch: Any, features: Sequence[Any], outputs: EmbeddingOutputs, rows: list[int]
    ) -> Captured:
        """Returns a new graph for this form, to be rehearsed with this batch and captured with a later one."""
        rooms = [self._room_of(i, values, n) for i, (values, n) in enumerate(zip(outputs.values, rows, strict=True))]
        captured = Captured(batch, features, outputs, rows, rooms)
        self._forms[form].graphs.append(captured)
        self._count += 1
        return captured

    def capture(self, captured: Captured, run: Run) -> None:
        """Captures a graph that was rehearsed. Raises the capture's errors."""
        if self._memory is None and torch.cuda.is_available():
            self._memory = torch.cuda.graph_pool_handle()
        captured.capture(run, self._memory)

    def _room_of(self, index: int, values: Tensor, rows: int) -> Room:
        key = (index, values.shape[1:], values.dtype)
        if key not in self._rooms or len(self._rooms[key].memory) < rows:
            self._rooms[key] = Room(values, rows)
        return self._rooms[key]

    def _forget(self) -> None:
        if len(self._forms) >= _MOST_FORMS:
            self._forms = {form: of for form, of in self._forms.items() if of.graphs or of.seen > 1}
        if len(self._forms) >= _MOST_FORMS:
            self._forms = {form: of for form, of in self._forms.items() if of.graphs}


def _plan_of(graph: Captured | None) -> Plan:
    """Returns the plan for a batch that `graph` fits, or that has to run eagerly if it is None."""
    return Plan(graph.rows if graph is not None and graph.graph is None else None, None)


def _fits(rows: Sequence[int], counts: Sequence[int], pads: bool) -> bool:
    if not pads:
        return list(rows) == list(counts)
    return all(n <= room for n, room in zip(counts, rows, strict=True))


def _room(count: int, most: int, waste: float, exact: bool) -> int:
    """Returns the capacity for `count` tokens, in steps; the most seen so far, if that is not much more."""
    if exact:
        return count
    for_most = _in_steps(most)
    return for_most if for_most <= waste * count else _in_steps(count)


def _in_steps(count: int) -> int:
    step = max((1 << max(count - 1, 1).bit_length() - 1) // _STEPS, _LEAST_STEP)
    return -(-max(count, 1) // step) * step
