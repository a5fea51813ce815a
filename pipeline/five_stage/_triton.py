"""Triton, if installed; without it modules of kernels still import, and nothing calls the kernels."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

triton: Any = None
tl: Any = None
with contextlib.suppress(ImportError):
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")


def jit(function: Callable[..., Any]) -> Any:
    """Returns `triton.jit(function)`, or the function itself if Triton is missing: it is then never called."""
    return triton.jit(function) if triton is not None else function
