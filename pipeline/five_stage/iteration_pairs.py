"""The choice of an iteration's graph where batches are of several forms.

An iteration's graph also distributes the next batch, so it depends on two forms: that of the batch that it trains on,
and that of the next batch. With a graph for each pair, every iteration is one launch; with graphs for a single form,
the host would have to launch the next batch's input dist whenever the form changes, which with six forms is for most
batches. The number of pairs is bounded. For a pair beyond the bound, and for a next batch whose form has no memory yet,
an existing graph trains on the batch; that graph's distributed batch is not read, and the next batch's input dist runs
separately, before that batch's own graph.

All ranks make the same choices because they see the same forms: no choice may depend on the captures of one rank.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch

from .iteration_slots import TURNS

MOST_FORMS = 8
"""Forms that have memory."""
MOST_CHANGES = 24
"""Pairs of two different forms, each of which has a graph for each turn."""


class Pair(NamedTuple):
    """The forms of an iteration's batch and of the one that it brings."""

    now: int
    ahead: int


class Pairs:
    """The graphs of each pair, a graph for each turn. They share memory, as only one is replayed at a time."""

    def __init__(self) -> None:
        self.graphs: dict[Pair, list[torch.cuda.CUDAGraph]] = {}
        self.outputs: dict[Pair, list[Any]] = {}
        """Outputs of the model in the memory of each graph."""
        self.rehearsals = 0
        self._trained, self._brought = Counter[int](), Counter[int]()
        self._agreed: dict[Pair, None] = {}  # in the order of their captures, which all ranks share

    def of(self, now: int, ahead: int | None) -> Pair:
        """Returns the pair whose graph trains on a batch of form `now`; the graph also distributes the next batch if
        that batch has the pair's second form. ahead: the next batch's form, or None if that form has no memory."""
        pair = Pair(now, now if ahead is None else ahead)
        if pair in self._agreed:
            return pair
        if ahead is None or (now != ahead and sum(one.now != one.ahead for one in self._agreed) >= MOST_CHANGES):
            return next((one for one in self._agreed if one.now == now), Pair(now, now))
        return pair

    def rehearsed(self, pair: Pair) -> None:
        """Counts an iteration whose work ran as it will be captured."""
        self.rehearsals += 1
        self._trained[pair.now] += 1
        self._brought[pair.ahead] += 1

    def is_due(self, pair: Pair) -> bool:
        """Whether graphs of this pair are to be captured: the pair has no graphs, and all of its work has run eagerly
        before, so that libraries are initialised for its shapes, which is impossible during a capture."""
        if pair in self.graphs:
            return False
        return self._trained[pair.now] > 0 and self._brought[pair.ahead] > 0 and self.rehearsals >= TURNS

    def is_new(self, pair: Pair) -> bool:
        """Whether this pair's graphs have never been captured on all ranks."""
        return pair not in self._agreed

    def agree(self, pair: Pair) -> None:
        """Notes that all ranks have captured graphs of this pair."""
        self._agreed[pair] = None

    def forget(self) -> None:
        """Forgets which pairs all ranks have captured, on all ranks: their next captures are first ones again."""
        self._agreed.clear()

    def clear(self) -> list[torch.cuda.CUDAGraph]:
        """Forgets all graphs, and returns them. The pairs that come back get new ones."""
        graphs = [graph for of_pair in self.graphs.values() for graph in of_pair]
        self.graphs.clear()
        self.outputs.clear()
        return graphs
