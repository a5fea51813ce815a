"""The anchors that each rank trains on in each step: the reference's order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex


@dataclass(frozen=True, slots=True)
class Order:
    """Steps through windows [first, end), in turn, on `world_size` ranks of `local_batch` samples.

    Inside of a window a global batch is consecutive anchors in order of user and time, of which rank r has every
    world_size-th from the r-th on. The rest of a window, too small for a whole global batch, is dropped (tail). Nothing
    is searched: a step's anchors are found in the index in microseconds, wherever a run resumes.
    """

    index: WindowIndex
    first: int
    end: int
    world_size: int
    local_batch: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end <= len(self.index):
            raise ValueError(f"windows {self.first} to {self.end}: the data has windows 0 to {len(self.index)}")
        assert self.world_size > 0
        assert self.local_batch > 0

    @property
    def anchors(self) -> int:
        """Number of all anchors of the windows, with dropped ones: MLPerf's train_samples or eval_samples."""
        return int(self.index.windows[self.first : self.end, 1].sum())

    def steps_of_windows(self) -> NDArray[np.int64]:
        """Steps of each window, [end - first]."""
        return self.index.windows[self.first : self.end, 1] // (self.world_size * self.local_batch)

    def __len__(self) -> int:
        return int(self.steps_of_windows().sum())

    def place(self, step: int) -> tuple[int, int]:
        """A step's window, and its number among that window's steps."""
        if not 0 <= step < len(self):
            raise ValueError(f"step {step}: windows {self.first} to {self.end} have {len(self)} steps")
        ends = np.cumsum(self.steps_of_windows())
        window = int(np.searchsorted(ends, step, side="right"))
        return self.first + window, step - int(ends[window - 1] if window else 0)

    def batch(self, step: int, rank: int) -> NDArray[np.int64]:
        """A rank's anchors of a step, [local_batch]."""
        window, number = self.place(step)
        first = number * self.local_batch * self.world_size + rank
        return self.index.select(window, first + self.world_size * np.arange(self.local_batch))

    def global_batch(self, step: int) -> NDArray[np.int64]:
        """The anchors of all ranks in a step, [world_size * local_batch], in order of user and time."""
        window, number = self.place(step)
        size = self.local_batch * self.world_size
        return self.index.select(window, number * size + np.arange(size))

    def tail(self, window: int, rank: int) -> NDArray[np.int64]:
        """A rank's share of the anchors that a window's steps leave out, [0 to local_batch].

        For an evaluation of every sample; the reference drops them.
        """
        anchors = self.index.anchors_of(window)
        whole = anchors // (self.world_size * self.local_batch) * self.world_size * self.local_batch
        return self.index.select(window, np.arange(whole + rank, anchors, self.world_size))
