"""Whether batches had more ids than tables split by rows have room for, told to the host before it launches them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .sharded_modules import Sharded

_POLL_S = 20e-6
_POLL_SHARE = 1 / 8
"""Share of the wait so far that passes from one look to the next: a long wait takes few."""


class Overflows:
    """The overflows of the batches in slots, the same on all ranks.

    Input dists number themselves on the device, and write 2 * number + overflow into pinned memory: one word, so that
    the host, which numbers its launches too, never takes an older batch's for it. An input dist runs beside the
    iteration before, so that its word is there while that iteration still runs.
    """

    def __init__(self, modules: Sequence[Sharded], slots: int, device: torch.device) -> None:
        """modules: those called."""
        self._modules: list[Any] = [one.module for one in modules if getattr(one.module, "varying_groups", ())]
        self._told = torch.zeros(slots, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        self._launched = 0
        self._numbers = [0] * slots

    @property
    def possible(self) -> bool:
        """Whether some table has a capacity."""
        return len(self._modules) > 0

    @contextmanager
    def told(self, slot: int) -> Iterator[None]:
        """Makes one whole input dist of all modules, within the block, by capacity; its overflow is told at the end."""
        with ExitStack() as stack:
            started = [stack.enter_context(module.by_capacity()) for module in self._modules]
            yield
            if self._modules:
                overflows = [of.overflow for of_module in started for of in of_module]
                self._number += 1
                word = self._number * 2 + torch.stack(overflows).max()
                self._told[slot].copy_(word, non_blocking=True)

    def launched(self, slot: int) -> None:
        """Counts an input dist into a slot: one that ran just now, or that a graph was just launched with."""
        self._launched += 1
        self._numbers[slot] = self._launched

    def of(self, slot: int) -> bool:
        """Returns whether the batch in a slot has overflowed; waits for its input dist, but for nothing after it.
        RuntimeError where the device has failed: it writes nothing then, and only a question to it says so."""
        began = time.monotonic()
        while (word := int(self._told[slot])) // 2 != self._numbers[slot]:
            if torch.cuda.is_initialized():
                torch.cuda.current_stream().query()
            time.sleep(max(_POLL_S, _POLL_SHARE * (time.monotonic() - began)))
        return bool(word % 2)
