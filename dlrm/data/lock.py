"""A lock on a folder that a program writes, so that no two write it at once."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which is made where there is none and stays; ValueError if another writer holds it.

    The kernel releases the lock of a process that ends, however it ends. Whoever removes the file does so inside of the
    body, and after what tells the next writer that there is nothing left to write.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{path.parent}: another process is generating here: wait for it, or choose another directory"
            ) from error
        yield
