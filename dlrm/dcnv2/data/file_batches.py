"""One rank's batches from day files, each read and checked on demand."""

import math
from collections.abc import Sequence
from copy import copy
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.batch import Batch, BatchLayout
from dlrm_bench.dlrm.dcnv2.config import ModelConfig
from dlrm_bench.dlrm.dcnv2.data.criteo import Day


class FileBatches(Sequence[Batch]):
    """One rank's batches of one pass over days: each is read into its own memory on demand, and its values are checked.
    Thread-safe."""

    def __init__(
        self,
        parts: Sequence[tuple[Day, int]],
        model: ModelConfig,
        numbers: range,
        rank: int,
        world_size: int,
        batch_size: int,
        pin: bool,
    ) -> None:
        """parts: days, each with the number of its first samples that belong to the pass. numbers: of the global
        batches. pin: page-locked memory."""
        assert 0 <= rank < world_size
        self._parts, self._model, self._numbers, self._pin = parts, model, numbers, pin
        self._rank, self._world_size = rank, world_size
        self._layout = layout = BatchLayout(batch_size, model)
        sizes, id_bytes = np.array(model.multi_hot_sizes), model.tables.id_bytes
        labels_start = layout.places["labels"].start
        first_ids = layout.places["ids"].start + id_bytes * batch_size * (sizes.cumsum() - sizes)
        self._starts = np.array([layout.places["dense"].start, labels_start, *first_ids])
        """First bytes of dense features, labels, and each feature's ids."""
        self._sample_bytes = np.array([4 * model.dense_in_features, 4, *(id_bytes * sizes)])
        # Checks 32-bit words from the labels on as unsigned numbers, as which negative ones are large: the start of
        # each part with a separate limit, and the largest number that the part may hold. Padding after the labels may
        # be anything, and so may raw ids, which are not read for that.
        limits = {labels_start: 1}
        self._limited = layout.places["labels"]
        if not model.raw_ids:
            limits |= {layout.places["labels"].stop: 2**32 - 1}
            limits |= {int(first): rows - 1 for first, rows in zip(first_ids, model.rows, strict=True)}
            self._limited = slice(labels_start, layout.end)
        self._words = (np.array([*limits]) - labels_start) // 4
        self._largest = np.array([*limits.values()], dtype=np.uint32)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> "FileBatches": ...

    def __getitem__(self, index: int | slice) -> "Batch | FileBatches":
        """Reads batch number `index`, or returns the batches of a slice unread.

        ValueError names file, feature, value and sample of the first bad value.
        """
        if isinstance(index, slice):
            some = copy(self)
            some._numbers = self._numbers[index]
            return some
        batch = Batch.of_layout(self._layout, self._pin)
        self._fill(batch, (self._numbers[index] * self._world_size + self._rank) * self._layout.batch_size)
        return batch

    def _fill(self, batch: Batch, start: int) -> None:
        """Fills a batch with samples from position `start` of the concatenated parts, and pads past their end."""
        memory = batch.storage.numpy()
        size = self._layout.batch_size
        read = []
        filled = 0
        for day, samples in self._parts:
            first, last = max(start, 0), min(start + size, samples)
            if first < last:
                day.read(first, last, memory, self._starts + self._sample_bytes * filled)
                read.append((day, first, filled, last - first))
                filled += last - first
            start -= samples
        batch.num_valid = filled
        if filled < size:
            for array in self._arrays(memory, filled, size - filled):
                array[:] = 0
        if not self._plausible(memory):
            for day, first, begin, count in read:
                dense, labels, *ids = self._arrays(memory, begin, count)
                day.check_values(first, dense, labels[:, 0], ids)
            raise AssertionError("check_values found nothing")
        labels = memory[self._layout.places["labels"]]
        labels.view(np.float32)[:] = labels.view(np.int32)

    def _plausible(self, memory: NDArray[np.uint8]) -> bool:
        """Whether Day.check_values finds nothing.

        Uses two passes, one over the dense features and one over all other checked words: each pass releases Python's
        interpreter lock and has to reacquire it. No sum of finite float32 numbers exceeds float64's range.
        """
        largest = np.maximum.reduceat(memory[self._limited].view(np.uint32), self._words)
        dense = memory[self._layout.places["dense"]].view(np.float32).sum(dtype=np.float64)
        return math.isfinite(dense) and bool((largest <= self._largest).all())

    def _arrays(self, memory: NDArray[np.uint8], begin: int, count: int) -> list[NDArray[Any]]:
        """Returns samples [begin, begin + count) of a batch: dense [n, dense_in_features], labels [n, 1] as in the
        files, and ids [n, multi_hot_sizes[f]] of each feature."""
        arrays = []
        for i, (start, size) in enumerate(zip(self._starts, self._sample_bytes, strict=True)):
            part = memory[start + begin * size : start + (begin + count) * size]
            dtype = np.float32 if i == 0 else np.int64 if i > 1 and self._model.raw_ids else np.int32
            arrays.append(part.view(dtype).reshape(count, -1))
        return arrays
