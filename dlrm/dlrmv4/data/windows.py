"""The index of windows: which anchors each window holds, prepared once, so that no run looks for them.

For each window, the reference compares the times of all 2.29 billion anchors with the window's bounds, and once more
for all windows to count training samples: 825 s at the median of its published runs, inside the clock. In
order of user and time, a window is many short ranges of consecutive anchors. This index lists them: two .npy files in
the folder of the cache, `ranges_*` int64 [R, 2] (a range's first anchor, and how many anchors of its window lie before
it), sorted by window, and `windows_*` int64 [W, 2] (a window's first range, and its anchors).

The rules permit this preparation: MLPerf's training rules exclude converting and reformatting a data set from the
clock, and the index depends only on the anchors' times. The index contains no sample, and no sample is read before the
run starts. The reference has an equivalent option by now (use_offline_ts_indices, mlcommons/training#907). We found no
rule that names this index for this benchmark: a submitter should disclose that it was prepared.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.lock import locked
from dlrm_bench.dlrm.data.npy import COPY_AGAIN, write_header
from dlrm_bench.dlrm.dlrmv4.data.cache import Cache, map_column
from dlrm_bench.dlrm.dlrmv4.data.compiled import compiled
from dlrm_bench.dlrm.dlrmv4.data.limits import Limits

LOCK = "windows.lock"
"""Locked by the process that prepares an index; gone once the index is complete."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowIndex:
    """Anchors of W windows."""

    ranges: NDArray[np.int64]
    """First anchor of a range, and anchors of its window before it, [R, 2]."""
    windows: NDArray[np.int64]
    """First range of a window, and its anchors, [W, 2]; in memory."""
    path: Path = Path()
    """File of the ranges."""

    @classmethod
    def open(cls, cache: Cache) -> "WindowIndex":
        """Map the index of a cache; ValueError if it was not prepared, or for other anchors, or is damaged."""
        ranges_path, windows_path = paths(cache.folder, cache.limits)
        if not windows_path.exists():
            raise ValueError(f"{windows_path} does not exist: prepare the index of windows with dlrm-bench data check")
        ranges, windows = (map_column(path, np.int64, 2) for path in (ranges_path, windows_path))
        wrong = _first_fault(ranges, windows, len(cache.positions))
        if wrong is not None:
            raise ValueError(f"{windows_path} {wrong}: delete it and prepare it again with dlrm-bench data check")
        return cls(ranges, np.array(windows), ranges_path)

    def __len__(self) -> int:
        return len(self.windows)

    def anchors_of(self, window: int) -> int:
        """Returns the number of anchors of a window."""
        return int(self.windows[window, 1])

    def select(self, window: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Anchors at these places, 0 to anchors_of - 1, of a window's order. ValueError if the ranges are damaged."""
        assert places.size == 0 or 0 <= places.min() <= places.max() < self.anchors_of(window)
        end = int(self.windows[window + 1, 0]) if window + 1 < len(self) else len(self.ranges)
        anchors, whole = _select(self.ranges, int(self.windows[window, 0]), end, places, int(self.windows[:, 1].sum()))
        if not whole:
            raise ValueError(
                f"{self.path}: the ranges of window {window} are damaged: delete the file of windows beside it, and "
                "prepare both again with dlrm-bench data check"
            )
        return anchors


def _first_fault(ranges: NDArray[np.int64], windows: NDArray[np.int64], anchors: int) -> str | None:
    """Returns how an index does not fit its cache of so many anchors, None where it does. Of the ranges it reads the
    first and the last."""
    if windows.shape[1] != 2 or ranges.shape[1] != 2:
        return f"has shape {windows.shape}, and its ranges {ranges.shape}, instead of two columns"
    if windows[:, 1].sum() != anchors:
        return f"has {windows[:, 1].sum()} anchors, and the cache {anchors}"
    bounds = np.append(windows[:, 0], len(ranges))
    if not len(ranges) or bounds[0] != 0 or (np.diff(bounds) < 0).any() or windows[:, 1].min() < 0:
        return f"does not divide the {len(ranges)} ranges among its windows"
    for first, before in (ranges[0], ranges[-1]):
        if not 0 <= before <= first < anchors:
            return f"is of ranges that begin at anchor {first}, and the cache has anchors 0 to {anchors - 1}"
    return None


def paths(folder: Path, limits: Limits) -> tuple[Path, Path]:
    """Files of the ranges and of the windows."""
    name = f"{limits.anchors_name}_{limits.window_seconds}s.npy"
    return folder / f"ranges_{name}", folder / f"windows_{name}"


def prepare_windows(cache: Cache) -> WindowIndex:
    """Writes the index of a cache where there is none, and opens it; ValueError where another process is writing it.

    Reads the anchors' times three times, 18 GB of MLPerf's data each, at the disk's speed or, on one core, 96 million
    anchors a second (measured). Memory: the maps' pages, which the system drops where memory is short. Both files
    appear complete, the windows' last.
    """
    _, windows_path = paths(cache.folder, cache.limits)
    if not windows_path.exists():
        lock = cache.folder / LOCK
        with locked(lock, "another process prepares the index of windows: wait for it, then repeat the command"):
            if not windows_path.exists():  # again: another process may have just ended
                _write(cache)
            lock.unlink(missing_ok=True)
    return WindowIndex.open(cache)


def _write(cache: Cache) -> None:
    times, seconds = cache.anchor_timestamp, cache.limits.window_seconds
    if not len(cache.positions):
        raise ValueError(
            f"{cache.folder} has no anchors: no user has more than {cache.limits.min_history} events; lower the "
            "limits or generate more events a user"
        )
    start, end = _extent(times)
    if not 0 <= start <= end < 1 << 31:
        path = cache.folder / f"anchor_ts_{cache.limits.anchors_name}.npy"
        raise ValueError(f"{path} has times from {start} to {end} s, and times fit 31 bits: {COPY_AGAIN}")
    windows = np.zeros(((end - start) // seconds + 1, 2), dtype=np.int64)
    _count(times, start, seconds, windows)
    count = int(windows[:, 0].sum())
    windows[:, 0] = np.cumsum(windows[:, 0]) - windows[:, 0]
    ranges_path, windows_path = paths(cache.folder, cache.limits)
    partial = ranges_path.with_suffix(".partial")
    ranges = open_memmap(partial, "w+", np.int64, (count, 2))
    with partial.open("r+b") as file:  # A full disk is an error here; under a map it would be a signal.
        os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
    _fill(times, start, seconds, windows[:, 0].copy(), np.zeros(len(windows), dtype=np.int64), ranges)
    ranges.flush()
    os.replace(partial, ranges_path)
    partial = windows_path.with_suffix(".partial")
    with partial.open("wb") as file:  # np.save would not report that the disk is full
        write_header(file, windows.dtype, windows.shape)
        file.write(windows.data)
    os.replace(partial, windows_path)


@compiled
def _select(
    ranges: NDArray[np.int64], first: int, end: int, places: NDArray[np.int64], anchors: int
) -> tuple[NDArray[np.int64], bool]:
    """Returns the anchors at these places of a window, whose ranges are [first, end), and whether all of them are below
    `anchors`. Compiled, to read the mapped file without the interpreter's lock (builder._gather)."""
    found = np.empty_like(places)
    for i in range(len(places)):
        low, high = first, end  # the last range with at most places[i] anchors before it is in [low - 1, high - 1]
        while low < high:
            middle = (low + high) // 2
            if ranges[middle, 1] <= places[i]:
                low = middle + 1
            else:
                high = middle
        if low == first:
            return found, False
        found[i] = ranges[low - 1, 0] + places[i] - ranges[low - 1, 1]
        if not 0 <= found[i] < anchors:
            return found, False
    return found, True


@compiled
def _extent(times: NDArray[np.int64]) -> tuple[int, int]:
    """The earliest and the latest."""
    least = greatest = times[0]
    for time in times:
        least, greatest = min(least, time), max(greatest, time)
    return least, greatest


@compiled
def _count(times: NDArray[np.int64], start: int, seconds: int, windows: NDArray[np.int64]) -> None:
    """Adds up ranges and anchors of each window."""
    last = -1
    for time in times:
        window = (time - start) // seconds
        windows[window, 0] += window != last
        windows[window, 1] += 1
        last = window


@compiled
def _fill(
    times: NDArray[np.int64],
    start: int,
    seconds: int,
    next_range: NDArray[np.int64],
    before: NDArray[np.int64],
    ranges: NDArray[np.int64],
) -> None:
    """Writes the ranges; next_range [W] begins as each window's first, before [W] as zeros."""
    last = -1
    for anchor in range(len(times)):
        window = (times[anchor] - start) // seconds
        if window != last:
            ranges[next_range[window], 0] = anchor
            ranges[next_range[window], 1] = before[window]
            next_range[window] += 1
        before[window] += 1
        last = window
