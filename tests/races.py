"""Races between ranks in peer memory, found on the CPU: who wrote and who read what, ordered by streams and barriers as
on GPUs.

A Recorder notes what one rank launches: accesses to peer memory, and what orders them, which are the branches of
IterationStreams and PeerMemory's barriers. `races` then gives the accesses of all ranks vector clocks (Mattern 1989): a
clock for each stream of each rank. Two accesses to the same elements, one of them a write, must be ordered. On the CPU
everything happens in order, and a barrier stops whole processes; neither counts here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm_bench.dlrm.runtime.peer_memory import Barrier, PeerMemory
from dlrm_bench.dlrm.runtime.streams import MAIN, Branch, Stream
from dlrm_bench.kernels.peer_tensors import PeerTensors
from dlrm_bench.pipeline.static.streams import IterationStreams


class Access(NamedTuple):
    """One operator's access to an allocation of peer memory."""

    stream: str
    operator: str
    memory: tuple[int, int]
    """Number of the allocation, and the rank whose memory it is."""
    elements: int
    """A bit for each element."""
    writes: bool


class Wait(NamedTuple):
    """Orders later work of `stream` after the present work of `others`."""

    stream: str
    others: tuple[str, ...]


class Meeting(NamedTuple):
    """All ranks' streams of this name wait for one another."""

    stream: str
    barrier: Barrier


class Everything(NamedTuple):
    """All streams of all ranks, and their hosts, wait for one another."""


Event = Access | Wait | Meeting | Everything


class Race(NamedTuple):
    first: tuple[int, Access]
    """The first access and its rank."""
    second: tuple[int, Access]


class Recorder(TorchDispatchMode):
    """The events of one rank while it is entered; memory must be allocated meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.streams: set[Stream] = {MAIN}
        """All streams with launches."""
        self._streams = [MAIN.name]
        self._allocations = 0
        self._memory: dict[int, tuple[int, int]] = {}
        self._kept: list[PeerTensors] = []  # so that no other memory gets their addresses
        self._patches = ExitStack()

    def __enter__(self) -> Recorder:
        for owner, name, recorded in self._recorded():
            self._patches.enter_context(patch.object(owner, name, recorded(getattr(owner, name))))
        super().__enter__()
        return self

    def _recorded(self) -> Sequence[tuple[type, str, Callable[..., Any]]]:
        """Methods that are recorded, and what takes their places."""
        return (
            (PeerMemory, "zeros", self._zeros),
            (PeerMemory, "barrier", self._barrier),
            (IterationStreams, "beside", self._beside),
            (IterationStreams, "on", self._on),
            (IterationStreams, "join", self._join),
        )

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Views access nothing: their results are their argument's memory, and no argument is written.
        written = [bool(argument.alias_info and argument.alias_info.is_write) for argument in func._schema.arguments]
        if func.namespace == "c10d":
            written[0] = True  # of every collective, whose schema does not say so
        aliases = any(returned.alias_info is not None for returned in func._schema.returns)
        if any(written) or not aliases:
            for i, argument in enumerate(func._schema.arguments):
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    self._access(func.name(), tensor, written[i])
        return func(*args, **kwargs)

    def _access(self, operator: str, tensor: Any, writes: bool) -> None:
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is not None:
            self.events.append(Access(self._streams[-1], operator, memory, _elements(tensor), writes))

    def _zeros(self, zeros: Callable[..., PeerTensors]) -> Callable[..., PeerTensors]:
        def recorded(*args: Any, **kwargs: Any) -> PeerTensors:
            tensors = zeros(*args, **kwargs)
            for rank, tensor in enumerate(tensors.tensors):
                self._memory[tensor.untyped_storage().data_ptr()] = (self._allocations, rank)
            self._allocations += 1
            self._kept.append(tensors)
            self.events.append(Everything())
            return tensors

        return recorded

    def _barrier(self, barrier: Callable[..., None]) -> Callable[..., None]:
        def recorded(memory: PeerMemory, which: Barrier) -> None:
            self.events.append(Meeting(self._streams[-1], which))
            barrier(memory, which)

        return recorded

    def _beside(self, beside: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def recorded(streams: IterationStreams, stream: Stream, *after: Branch) -> Iterator[Branch]:
            self.streams.add(stream)
            with beside(streams, stream, *after) as branch:
                if stream != MAIN:
                    self.events.append(Wait(stream.name, (self._streams[-1], *(other.name for other in after))))
                self._streams.append(self._streams[-1] if stream == MAIN else stream.name)
                yield branch
                self._streams.pop()

        return recorded

    def _on(self, on: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def recorded(streams: IterationStreams, branch: Branch) -> Iterator[None]:
            with on(streams, branch):
                self._streams.append(branch.name)
                yield
                self._streams.pop()

        return recorded

    def _join(self, join: Callable[..., None]) -> Callable[..., None]:
        def recorded(streams: IterationStreams, *branches: Branch) -> None:
            join(streams, *branches)
            self.events.append(Wait(self._streams[-1], tuple(branch.name for branch in branches)))

        return recorded


def _elements(tensor: Tensor) -> int:
    """Returns a bit for each element of its storage that is the tensor's."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    bits = np.zeros(count, dtype=bool)
    strides = [stride * bits.itemsize for stride in tensor.stride()]
    np.lib.stride_tricks.as_strided(bits[tensor.storage_offset() :], tensor.shape, strides)[...] = True
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")


