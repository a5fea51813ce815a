"""The order and the machines of two sides' runs, and whether they alone could cause a difference.

A verdict is about programs only if changes of the machine affect both sides alike, as they do with alternating runs. If
all runs of one side came first, or ran on another machine, a change in between looks like a difference: with a drift of
2 % per run, three runs followed by three of the same program are "different" in 96 to 100 % of tries.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np

from dlrm_bench.bench.compare.sides import Side
from dlrm_bench.bench.stats.repetitions import drift_left
from dlrm_bench.bench.stats.series import CONFIDENCE
from dlrm_bench.bench.stats.statistics import Comparison, compare, welch

ACCEPT = "--accept-blocked-order"
WAY_OUT = (
    "a change of the machine between the runs of both sides would look like a difference. Alternate the runs "
    "(A B B A), as `dlrm-bench ladder` does; or name runs of one program made alongside both (--reference OLD NEW); "
    f"or take the risk ({ACCEPT})"
)
_DRIFT_LEFT = 0.5  # maximum mean lag of one side, in runs, for a comparison by pairs
_BLOCK = 3  # runs of one side in a row that wander with the machine rather than each by itself


def are_pairs(a: Side, b: Side) -> bool:
    """Whether the runs alternate in time in a balanced order, so that a drift cancels in the differences of pairs."""
    order = _order(a, b)
    return _alternate(order) and abs(drift_left(order)) < _DRIFT_LEFT


def compare_in_order(a: Side, b: Side) -> Comparison:
    """Returns the comparison of B with A: pair by pair where their order allows it, and else of two sides.

    Where three runs of a side or more follow one another, the degrees of freedom are fewer than the blocks of the
    order. A machine that wanders by 1 % a run would otherwise make a program differ from itself in up to 23 % of tries;
    it does so in 1 to 6 % (AAABABBB).
    """
    found, blocks = compare(a.series, b.series, paired=are_pairs(a, b)), _blocks(_order(a, b))
    if not blocks or not found.between_runs:
        return found
    capped = {name: replace(each, freedom=min(each.freedom, blocks - 1.0)) for name, each in found.estimates.items()}
    return replace(found, estimates=capped)


def confounded(a: Side, b: Side) -> Iterator[str]:
    """Yields differences between the sides, other than the program, that rule out a verdict.

    These are: machines that one side ran on more than the other, and runs in blocks: all runs of one side first, or an
    order so uneven that a linear drift or one step alone would pass the test. Two sides of the same runs do not differ.
    """
    if a.keys and set(a.keys) == set(b.keys):
        return
    if not a.finished or not b.finished:
        yield f"{(b if a.finished else a).label} states neither when its runs ran nor on which machine"
        return
    of_a, of_b = Counter(a.machines), Counter(b.machines)
    known = any(of_a) and any(of_b)
    if known and not of_a.keys() & of_b.keys():
        yield "the runs of A and those of B were on different machines, or on one machine before and after a reboot"
    elif known and any(of_a[each] * of_b.total() != of_b[each] * of_a.total() for each in of_a | of_b):
        shares = ", ".join(f"{of_a[each]} of A and {of_b[each]} of B on one" for each in of_a | of_b)
        yield f"the runs of A and those of B are not spread alike over {len(of_a | of_b)} machines ({shares})"
    order = _order(a, b)
    if sum(first != second for first, second in pairwise(order)) == 1:
        first, second, name = (a, b, "A") if order[0] == 0 else (b, a, "B")
        yield (
            f"all runs of {name} came before those of the other side ({first.finished[-1]}, then {second.finished[0]})"
        )
    elif not are_pairs(a, b) and _machine_alone_differs(order):
        yield "the runs of one side came so much later that a drift or one step alone would look like a difference"


def notes_on_order(a: Side, b: Side) -> Iterator[str]:
    """Yields notes on an order of runs that allows a verdict."""
    order = _order(a, b)
    if _alternate(order) and not are_pairs(a, b):
        first = (a if drift_left(order) > 0 else b).label
        yield (
            f"the runs alternate, but {first} came first in most pairs: a drift of the machine would look like a "
            "difference, so runs are not compared in pairs; swap every other pair (A B B A), as `dlrm-bench "
            "ladder` does"
        )
    blocks = _blocks(order)
    if blocks:
        yield (
            f"the runs are {blocks} blocks, each of one side alone: a wandering machine makes blocks differ, so the "
            f"interval has {blocks - 1} degrees of freedom at most; run in turn (A B B A)"
        )


def _blocks(order: Sequence[int]) -> int:
    """Returns the number of blocks, runs of one side in a row, where one of them is long; else 0, as for two blocks,
    which say nothing about the machine in between."""
    lengths = [len(list(block)) for _, block in groupby(order)]
    return len(lengths) if len(lengths) > 2 and max(lengths) >= _BLOCK else 0


def _order(a: Side, b: Side) -> list[int]:
    """Returns the side of each run, 0 for A and 1 for B, in the order in which the runs ended; empty if that is
    unknown."""
    if not a.finished or not b.finished:
        return []
    return [side for _, side in sorted([*((time, 0) for time in a.finished), *((time, 1) for time in b.finished)])]


def _alternate(order: Sequence[int]) -> bool:
    """Whether each successive pair of runs has one run of each side."""
    pairs = list(zip(order[::2], order[1::2], strict=False))
    return bool(pairs) and len(order) % 2 == 0 and all(first != second for first, second in pairs)


def _machine_alone_differs(order: Sequence[int]) -> bool:
    """Whether Welch's test would find a difference in times that have only a linear drift, or only one step at some
    run."""
    places = np.arange(len(order), dtype=np.float64)
    sides = [[side == which for side in order] for which in (0, 1)]
    if min(map(sum, sides)) < 2:
        return False
    changes = [places, *((places >= at).astype(np.float64) for at in range(1, len(order)))]
    return any(welch(change[sides[0]], change[sides[1]]).p_value < 1 - CONFIDENCE for change in changes)
