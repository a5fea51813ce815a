"""Time of backward that belongs to marked calls of the forward: leaving a line out removes it too.

The profiler gives an operation of the forward and the node of autograd's graph that it makes one sequence number
(torch.autograd.profiler, "Sequence number").
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .rank_file import MARK, MARKED_ITERATION

_NODE = "autograd::engine::evaluate_function"


def backward_us(events: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Microseconds of backward for each marked call, by its number, in all marked iterations of a trace."""
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"], e["tid"])
        for e in events
        if e["name"] == MARKED_ITERATION and e.get("cat") == "user_annotation"
    )
    if not spans:
        return {}
    begin, end, loop = spans[0][0], spans[-1][1], spans[0][2]
    within = [e for e in events if begin <= e["ts"] <= end and e.get("cat") == "cpu_op"]
    mark_of = _marks_by_sequence([e for e in within if e["tid"] == loop])
    spent: defaultdict[int, float] = defaultdict(float)
    for event in within:
        if event["name"].startswith(_NODE):
            mark = mark_of.get(_sequence(event))
            if mark is not None:
                spent[mark] += event["dur"]
    return dict(spent)


def _marks_by_sequence(events: list[dict[str, Any]]) -> dict[int | None, int]:
    """Returns the innermost mark around the last operation with each sequence number: the one that made the node."""
    marks: dict[int | None, int] = {}
    open_ranges: list[tuple[float, int | None, bool]] = []  # (end, mark, whether within backward)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while open_ranges and open_ranges[-1][0] <= event["ts"]:
            open_ranges.pop()
        _, mark, backward = open_ranges[-1] if open_ranges else (0.0, None, False)
        name = event["name"]
        if name.startswith(MARK):
            mark = int(name[len(MARK) :])
        backward = backward or name.startswith(_NODE)
        sequence = _sequence(event)
        if sequence is not None and mark is not None and not backward:
            marks[sequence] = mark
        open_ranges.append((event["ts"] + event["dur"], mark, backward))
    return marks


def _sequence(event: dict[str, Any]) -> int | None:
    number = event.get("args", {}).get("Sequence number")
    return number if isinstance(number, int) and number >= 0 else None
