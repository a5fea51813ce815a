"""Triton, if installed; without it the kernels' modules still import, and the plain functions run instead."""

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    # Without a GPU, Triton can only interpret. It reads this variable when it is first imported, so set it here.
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

triton: Any = None
tl: Any = None
with contextlib.suppress(ImportError):
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")


def jit(function: Callable[..., Any]) -> Any:
    """Returns `triton.jit(function)`, or the function itself if Triton is missing: it is then never called."""
    return jit_of_any()(function)


def jit_of_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """Returns a `jit` for kernels that have one binary for all values of these integer parameters.

    For other integers Triton compiles one binary for multiples of 16, one for 1 and one for the rest, and loads it at
    its first launch; the capture of a CUDA graph may refuse that. Name here the parameters whose specialization
    differs between graphs that are captured without a previous run of their work.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(numbers)) if triton is not None else function

    return decorate


def cdiv(count: int, size: int) -> int:
    """Returns the number of blocks of `size` that cover `count`."""
    return -(-count // size)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
