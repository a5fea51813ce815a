"""Ranks side by side on one clock: the last rank of each collective, and the share of waiting in it.

The j-th collective that a rank launches in the traced iterations is the j-th of every other rank. From a rank's
beginning to the last rank's it waits, from then on it transfers. Traces of one machine share a clock: Kineto's times
are the system's.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from .samples import Estimate, estimate_of
from .trace import ON_GPU, host_work, is_collective, launched_by_call, ordered

_LEAST = 0.03
"""Share of an iteration below which coming last is no finding."""
_MORE = 2.0
"""Factor by which a straggler is later than any other rank."""
_HOST = ("gloo:", "mpi:", "ucc:", "xccl:")
"""Beginnings of the ranges that torch.distributed opens around a collective of the host."""
Events = Sequence[dict[str, Any]]


class Span(NamedTuple):
    """A collective of one rank; milliseconds on the common clock."""

    name: str
    start: float
    end: float
    iteration: int


@dataclass(slots=True)
class Together:
    """The collectives of all ranks in the traced iterations."""

    waits_ms: dict[int, float] = field(default_factory=dict)
    """Time of an iteration that a rank waits in collectives for the others, by rank."""
    transfers_ms: dict[int, float] = field(default_factory=dict)
    """The rest of the time in collectives."""
    late_ms: dict[int, list[float]] = field(default_factory=dict)
    """Time by which a rank comes later than the last of the others, summed over an iteration's collectives; of each
    iteration."""
    last: dict[int, float] = field(default_factory=dict)
    """Share of the collectives that a rank comes last to."""
    spans: dict[int, list[Span]] = field(default_factory=dict)
    iterations: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """(beginning, end) of each traced iteration, by rank; milliseconds on the common clock."""
    arrived: list[float] = field(default_factory=list)
    """Time at which the last rank came to each collective, ms on the common clock."""

    @property
    def late(self) -> dict[int, Estimate]:
        """The mean of late_ms, with its interval."""
        return {rank: estimate_of(each) for rank, each in self.late_ms.items()}

    def straggler(self, iteration_ms: float) -> int | None:
        """The rank that the others wait for."""
        late = self.late
        if len(late) < 2:
            return None
        rank, after = sorted(late, key=lambda rank: -late[rank].ms)[:2]
        # No rank comes earlier than itself: only beside another one does its delay tell more than chance.
        more = estimate_of([a - b for a, b in zip(self.late_ms[rank], self.late_ms[after], strict=True)])
        enough = max(_LEAST * iteration_ms, _MORE * late[after].ms)
        return rank if more.low > 0 and late[rank].ms >= enough else None


def together(events: Mapping[int, Events]) -> Together:
    """Returns the collectives of all ranks. events: of each rank's trace. Empty where their collectives differ."""
    result = Together()
    for rank, own in events.items():
        in_order, iterations = ordered(own)
        result.iterations[rank] = [(e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000) for e in iterations]
        result.spans[rank] = _collectives(in_order, iterations)
    each = list(result.spans.values())
    if len(each) < 2 or not each[0] or len({tuple(span.name for span in spans) for spans in each}) != 1:
        return result
    ranks = list(result.spans)
    n = len(result.iterations[ranks[0]])
    late = {rank: [0.0] * n for rank in ranks}
    count: defaultdict[int, int] = defaultdict(int)
    for same in zip(*each, strict=True):
        starts = sorted(span.start for span in same)
        last = max(ranks, key=lambda rank: same[ranks.index(rank)].start)
        late[last][same[0].iteration] += starts[-1] - starts[-2]
        count[last] += 1
        result.arrived.append(starts[-1])
    for rank in ranks:
        pairs = list(zip(result.spans[rank], result.arrived, strict=True))
        result.waits_ms[rank] = sum(max(0.0, min(at, span.end) - span.start) for span, at in pairs) / n
        result.transfers_ms[rank] = sum(max(0.0, span.end - max(at, span.start)) for span, at in pairs) / n
        result.late_ms[rank] = late[rank]
        result.last[rank] = count[rank] / len(pairs)
    return result


def more_gpu_work(events: Mapping[int, Events], rank: int) -> tuple[float, str, float]:
    """Milliseconds of an iteration that this rank's GPU computes more than the others' mean, and its kernel of most.

    Returns (all kernels, name of the kernel that differs most, milliseconds of that one).
    """
    spent = {other: _kernels(own) for other, own in events.items()}
    others = [own for other, own in spent.items() if other != rank]
    more = {
        name: spent[rank].get(name, 0.0) - fmean(own.get(name, 0.0) for own in others)
        for name in {name for own in spent.values() for name in own}
    }
    name = max(more, key=lambda name: more[name], default="")
    return sum(more.values()), name, more.get(name, 0.0)


def _kernels(events: Events) -> dict[str, float]:
    in_order, iterations = ordered(events)
    spent: defaultdict[str, float] = defaultdict(float)
    for own in launched_by_call(in_order, host_work(in_order, iterations).calls_by_id).values():
        for event in own:
            if not is_collective(event["name"]):
                spent[event["name"]] += event["dur"] / 1000 / len(iterations)
    return spent


def _collectives(events: Events, iterations: Events) -> list[Span]:
    """Those of a GPU where there are any, else those of the host, in the order of their beginning."""
    starts = [e["ts"] for e in iterations]
    calls = host_work(events, iterations).calls_by_id
    launched = launched_by_call(events, calls)
    on_gpu = [(calls[number].ts, e) for number, own in launched.items() for e in own if is_collective(e["name"])]
    if on_gpu:
        on_gpu.sort(key=lambda each: (each[0], each[1]["ts"]))
        return [_span(event, bisect_right(starts, called) - 1) for called, event in on_gpu]
    if any(e.get("cat") in ON_GPU for e in events):
        return []
    end = iterations[-1]["ts"] + iterations[-1]["dur"]
    own = [
        e
        for e in events
        if e["name"].startswith(_HOST) and e.get("cat") in ("user_annotation", "cpu_op") and starts[0] <= e["ts"] <= end
    ]
    return [_span(event, bisect_right(starts, event["ts"]) - 1) for event in own]


def _span(event: dict[str, Any], iteration: int) -> Span:
    return Span(event["name"], event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000, iteration)
