"""The choice of an iteration's graph where batches are of several forms.

The graph of an iteration also brings the next batch, so it is of two forms: that of the batch that it trains on, and
that of the next one. A graph for each pair of them keeps an iteration one launch, whatever the forms are; with graphs
of one form alone the host would launch the input dist of the next batch wherever the form changes, which of six forms
it does with most batches. The number of pairs is bounded. For a pair beyond the bound, and for a next batch whose form
has no memory yet, a graph that is there trains on the batch; what that graph distributes beside it nobody reads, and
the next batch's input dist runs by itself, before that batch's own graph.

All ranks make the same choices, as they are told the same forms: nothing here may depend on what one rank has captured.
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
        """Returns the pair whose graph trains on a batch of form `now`; it brings the next batch if that has the pair's
        second form. ahead: the next batch's form, None without one that has memory."""
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
        """Returns whether graphs of this pair are to be captured: it has none, and all of its work has run before, in
        which libraries set themselves up for its shapes, which a capture cannot."""
        known = self._trained[pair.now] > 0 and self._brought[pair.ahead] > 0
        return pair not in self.graphs and known and self.rehearsals >= TURNS

    def is_new(self, pair: Pair) -> bool:
        """Returns whether not all ranks have ever captured graphs of this pair."""
        return pair not in self._agreed

    def agree(self, pair: Pair) -> None:
        """Notes that all ranks have captured graphs of this pair."""
        self._agreed[pair] = None

    def clear(self) -> list[torch.cuda.CUDAGraph]:
        """Forgets all graphs, and returns them. The pairs that come back get new ones."""
        graphs = [graph for of_pair in self.graphs.values() for graph in of_pair]
        self.graphs.clear()
        self.outputs.clear()
        return graphs
