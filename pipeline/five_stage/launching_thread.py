"""A second host thread that launches work, with PyTorch's per-thread state set as in the caller."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class LaunchingThread:
    """Runs functions in order. Exceptions are raised by the future, with the thread's own traceback.

    It also ends when nothing refers to it any more: see concurrent.futures.ThreadPoolExecutor.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        """device: current in the thread. The caller's CUDA stream is not: tasks choose their own."""
        self._device = device
        enter = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=enter)

    def submit(self, task: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Starts task(...) in the caller's grad mode and autocast state."""
        kind, grad = self._device.type, torch.is_grad_enabled()
        autocast: AbstractContextManager[Any] = nullcontext()
        if torch.is_autocast_enabled(kind):
            cache = torch.is_autocast_cache_enabled()
            autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=cache)

        def run() -> R:
            with torch.set_grad_enabled(grad), autocast:
                return task(*args, **kwargs)

        return self._executor.submit(run)

    def close(self, wait: bool) -> None:
        """Ends the thread after its current work, which other ranks' collectives may need. wait: waits for that."""
        self._executor.shutdown(wait=wait)