Clock = dict[tuple[int, str], int]


class _Order:
    """Clocks of all streams of all ranks, (rank, stream)."""

    def __init__(self) -> None:
        self.clocks: defaultdict[tuple[int, str], Clock] = defaultdict(dict)

    def now(self, stream: tuple[int, str]) -> Clock:
        clock = self.clocks[stream]
        clock.setdefault(stream, 1)
        return clock

    def wait(self, stream: tuple[int, str], others: Sequence[tuple[int, str]]) -> None:
        """Lets `stream` come after the others, whose next accesses are later ones."""
        for other in others:
            self.merge(stream, dict(self.now(other)))
            self.now(other)[other] += 1

    def merge(self, stream: tuple[int, str], clock: Clock) -> None:
        mine = self.now(stream)
        for key, value in clock.items():
            mine[key] = max(mine.get(key, 0), value)


def races(logs: Sequence[Sequence[Event]], without: Barrier | None = None) -> list[Race]:
    """Returns the races among the events of all ranks, as if there were no barrier `without`; of each access the first
    few."""
    kept = [[event for event in log if not (isinstance(event, Meeting) and event.barrier == without)] for log in logs]
    order, at = _Order(), [0] * len(logs)
    accesses: defaultdict[tuple[int, int], list[tuple[tuple[int, str], int, Access]]] = defaultdict(list)
    found: list[Race] = []
    while any(place < len(log) for place, log in zip(at, kept, strict=True)):
        for rank, log in enumerate(kept):
            while at[rank] < len(log) and not isinstance(log[at[rank]], Meeting | Everything):
                event = log[at[rank]]
                at[rank] += 1
                if isinstance(event, Wait):
                    order.wait((rank, event.stream), [(rank, other) for other in event.others])
                else:
                    assert isinstance(event, Access)
                    found += _conflicts(order, accesses[event.memory], rank, event)
        # All ranks have come to the same barrier, as they launch in one order.
        meeting = [log[place] for place, log in zip(at, kept, strict=True) if place < len(log)]
        assert len(set(meeting)) <= 1, f"ranks wait for different barriers: {meeting}"
        assert len(meeting) in (0, len(logs)), f"not all ranks come to {meeting}"
        if not meeting:
            break
        _meet(order, meeting[0], len(logs))
        at = [place + 1 for place in at]
        if isinstance(meeting[0], Everything):
            accesses.clear()
    return found


def _meet(order: _Order, meeting: Event, ranks: int) -> None:
    of_barrier = [(rank, meeting.stream) for rank in range(ranks)] if isinstance(meeting, Meeting) else None
    streams = of_barrier or list(order.clocks)
    clocks = [dict(order.now(stream)) for stream in streams]
    for stream in streams:
        for clock in clocks:
            order.merge(stream, clock)
        order.now(stream)[stream] += 1


def _conflicts(
    order: _Order, before: list[tuple[tuple[int, str], int, Access]], rank: int, access: Access
) -> list[Race]:
    stream = (rank, access.stream)
    clock, found = order.now(stream), []
    for other, time, earlier in before:
        if other == stream or not (access.writes or earlier.writes) or clock.get(other, 0) >= time:
            continue
        if access.elements & earlier.elements and len(found) < 3:
            found.append(Race((other[0], earlier), (rank, access)))
    before.append((stream, clock[stream], access))
    return found
