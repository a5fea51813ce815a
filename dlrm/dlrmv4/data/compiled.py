"""Compilation by numba: loops over events at C's speed, which leave Python's interpreter lock to others."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function, compiled when it is first called with arguments of these types: 3 s for all that build batches.

    It is not kept on disk: numba would take up an old one after a change to a function of another file that it calls.
    """
    return cast(Function, numba.njit(nogil=True)(function))
