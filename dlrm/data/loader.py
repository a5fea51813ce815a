"""A reader thread that keeps batches ready ahead of the training loop."""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Self, TypeVar

from dlrm_bench.dlrm.data.batch import Batch

T = TypeVar("T")


class _End:
    """Comes after the last item; `error` is what stopped the reader, if anything did."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Iterator[T], Generic[T]):
    """Iterates over `transform(batch) for batch in batches`, up to `depth` results ahead, on a thread of its own.

    Order is kept. An exception of `batches` or `transform` arrives in its turn, after the results before it, as the
    same object with the reader's traceback. Close it, or use it as a context manager; closing waits for the batch in
    work, drops what is ready, and ends the iteration. One left open is closed when collected, or at exit.
    """

    def __init__(self, batches: Iterable[Batch], transform: Callable[[Batch], T], depth: int) -> None:
        assert depth > 0
        # Two C queues rather than one bounded Queue, whose Python locks would cost the launching thread several
        # microseconds a batch: the reader takes a ticket for each item, the consumer gives it back.
        self._ready: SimpleQueue[T | _End] = SimpleQueue()
        self._tickets: SimpleQueue[None] = SimpleQueue()
        for _ in range(depth):
            self._tickets.put(None)
        stop = threading.Event()
        # The thread holds no reference to self. Daemon, because Python joins other threads before it runs the
        # finalizer at exit, and would wait for ever; the finalizer then stops it while the interpreter still lives.
        thread = threading.Thread(
            target=_read,
            args=(batches, transform, self._ready, self._tickets, stop),
            name="batch-reader",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _shut_down, thread, self._ready, self._tickets, stop)
        thread.start()

    def __next__(self) -> T:
        item = self._ready.get()
        if item.__class__ is _End:
            self._finish(item)
        self._tickets.put(None)
        return item  # type: ignore[return-value]  # mypy does not narrow on __class__, which beats isinstance here

    def close(self) -> None:
        """Stop the reader and wait for its thread; iteration is over. Closing twice does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _finish(self, end: _End) -> None:
        self._ready.put(end)  # For the next call.
        raise StopIteration if end.error is None else end.error


def _read(
    batches: Iterable[Batch],
    transform: Callable[[Batch], T],
    ready: "SimpleQueue[T | _End]",
    tickets: "SimpleQueue[None]",
    stop: threading.Event,
) -> None:
    error: BaseException | None = None
    try:
        iterator = iter(batches)
        while True:
            tickets.get()
            if stop.is_set():
                break
            try:
                batch = next(iterator)
            except StopIteration:
                break
            ready.put(transform(batch))
    except BaseException as caught:  # The consumer raises it.
        error = caught
    ready.put(_End(error))


def _shut_down(
    thread: threading.Thread, ready: "SimpleQueue[T | _End]", tickets: "SimpleQueue[None]", stop: threading.Event
) -> None:
    stop.set()
    tickets.put(None)  # Wakes a reader that waits for room.
    if thread is not threading.current_thread():  # The collector may run this on the reader itself.
        thread.join()
    while not ready.empty():
        ready.get()
    ready.put(_End(None))
