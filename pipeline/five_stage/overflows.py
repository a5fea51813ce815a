"""Tells the host, before it launches batches, whether their ids exceed the capacity for tables split by rows."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .sharded_modules import Sharded

_POLL_S = 20e-6
_POLL_SHARE = 1 / 8
"""Delay until the next poll, as a share of the wait so far: a long wait takes few polls."""


class Overflows:
    """The overflows of the batches in slots, the same on all ranks.

    Input dists number themselves on the device, and write 2 * number + overflow into pinned memory: one word, so that
    the host, which numbers its launches too, never mistakes an older batch's word for it. An input dist overlaps the
    previous iteration, so that its word arrives while that iteration still runs.
    """

    def __init__(self, modules: Sequence[Sharded], slots: int, device: torch.device) -> None:
        """modules: the called ones."""
        self._modules: list[Any] = [one.module for one in modules if getattr(one.module, "varying_groups", ())]
        self._told = torch.zeros(slots, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        self._launched = 0
        self._numbers = [0] * slots

    @property
    def possible(self) -> bool:
        """Whether any table has a capacity."""
        return len(self._modules) > 0

    @property
    def nbytes(self) -> int:
        """Bytes that input dists by capacity keep, besides the batches in slots."""
        return sum(module.row_capacity_bytes for module in self._modules)

    @contextmanager
    def told(self, slot: int) -> Iterator[None]:
        """Makes one whole input dist of all modules, within the block, use capacities; reports its overflow at the
        end."""
        with ExitStack() as stack:
            started = [stack.enter_context(module.by_capacity()) for module in self._modules]
            yield
            if self._modules:
                overflows = [of.overflow for of_module in started for of in of_module]
                self._number += 1
                word = self._number * 2 + torch.stack(overflows).max()
                self._told[slot].copy_(word, non_blocking=True)

    def launched(self, slot: int) -> None:
        """Counts an input dist into a slot: one that just ran, or that a graph was just launched with."""
        self._launched += 1
        self._numbers[slot] = self._launched

    def of(self, slot: int) -> bool:
        """Returns whether the batch in a slot has overflowed; waits for its input dist, but for nothing after it.
        RuntimeError if the device has failed: it then writes nothing, and only a query reports the failure."""
        began = time.monotonic()
        while (word := int(self._told[slot])) // 2 != self._numbers[slot]:
            if torch.cuda.is_initialized():
                torch.cuda.current_stream().query()
            time.sleep(max(_POLL_S, _POLL_SHARE * (time.monotonic() - began)))
        return bool(word % 2)
