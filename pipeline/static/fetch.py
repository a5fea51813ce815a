"""Batches come from host memory to the device without a copy that the host launches."""

from collections import deque
from typing import Protocol

import torch

from dlrm_bench.kernels.input_dist.fetch import fetch_next


class _Stored(Protocol):
    """A batch in one buffer."""

    storage: torch.Tensor


class BatchFetcher:
    """The host names batches, the device fetches them in that order."""

    def __init__(self, device: torch.device, in_flight: int) -> None:
        """in_flight: number of batches that may be named and not fetched yet, with the next one."""
        self._pin = device.type == "cuda"
        self._addresses = torch.zeros(in_flight, dtype=torch.int64, pin_memory=self._pin)
        self._ring = self._addresses.numpy()  # where an assignment takes the host a tenth of a tensor's
        self._fetched = torch.zeros((), dtype=torch.int64, device=device)
        self.is_new = torch.zeros(1, dtype=torch.int32, device=device)
        """Whether the batch that was fetched last came from the host, 1, or was there already, 0; on the device."""
        self._named = 0
        self._batches: deque[torch.Tensor | None] = deque(maxlen=in_flight)
        """The memory of named batches, for as long as the device may read it."""

    def name(self, batch: _Stored | None) -> None:
        """Names the next batch to fetch; None leaves the present one. The batch is kept until it is fetched."""
        storage = None if batch is None else batch.storage
        if storage is not None and self._pin and not storage.is_pinned():
            storage = storage.pin_memory()
        self._batches.append(storage)
        self._ring[self._named % len(self._ring)] = 0 if storage is None else storage.data_ptr()
        self._named += 1

    def fetch(self, into: _Stored) -> None:
        """Launches the copy of the next named batch, on the current stream."""
        fetch_next(self._addresses, self._fetched, into.storage.view(torch.int32), self.is_new)
