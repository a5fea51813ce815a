"""Caches of device tensors for batches of one size."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_CACHED = 64


def bound(cache: dict[Any, Any]) -> None:
    """Bounds a cache, so that varying batch sizes do not fill the memory. Must be called before adding an entry."""
    if len(cache) >= _CACHED:
        cache.clear()


class BatchSizeCache(Generic[T]):
    """A bounded cache of values for batches of one size; each value is read on the stream on which it was created. The
    first size's entry is kept permanently if graphs read its memory."""

    def __init__(self) -> None:
        self.replayed: T | None = None
        """The entry of the first size, kept permanently, if it has graphs."""
        self._replayed_size: Hashable = None
        self._made: dict[Hashable, T] = {}
        self._captured: dict[Hashable, T] = {}

    def __len__(self) -> int:
        """Returns the number of entries that may be dropped."""
        return len(self._made)

    def values(self) -> list[T]:
        """Returns all entries, each once."""
        entries = [*self._made.values(), *self._captured.values(), *([] if self.replayed is None else [self.replayed])]
        return list({id(entry): entry for entry in entries}.values())

    def get(self, size: Hashable, device: torch.device, make: Callable[[], T], replay: Callable[[T], None] | None) -> T:
        """Returns the value for this size, created by `make` if new. replay: adds graphs to the first one."""
        if self.replayed is not None and self._replayed_size == size:
            return self.replayed
        if self.replayed is None and replay is not None:
            made = make()
            replay(made)
            self.replayed, self._replayed_size = made, size
            return made
        # The stream on which a dropped entry was created reuses its memory, so it must be its only reader.
        key = size, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if key in self._captured:
            return self._captured[key]
        if key not in self._made:
            bound(self._made)
            self._made[key] = make()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured[key] = self._made[key]  # its memory is the graph's from now on
        return self._made[key]
