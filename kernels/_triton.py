"""Triton where it is installed; without it the kernels' modules still import, and plain functions do their work."""

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    # Without a GPU, Triton can only interpret. It decides when it is first imported, hence here.
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

triton: Any = None
tl: Any = None
with contextlib.suppress(ImportError):
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or nothing where Triton is missing: the function is then never called."""
    return triton.jit(function) if triton is not None else function


def cdiv(count: int, size: int) -> int:
    """Returns the number of blocks of `size` that cover `count`."""
    return -(-count // size)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
