"""The order and the machines of two sides' runs, and whether these alone could make a difference.

A verdict is about programs only if the machine's changes affect both sides alike, as they do with runs in turn. Where
all runs of one side came first, or ran on another machine, a change in between looks like a difference: under a drift
of 2 % a run, three runs after three of the same program are "different" in 96 to 100 % of tries.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from dlrm_bench.bench.compare.sides import Side
from dlrm_bench.bench.stats.repetitions import drift_left
from dlrm_bench.bench.stats.series import CONFIDENCE
from dlrm_bench.bench.stats.statistics import welch

ACCEPT = "--accept-blocked-order"
WAY_OUT = (
    "a change between the runs of both sides would look like a difference. Run them in turn (A B B A), as "
    "`dlrm-bench ladder` does; or name runs of one program beside both (--reference OLD NEW); or take the risk "
    f"({ACCEPT})"
)
_DRIFT_LEFT = 0.5  # runs by which one side may come later in the mean, for pairs to be compared as such


def are_pairs(a: Side, b: Side) -> bool:
    """Whether the runs alternate in time in a balanced order, so that a drift cancels in the differences of pairs."""
    order = _order(a, b)
    return _alternate(order) and abs(drift_left(order)) < _DRIFT_LEFT


def confounded(a: Side, b: Side) -> Iterator[str]:
    """Yields differences between the sides beside the program, for which there is no verdict.

    These are: no common machine, and runs in blocks: all of one side first, or so unevenly that a linear drift, or one
    step, would alone pass the test. Two sides of the same runs do not differ.
    """
    if a.keys and set(a.keys) == set(b.keys):
        return
    if not a.finished or not b.finished:
        yield f"{(b if a.finished else a).label} does not say when its runs ran, nor on which machine"
        return
    machines = [{machine for machine in side.machines if machine} for side in (a, b)]
    if all(machines) and not machines[0] & machines[1]:
        yield "the runs of A and those of B were on different machines, or on one machine before and after a reboot"
    order = _order(a, b)
    if sum(first != second for first, second in pairwise(order)) == 1:
        first, second, name = (a, b, "A") if order[0] == 0 else (b, a, "B")
        yield (
            f"all runs of {name} came before those of the other side ({first.finished[-1]}, then {second.finished[0]})"
        )
    elif not are_pairs(a, b) and _machine_alone_differs(order):
        yield "the runs of one side came so much later than the other's that a drift or one step alone would differ"


def notes_on_order(a: Side, b: Side) -> Iterator[str]:
    """Yields notes for a reader on an order that allows a verdict."""
    order = _order(a, b)
    if _alternate(order) and not are_pairs(a, b):
        first = (a if drift_left(order) > 0 else b).label
        yield (
            f"the runs alternate, but {first} came first in most pairs: a drift of the machine would look like a "
            "difference, so they are not compared pair by pair; swap every other pair (A B B A), as `dlrm-bench "
            "ladder` does"
        )


def _order(a: Side, b: Side) -> list[int]:
    """Returns the sides of all runs, 0 for A and 1 for B, in the order in which they ended; empty where that is
    unknown."""
    if not a.finished or not b.finished:
        return []
    return [side for _, side in sorted([*((time, 0) for time in a.finished), *((time, 1) for time in b.finished)])]


def _alternate(order: Sequence[int]) -> bool:
    """Whether each pair of runs that are neighbours in time has one run of each side."""
    pairs = list(zip(order[::2], order[1::2], strict=False))
    return bool(pairs) and len(order) % 2 == 0 and all(first != second for first, second in pairs)


def _machine_alone_differs(order: Sequence[int]) -> bool:
    """Whether Welch's test would find a difference in times that change by a linear drift, or by one step at some
    run."""
    places = np.arange(len(order), dtype=np.float64)
    sides = [[side == which for side in order] for which in (0, 1)]
    if min(map(sum, sides)) < 2:
        return False
    changes = [places, *((places >= at).astype(np.float64) for at in range(1, len(order)))]
    return any(welch(change[sides[0]], change[sides[1]]).p_value < 1 - CONFIDENCE for change in changes)
