"""Reader threads that keep batches ready ahead of the training loop."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, repeat
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Self, TypeVar

S = TypeVar("S")
T = TypeVar("T")


class _End:
    """Marks the end of the results; `error` is the exception that stopped the reader, if any."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Lane(Generic[T]):
    """The queues between one reader thread and the consumer: the reader takes a ticket for each result, and the
    consumer returns it.

    Uses two C queues, because the Python locks of one bounded Queue would cost the launching thread several
    microseconds per batch.
    """

    __slots__ = ("ready", "tickets")

    def __init__(self, depth: int) -> None:
        self.ready: SimpleQueue[T | _End] = SimpleQueue()
        self.tickets: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self.tickets.put(None)


class Prefetcher(Iterator[T], Generic[T]):
    """Iterates over `transform(batch) for batch in batches`, up to `depth` results ahead, on separate threads.

    Several threads read a Sequence, in turn; one thread reads an iterator. Order is kept. An exception of `batches` or
    `transform` is raised after the results that precede it, as the same object with the reader's traceback. Close it,
    or use it as a context manager; closing waits for batches being read, drops the ready ones, and ends the iteration.
    An open one is closed when garbage-collected, or at exit.
    """

    def __init__(self, batches: Iterable[S], transform: Callable[[S], T], depth: int, threads: int = 1) -> None:
        """threads: their maximum number, not more than `depth`; `transform` runs on all of them."""
        assert depth > 0
        assert threads > 0
        count = min(threads, depth) if isinstance(batches, Sequence) else 1
        lanes = [_Lane[T]((depth - i + count - 1) // count) for i in range(count)]
        stop = threading.Event()
        readers = []
        for i, lane in enumerate(lanes):
            share = batches[i::count] if isinstance(batches, Sequence) else batches
            # The thread holds no reference to self. Daemon, because Python joins other threads before it runs the
            # finalizer at exit, and would wait forever; the finalizer then stops it while the interpreter still lives.
            arguments = (share, transform, lane, stop)
            readers.append(threading.Thread(target=_read, args=arguments, name="batch-reader", daemon=True))
        self._finalizer = weakref.finalize(self, _shut_down, readers, lanes, stop)
        self._turns: Iterator[_Lane[T]] = cycle(lanes)
        for reader in readers:
            reader.start()

    def __next__(self) -> T:
        lane = next(self._turns)
        item = lane.ready.get()
        if item.__class__ is _End:
            self._turns = repeat(lane)  # Its end is the end of all lanes: the next results of others would follow it.
            lane.ready.put(item)  # For the next call.
            raise StopIteration if item.error is None else item.error
        lane.tickets.put(None)
        return item  # type: ignore[return-value]  # mypy does not narrow on __class__, which beats isinstance here

    def close(self) -> None:
        """Stops the readers, waits for their threads and ends the iteration. Closing twice does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _read(batches: Iterable[S], transform: Callable[[S], T], lane: _Lane[T], stop: threading.Event) -> None:
    error: BaseException | None = None
    try:
        iterator = _in_order(batches) if isinstance(batches, Sequence) else iter(batches)
        while True:
            lane.tickets.get()
            if stop.is_set():
                break
            try:
                batch = next(iterator)
            except StopIteration:
                break
            lane.ready.put(transform(batch))
    except BaseException as caught:  # The consumer raises it.
        error = caught
    lane.ready.put(_End(error))


def _in_order(batches: Sequence[S]) -> Iterator[S]:
    """Yields the batches by index: Sequence.__iter__ takes an IndexError, also one of building a batch, for the end."""
    for number in range(len(batches)):
        yield batches[number]


def _shut_down(readers: Sequence[threading.Thread], lanes: Sequence[_Lane[T]], stop: threading.Event) -> None:
    stop.set()
    for lane in lanes:
        lane.tickets.put(None)  # Wakes a reader that waits for a ticket.
    for reader, lane in zip(readers, lanes, strict=True):
        if reader is not threading.current_thread():  # The garbage collector may run this on a reader itself.
            reader.join()
        while not lane.ready.empty():
            lane.ready.get()
        lane.ready.put(_End(None))
