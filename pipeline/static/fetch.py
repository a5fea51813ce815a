"""Fetches batches from host memory to the device without a copy launched by the host."""

from collections import deque
from typing import Protocol

import torch

from dlrm_bench.kernels.input_dist.fetch import fetch_next


class _Stored(Protocol):
    """A batch in one buffer."""

    storage: torch.Tensor


class BatchFetcher:
    """Fetches batches in the order in which the host names them."""

    def __init__(self, device: torch.device, in_flight: int) -> None:
        """in_flight: maximum number of batches named but not yet fetched, including the next one."""
        self._pin = device.type == "cuda"
        self._addresses = torch.zeros(in_flight, dtype=torch.int64, pin_memory=self._pin)
        self._ring = self._addresses.numpy()  # an assignment takes the host a tenth of the time of a tensor's
        self._fetched = torch.zeros((), dtype=torch.int64, device=device)
        self.is_new = torch.zeros(1, dtype=torch.int32, device=device)
        """1 if the last fetched batch came from the host, 0 if it was already there; on the device."""
        self._named = 0
        self._batches: deque[torch.Tensor | None] = deque(maxlen=in_flight)
        """The memory of named batches, kept as long as the device may read it."""

    def name(self, batch: _Stored | None) -> None:
        """Names the next batch to fetch; None keeps the current one. The batch is kept until it is fetched."""
        storage = None if batch is None else batch.storage
        if storage is not None and self._pin and not storage.is_pinned():
            storage = storage.pin_memory()
        self._batches.append(storage)
        self._ring[self._named % len(self._ring)] = 0 if storage is None else storage.data_ptr()
        self._named += 1

    def fetch(self, into: _Stored) -> None:
        """Launches the copy of the next named batch, on the current stream."""
        fetch_next(self._addresses, self._fetched, into.storage.view(torch.int32), self.is_new)
