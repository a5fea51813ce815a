"""The streams of the five-stage pipeline, kept in mind on the CPU: what a GPU would read, write or free unordered.

Operators run one after another there. Each gets a time of its stream, events carry the times of all streams that come
before them, waits take these over (vector clocks, Mattern 1989). Two accesses to the same memory, one of them a write,
must be ordered; and memory that is freed goes back to the stream on which it was made, whose next allocation must come
after all uses by others, as in torch's caching allocator. A graph's branches are streams of each replay, and its own
memory stays its own. Waits of the host count for nothing here.
"""

import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Times = dict[str, int]


class Use(NamedTuple):
    stream: str
    time: int
    what: str


class Memory:
    """One allocation."""

    def __init__(self, made: Use, of_graph: bool) -> None:
        self.made, self.of_graph = made, of_graph
        self.written = made
        self.read: dict[str, Use] = {}

    @property
    def uses(self) -> list[Use]:
        """The last write, and each stream's last read since then."""
        return [self.written, *self.read.values()]


class Order(TorchDispatchMode):
    """Watches operators; `found` tells unordered accesses, each with how often."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()
        self.waits = True
        """Whether side streams wait for the caller's at all."""
        self._times: dict[str, Times] = {}
        self._current = ["main"]
        self._replays, self._in_replay = 0, False
        self._memory: dict[int, Memory] = {}
        self._freed: list[Memory] = []

    # Streams

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Work within is a graph's."""
        self._replays, self._in_replay = self._replays + 1, True
        try:
            yield
        finally:
            self._in_replay = False

    def named(self, name: str) -> str:
        """Returns the side stream that this is now."""
        return f"{name} of graph {self._replays}" if self._in_replay else name

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def times(self, stream: str | None = None) -> Times:
        """Returns the times that are over once what has been launched on a stream, or on the current one, is over."""
        return self._times.setdefault(stream or self._current[-1], {})

    def wait(self, event: Times | None, stream: str | None = None) -> None:
        own = self.times(stream)
        for name, time in (event or {}).items():
            own[name] = max(time, own.get(name, 0))

    # Memory

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, stream = kwargs or {}, self._current[-1]
        times = self.times()
        times[stream] = times.get(stream, 0) + 1
        use = Use(stream, times[stream], f"{operator} in {_place()}")
        written = set()
        for i, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                written |= {_key(of) for of in pytree.tree_leaves(value) if isinstance(of, Tensor)}
        given = {_key(of) for of in pytree.tree_leaves((args, kwargs)) if isinstance(of, Tensor) and of.numel()}
        result = operator(*args, **kwargs)
        is_view = any(returned.alias_info is not None for returned in operator._schema.returns)
        for key in given if written or not is_view else ():
            self._use(key, use, key in written)
        for of in pytree.tree_leaves(result):
            if isinstance(of, Tensor) and of.numel() and _key(of) not in given and _key(of) not in self._memory:
                self._allocate(of, use)
        return result

    def _use(self, key: int, use: Use, writes: bool) -> None:
        memory = self._memory.get(key)
        if memory is None:
            return
        for other in memory.uses if writes else [memory.written]:
            self._compare(use, other, "writes what" if writes else "reads what")
        if writes:
            memory.written, memory.read = use, {}
        else:
            memory.read[use.stream] = use

    def _allocate(self, tensor: Tensor, use: Use) -> None:
        key = _key(tensor)
        self._memory[key] = Memory(use, self._in_replay)
        weakref.finalize(tensor.untyped_storage(), self._free, key)
        if not self._in_replay:
            again = [memory for memory in self._freed if memory.made.stream == use.stream]
            self._freed = [memory for memory in self._freed if memory.made.stream != use.stream]
            for memory in again:
                for other in memory.uses:
                    self._compare(use, other, f"may take memory made by {memory.made.what}, which")

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key)
        if not memory.of_graph:
            self._freed.append(memory)

    def _compare(self, use: Use, other: Use, how: str) -> None:
        if self.times(use.stream).get(other.stream, 0) < other.time:
            self.found[f"{use.stream}: {use.what} {how} {other.stream} uses by {other.what}"] += 1


class LogicalStreams:
    """Stands for StageStreams."""

    cuda = False

    def __init__(self, order: Order) -> None:
        self._order = order

    @contextmanager
    def on(self, name: str, after: Times | None = None) -> Iterator[None]:
        stream = self._order.named(name)
        self._order.wait(after, stream)
        with self._order.on(stream):
            yield

    def mark(self, name: str | None = None) -> Times:
        return dict(self._order.times(None if name is None else self._order.named(name)))

    def hold(self, name: str, after: Times | None) -> None:
        if self._order.waits:
            self._order.wait(after, self._order.named(name))

    def wait(self, event: Times | None) -> None:
        self._order.wait(event)

    def record(self, *crossing: Any) -> None:
        """Nothing: under whole iterations the pipeline holds what crosses streams."""

    def stream(self, name: str) -> None:
        return None


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place() -> str:
    """The innermost line of the pipeline."""
    frames = traceback.walk_stack(None)
    inside = ((f.f_code.co_filename, line) for f, line in frames if "/pipeline/five_stage/" in f.f_code.co_filename)
    name, line = next((one for one in inside if "/tests/" not in one[0]), ("elsewhere", 0))
    return f"{name.rpartition('/')[2]}:{line}"
