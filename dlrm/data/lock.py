"""A lock on a folder that a program writes, so that no two write it at once."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGGER = logging.getLogger(__name__)
_GENERATING = "another process is generating here: wait for it, or choose another directory"


@contextmanager
def locked(path: Path, taken: str = _GENERATING) -> Iterator[None]:
    """Holds the lock of a file, which is made where there is none and stays. ValueError, which says `taken`, if another
    writer holds it. Warns of a file system without locks, and holds none there.

    The kernel releases the lock of a process that ends, however it ends. Whoever removes the file does so inside of the
    body, and after what tells the next writer that there is nothing left to write.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path.parent}: {taken}") from error
        except OSError as error:  # such as Lustre, mounted without its option flock
            why = f"its file system cannot lock a file ({error.strerror})"
            LOGGER.warning("%s: %s: start no other command that writes there", path.parent, why)
        yield
