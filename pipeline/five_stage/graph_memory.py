"""A bound for the memory of the graphs of stage 3, so that a training that fits without them does not run out of
memory.

A graph holds its memory between replays, when nothing else can use it. The other stages, and batches that no graph
runs, must fit into the rest. Their peak is that before the first capture, when all batches run eagerly; so nothing is
tried out, and memory that was allocated for a short time before counts as theirs too.
"""

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_GIB = 2**30
_READ = 4  # batches of no new size before the first capture whose peak is read: not only then, as users reset peaks


class DeviceMemory(NamedTuple):
    """Bytes of a GPU's memory, by torch's allocator of this process."""

    allocated: int
    peak: int
    """The most that was allocated at a time."""
    reserved: int
    most: int
    """Bytes that the allocator can reserve: its own and free ones."""


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Returns the present memory; None where there are no graphs, as on the CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return DeviceMemory(allocated, peak, reserved, min(free + reserved, allowed))


def input_bytes(fields: Iterable[Any], values: Sequence[Tensor], rows: Sequence[int]) -> int:
    """Returns the bytes of a batch's fields and of `rows` rows of each of its vectors: a measure of its size."""
    of_rows = (n * math.prod(of.shape[1:]) * of.element_size() for of, n in zip(values, rows, strict=True))
    return sum(leaf.nbytes for leaf in fields if isinstance(leaf, Tensor)) + sum(of_rows)


class GraphMemory:
    """The account of one rank's graphs, which share a pool: beside them, a batch that runs eagerly must still fit.

    Sizes are bytes of inputs, to which a batch's memory is taken to be proportional.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batch = self._size = self._peak = self._read = 0
        self._measured = False
        self._idle = self._largest = 0

    @property
    def idle(self) -> int:
        """Bytes that graphs hold and use in replays alone."""
        return self._idle

    def before_eager(self, size: int) -> bool:
        """Records a batch that is to run eagerly. Returns False where it does not fit beside the graphs.

        Asks the device a few times before the first capture, then for batches larger than any before; every capture has
        left room for the others.
        """
        if not self._measured:
            if self._read < _READ or size > self._size:
                self._read_peak()
            self._size = max(self._size, size)
        elif size > self._size:
            self._batch, self._size = self._batch * size // max(self._size, 1), size
            return self._idle == 0 or self.missing() is None
        return True

    def before_capture(self, size: int) -> bool:
        """Returns False where a graph of batches of this size does not fit beside the existing ones.

        It shares their memory if one of them is as large. Blocks of the allocator do not grow: a larger graph shares
        next to nothing, so that it should be captured first, and the smaller ones, again, after it.
        """
        if self._idle == 0 or size <= self._largest:
            return True
        return self.missing(more=self._idle * size // self._largest) is None

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """Measures the memory that a capture inside leaves allocated."""
        torch.cuda.empty_cache()  # the capture does so too, which would hide what it reserves
        before = device_memory(self._device)
        if before is not None and not self._measured:
            self._read_peak()
            self._batch, self._measured = self._peak - before.allocated, True
        yield
        after = device_memory(self._device)
        if before is not None and after is not None:
            self._idle += (after.reserved - before.reserved) - (after.allocated - before.allocated)
        self._largest = max(self._largest, size)

    def missing(self, more: int = 0) -> str | None:
        """Returns a sentence where memory is too little with `more` additional bytes in graphs; None if it is
        enough."""
        now = device_memory(self._device)
        if now is None or now.allocated + self._batch + self._idle + more <= now.most:
            return None
        most, allocated, graphs, batch = (
            f"{of / _GIB:.1f} GiB" for of in (now.most, now.allocated, self._idle + more, self._batch)
        )
        return (
            f"{most} of memory are too little for {allocated} that stay allocated, {graphs} of CUDA graphs and {batch} "
            "that a batch takes without a graph"
        )

    def dropped(self) -> None:
        """Gives the memory of graphs back to the device; they are destroyed, and nothing refers to them any more."""
        self._idle = self._largest = 0
        gc.collect()
        torch.cuda.empty_cache()

    def _read_peak(self) -> None:
        self._read += 1
        now = device_memory(self._device)
        if now is not None:
            self._peak = max(self._peak, now.peak)
