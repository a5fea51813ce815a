"""The loop's time without a call of torch: waits for a loader, sleeps, reads, and Python that computes.

Also the time that leaving a finding's line out would remove, by the same samples of the stack: a loop of small
operations costs more than its calls, and a line that logs more than its read of a value.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .findings import Seen, slower
from .frames import Frames, is_ours, is_standard_library
from .judge import (
    BURST,
    HOST_COMPUTE,
    HOST_WAIT,
    LOADER,
    METRIC,
    OPTIMIZER_LOOP,
    PERIODIC,
    PRINT,
    SHAPE,
    Line,
    Place,
    function_of,
    line_of,
)
from .loops import lines_of_loop
from .rank_file import Call, Frame, RankFile
from .samples import Estimate, Sample, Samples

_LEAST = 0.03
"""Share of an iteration below which time outside of torch is no finding."""
_LOADER = re.compile(r"/torch/utils/data/(dataloader|datapipes/.*|_utils/.*)\.py$")
_LAUNCHES = re.compile(r"/(torch|torchrec|torchmetrics|torcheval|fbgemm_gpu|triton)/")
"""Libraries whose Python launches work: time in it is no work of the script's own."""


@dataclass(frozen=True, slots=True)
class Recurring:
    """Place of work that comes every n-th iteration."""

    place: Place
    iterations: frozenset[int]
    """Those of the sampled window that have it."""


class HostCosts:
    """Attributes the samples of one rank to its findings, and finds more in the rest."""

    def __init__(
        self, rank: RankFile, seen: dict[Place, Seen], backward: Mapping[int, float], recurring: Sequence[Recurring]
    ) -> None:
        """seen: findings of calls; those of one loop become one. backward: microseconds of marked calls' backward, by
        their number."""
        self._rank = rank
        self._seen = seen
        self._backward = backward
        self._recurring = recurring
        self._samples = Samples(rank)
        self._frames = Frames(rank["libraries"])
        kept_out = {(frame["file"], frame["line"]) for frame in rank["loop"]}
        kept_out |= {
            (frame["file"], frame["line"])
            for call in rank["calls"]
            if call["name"].endswith(".backward")
            for frame in rank["stacks"][call["stack"]]
        }
        self._extents = _one_of_each_loop(seen, kept_out)
        self._matches = [
            (place, _match(place, self._extents))
            for place, one in seen.items()
            if place.kind != SHAPE and place.user.file and one.calls and all(call["main"] for call in one.calls)
        ]

    def estimates(self) -> dict[Place, Estimate]:
        """Returns the time that leaving each place out removes, of findings of calls and of those without one."""
        owned: defaultdict[Place, list[Sample]] = defaultdict(list)
        rest: defaultdict[int, list[Sample]] = defaultdict(list)
        recurring = [(one.iterations, _at_line(one.place.user)) for one in self._recurring]
        if not self._samples.samples:
            return {}
        owners = [self._owners(stack) for stack in self._samples.stacks]
        for sample in self._samples.samples:
            stack = self._samples.stacks[sample.stack]
            if any(sample.iteration in iterations and at(stack) for iterations, at in recurring):
                continue  # the finding for periodic work contains it
            for place, share in owners[sample.stack]:
                owned[place].append(sample.times(share))
            if not owners[sample.stack]:
                rest[sample.stack].append(sample)
        found = {
            place: self._with_backward(place, self._samples.estimate(owned.get(place, ())))
            for place, _ in self._matches
        }
        kept = {place: estimate for place, estimate in found.items() if not self._is_missed(place, estimate)}
        return kept | dict(self._outside(rest))

    def _is_missed(self, place: Place, estimate: Estimate) -> bool:
        """Whether samples fell on later lines: after an operator that is shorter than the sampler's helper needs to
        come, no handler runs before the next call. The time of its calls is known better."""
        seen, operators = self._seen[place], self._rank.get("operators", [])
        in_calls = seen.ms(self._rank["marked"]["iterations"]) or 0.0
        return in_calls > estimate.high and all(call["stack"] in operators for call in seen.calls)

    def _owners(self, stack: list[Frame]) -> list[tuple[Place, float]]:
        """Findings that a stack belongs to, with shares: the innermost; several at one line share by calls' time."""
        depths = [(place, match(stack)) for place, match in self._matches]
        known = [(place, depth) for place, depth in depths if depth is not None]
        if not known:
            return []
        least = min(depth for _, depth in known)
        inner = [place for place, depth in known if depth == least]
        times = [max(self._seen[place].us or 0.0, 1e-3) for place in inner]
        return [(place, us / sum(times)) for place, us in zip(inner, times, strict=True)]

    def _with_backward(self, place: Place, estimate: Estimate) -> Estimate:
        us = sum(self._backward.get(number, 0.0) for number in self._numbers(place))
        ms = us / 1000 / self._rank["marked"]["iterations"] / slower(self._rank)
        return estimate._replace(ms=estimate.ms + ms)

    def _numbers(self, place: Place) -> Iterable[int]:
        """Yields numbers of the calls that go with a line that is left out: for a loop, those of all its lines."""
        if place in self._extents:
            match = _in_lines(place.user, self._extents[place])
            within = [match(stack) is not None for stack in self._rank["stacks"]]
            return [number for number, call in enumerate(self._rank["calls"]) if within[call["stack"]]]
        made = {id(call) for call in self._seen[place].calls}
        return [number for number, call in enumerate(self._rank["calls"]) if id(call) in made]

    def _outside(self, rest: Mapping[int, Sequence[Sample]]) -> Iterable[tuple[Place, Estimate]]:
        """Places outside of torch that take at least _LEAST of an iteration, surely more than nothing."""
        loader: defaultdict[tuple[Line, Line], list[Sample]] = defaultdict(list)
        lines: defaultdict[Line, list[Sample]] = defaultdict(list)
        inner: defaultdict[Line, defaultdict[tuple[Line, ...], float]] = defaultdict(lambda: defaultdict(float))
        for number, samples in rest.items():
            stack = self._samples.stacks[number]
            user = _statement(stack, self._frames.user(stack))
            reads = next((frame for frame in stack if _LOADER.search(frame["file"])), None)
            if self._frames.is_library(user):
                continue
            if reads is not None:
                loader[line_of(user), function_of(reads)] += samples
            elif not launches(stack):
                lines[line_of(user)] += samples
                library = tuple(function_of(frame) for frame in self._frames.library(stack)[:1])
                inner[line_of(user)][library] += sum(sample.ms for sample in samples)
        for (line, function), samples in loader.items():
            estimate = self._samples.estimate(samples)
            if self._counts(estimate):
                yield Place(LOADER, line, (function,)), estimate
        for line, samples in lines.items():
            estimate = self._samples.estimate(samples)
            # A wait for a core is neither: it follows a sleep as well as a computation that lost its core.
            waits = sum(sample.running_ms - sample.blocked_ms for sample in samples) < 0
            in_torch = self._torch_ms(line)
            # Calls of torch that run no Python of its own have the script's line as their innermost frame.
            known = estimate.low > 2 * in_torch and (waits or not self._rank["reduced"])
            estimate = estimate._replace(ms=estimate.ms - in_torch)
            if known and self._counts(estimate):
                called = max(inner[line], key=lambda functions: inner[line][functions])
                yield Place(HOST_WAIT if waits else HOST_COMPUTE, line, called), estimate

    def _counts(self, estimate: Estimate) -> bool:
        return estimate.low > 0 and estimate.ms >= _LEAST * self._rank["plain"]["ms"]

    def _torch_ms(self, line: Line) -> float:
        """Time of marked calls that the line itself makes, in a marked iteration."""

        def made_here(call: Call) -> bool:
            return call["main"] and line_of(self._rank["stacks"][call["stack"]][0]) == line

        calls = self._rank["calls"]
        own = [call for call in calls if made_here(call)]
        outer = [call for call in own if call["within"] is None or not made_here(calls[call["within"]])]
        return sum(call["us"] for call in outer) / 1000 / self._rank["marked"]["iterations"]


