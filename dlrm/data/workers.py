"""Work items in several threads at once: numpy, polars and checksums release the interpreter lock. Or in processes."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from threading import Event, Lock

from dlrm_bench.dlrm.data.steps import Advance


class _StoppedError(Exception):
    """Raised in a work item to end it after another item has failed."""


def run_all(work: Callable[[int, Advance], None], items: Iterable[int], advance: Advance, workers: int) -> None:
    """Runs work(item, advance) for each item, `workers` items at a time, started in order.

    The first error, or an interrupt, ends the other items at their next call of advance, and is raised.
    """
    if workers == 1:
        for item in items:
            work(item, advance)
        return
    lock, stopped = Lock(), Event()

    def advance_together(pieces: float) -> None:
        if stopped.is_set():
            raise _StoppedError
        with lock:
            advance(pieces)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, item, advance_together) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, _StoppedError):
            raise error


@contextmanager
def no_worker_killed(fix: str) -> Iterator[None]:
    """Raises a ValueError, which ends with `fix`, where a process of a ProcessPoolExecutor ended without an answer."""
    try:
        yield
    except BrokenProcessPool:
        raise ValueError(f"a worker process was killed, most likely because memory ran out: {fix}") from None
