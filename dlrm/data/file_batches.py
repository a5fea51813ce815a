"""One rank's batches out of day files, each read and checked when it is asked for."""

from collections.abc import Sequence
from copy import copy
from typing import overload

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.config import ModelConfig
from dlrm_bench.dlrm.data.batch import Batch
from dlrm_bench.dlrm.data.criteo import Day


class FileBatches(Sequence[Batch]):
    """One rank's batches of one pass over days: each is read when it is asked for, into memory of its own, and its
    values are checked. Any number of threads may ask."""

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
        """parts: days, each with how many of its first samples belong to the pass. numbers: of the global batches.
        pin: page-locked memory."""
        assert 0 <= rank < world_size
        self._parts, self._model, self._numbers, self._pin = parts, model, numbers, pin
        self._rank, self._world_size, self._batch_size = rank, world_size, batch_size
        hots = model.multi_hot_sizes
        self._first_ids = [batch_size * sum(hots[:feature]) for feature in range(len(hots))]
        self._rows = np.asarray(model.rows, dtype=np.uint32)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> "FileBatches": ...

    def __getitem__(self, index: int | slice) -> "Batch | FileBatches":
        """Reads batch number `index`, or gives those of a slice unread.

        ValueError names file, feature, value and sample of the first bad value.
        """
        if isinstance(index, slice):
            some = copy(self)
            some._numbers = self._numbers[index]
            return some
        batch = Batch.empty(self._batch_size, self._model, self._pin)
        self._fill(batch, (self._numbers[index] * self._world_size + self._rank) * self._batch_size)
        return batch

    def _fill(self, batch: Batch, start: int) -> None:
        """Fill a batch with samples from position `start` of the concatenated parts, and pad where these end."""
        dense, labels, ids = batch.dense.numpy(), batch.labels.numpy(), batch.ids.numpy()
        read = []
        filled = 0
        for day, samples in self._parts:
            first, last = max(start, 0), min(start + len(labels), samples)
            if first < last:
                rows = slice(filled, filled + last - first)
                arrays = dense[rows], labels[rows], self._blocks(ids, rows)
                day.read(first, last, *arrays)
                read.append((day, first, arrays))
                filled = rows.stop
            start -= samples
        batch.num_valid = filled
        if filled < len(labels):
            rows = slice(filled, len(labels))
            for array in (dense[rows], labels[rows], *self._blocks(ids, rows)):
                array[:] = 0
        if not self._plausible(dense, labels, ids):
            for day, first, arrays in read:
                day.check_values(first, *arrays)
            raise AssertionError("check_values finds nothing")

    def _plausible(self, dense: NDArray[np.float32], labels: NDArray[np.float32], ids: NDArray[np.int32]) -> bool:
        """Whether Day.check_values finds nothing, in one pass over the ids of all features."""
        largest = np.maximum.reduceat(ids.view(np.uint32), self._first_ids)  # Unsigned, negative numbers are large.
        return bool((largest < self._rows).all() and ((labels == 0) | (labels == 1)).all() and np.isfinite(dense).all())

    def _blocks(self, ids: NDArray[np.int32], rows: slice) -> list[NDArray[np.int32]]:
        """The ids of some samples: one [n, multi_hot_sizes[f]] for each feature."""
        n = rows.stop - rows.start
        return [
            ids[first + rows.start * hot : first + rows.stop * hot].reshape(n, hot)
            for first, hot in zip(self._first_ids, self._model.multi_hot_sizes, strict=True)
        ]