def launches(stack: Sequence[Frame]) -> bool:
    """Whether the innermost frame beyond Python's own modules is of a library that launches, or of this project."""
    inner = next((frame for frame in stack if not is_standard_library(frame)), stack[-1])
    return _LAUNCHES.search(inner["file"]) is not None or is_ours(inner)


def _statement(stack: Sequence[Frame], frame: Frame) -> Frame:
    """The frame, or of a lambda or comprehension the one that holds it."""
    outer = stack[stack.index(frame) + 1 :]
    same = outer[0] if outer and frame["function"].endswith(">") else None
    return same if same is not None and same["file"] == frame["file"] and same["line"] == frame["line"] else frame


_Match = Callable[[Sequence[Frame]], int | None]
"""Returns the number of the frame at which a stack belongs to a place; None where it does not."""


def _one_of_each_loop(seen: dict[Place, Seen], kept_out: Collection[tuple[str, int]]) -> dict[Place, range]:
    """Keeps only the costliest burst of each loop, with the calls of the others; returns the loops' lines."""
    loops: dict[tuple[str, range], Place] = {}
    for place in sorted((p for p in seen if p.kind == BURST and not p.library), key=lambda p: -(seen[p].us or 0.0)):
        lines = lines_of_loop(place.user.file, place.user.line, kept_out)
        first = loops.setdefault((place.user.file, lines), place)
        if first is not place:
            seen[first].add(seen.pop(place))
    return {place: lines for (_, lines), place in loops.items()}


def _match(place: Place, loops: Mapping[Place, range]) -> _Match:
    if place in loops:
        return _in_lines(place.user, loops[place])
    if place.library and _LAUNCHES.search(place.library[0].file):
        return _below(place.user, place.library[0])
    # A line that hands a tensor to logging, or to a package that launches nothing, goes as a whole.
    whole = bool(place.library) or place.kind in (PRINT, METRIC, OPTIMIZER_LOOP, PERIODIC)
    return _own(place.user, whole)


def _in_lines(user: Line, lines: range) -> _Match:
    def match(stack: Sequence[Frame]) -> int | None:
        for depth, frame in enumerate(stack):
            if frame["file"] == user.file and frame["function"] == user.function and frame["line"] in lines:
                return depth
        return None

    return match


def _below(user: Line, library: Line) -> _Match:
    def match(stack: Sequence[Frame]) -> int | None:
        for depth, frame in enumerate(stack):
            same = frame["file"] == library.file and frame["function"] == library.function
            if same and library.line in (0, frame["line"]):
                return depth if any(line_of(outer)[:3] == user[:3] for outer in stack[depth:]) else None
        return None

    return match


def _own(user: Line, whole: bool) -> _Match:
    """whole: calls of the line belong to it too; otherwise only samples whose innermost frame is the line."""

    def match(stack: Sequence[Frame]) -> int | None:
        for depth, frame in enumerate(stack if whole else stack[:1]):
            if line_of(frame)[:3] == user[:3]:
                return depth
        return None

    return match


def _at_line(user: Line) -> Callable[[Sequence[Frame]], bool]:
    match = _own(user, whole=True)
    return lambda stack: match(stack) is not None
