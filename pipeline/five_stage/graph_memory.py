"""A bound for the memory of graphs, so that a training that fits without them does not run out of memory.

A graph holds its memory between replays, when nothing else can use it. The other stages, and batches that run without a
graph, must fit into the rest. Their peak is known from the time before the first capture, when all batches run eagerly;
so nothing has to be tried, and memory that was allocated briefly before counts too.
"""

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_GIB = 2**30
_READ = 4  # number of batches of known size before the first capture whose peak is read: several, as users reset peaks


class DeviceMemory(NamedTuple):
    """Bytes of a GPU's memory, according to this process's torch allocator."""

    allocated: int
    peak: int
    """Peak of the allocated bytes."""
    reserved: int
    most: int
    """Bytes that the allocator can reserve: its own and free ones."""


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Returns the current memory; None if there are no graphs, as on the CPU."""
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
    """The account of one rank's graphs, which share a pool: an eager batch must still fit beside them.

    Sizes are bytes of inputs; a batch's memory is assumed to be proportional to its size.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batch = self._size = self._peak = self._read = 0
        self._measured = False
        self._idle = self._largest = 0

    @property
    def idle(self) -> int:
        """Bytes that graphs hold and use only during replays."""
        return self._idle

    @property
    def what_it_holds(self) -> str:
        """A note for out-of-memory errors."""
        return f'CUDA graphs hold {self._idle / _GIB:.1f} GiB of it: cuda_graph="none" trains without them'

    def before_eager(self, size: int) -> bool:
        """Records a batch that is to run eagerly. Returns False if it does not fit beside the graphs.

        Queries the device a few times before the first capture, then for batches larger than all earlier ones; every
        capture has left enough memory for the others.
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
        """Returns False if a graph of batches of this size does not fit beside the existing ones.

        It shares their memory if one of them is at least as large. The allocator's blocks do not grow: a larger graph
        shares almost nothing, so it should be captured first, and the smaller ones again after it.
        """
        if self._idle == 0 or size <= self._largest:
            return True
        return self.missing(more=self._idle * size // self._largest) is None

    @contextmanager
    def capturing(self, size: int) -> Iterator[None]:
        """Measures the memory that a capture in the body leaves allocated."""
        torch.cuda.empty_cache()  # the capture does this too, which would hide the memory that it reserves
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
        """Returns a message if memory is too small with `more` additional bytes in graphs; None if it suffices."""
        now = device_memory(self._device)
        if now is None or now.allocated + self._batch + self._idle + more <= now.most:
            return None
        most, allocated, graphs, batch = (
            f"{of / _GIB:.1f} GiB" for of in (now.most, now.allocated, self._idle + more, self._batch)
        )
        return (
            f"{most} of memory are too little for {allocated} that stay allocated, {graphs} of CUDA graphs and {batch} "
            "that a batch needs without a graph, by the peak since torch.cuda.reset_peak_memory_stats()"
        )

    def dropped(self) -> None:
        """Returns the memory of graphs to the device, after they have been destroyed and nothing refers to them."""
        self._idle = self._largest = 0
        gc.collect()
        torch.cuda.empty_cache()

    def _read_peak(self) -> None:
        self._read += 1
        now = device_memory(self._device)
        if now is not None:
            self._peak = max(self._peak, now.peak)
