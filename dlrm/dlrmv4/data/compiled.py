"""Compilation by numba: loops over events at C's speed, which leave Python's interpreter lock to others."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Returns the function, compiled at its first call with arguments of these types: about 5 s for all functions that
    build batches.

    Compiled code is not cached on disk: numba would load stale code after a change to a called function in another
    file.
    """
    return cast(Function, numba.njit(nogil=True)(function))
