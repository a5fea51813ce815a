"""Compilation by numba: loops over events at C's speed, which leave Python's interpreter lock to others."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function, compiled when it is first called with arguments of these types, and kept beside its source."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))
