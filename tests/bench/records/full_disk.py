"""A disk on which files cannot grow beyond a size, so that writing fails half-way."""

import contextlib
import resource
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def fails_after(size: int) -> Iterator[None]:
    """Lets the one write within fail after `size` bytes of its file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
