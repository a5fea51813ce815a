"""Writes the reference's cache of events in one pass over users, in memory that does not grow with the events."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dlrm_bench.dlrm.data.lock import locked
from dlrm_bench.dlrm.data.npy import write_header
from dlrm_bench.dlrm.dlrmv4.data.cache import COLUMNS, META, READY
from dlrm_bench.dlrm.dlrmv4.data.limits import LIKE, LISTEN, LISTEN_PLUS_PERCENT, Limits

LOCK = "writing.lock"
"""Locked by the writer of a cache; gone once the cache is complete."""


@dataclass(kw_only=True, slots=True, eq=False)
class Events:
    """Events of whole users, by uid and then time; all columns [N]."""

    uid: NDArray[np.int64]
    item: NDArray[np.int64]
    timestamp: NDArray[np.int64]
    event_type: NDArray[np.int64]
    is_organic: NDArray[np.int8]
    played_ratio: NDArray[np.float32]
    """Percent; 0 where it is no listen."""


class ColumnWriter:
    """A 1-D .npy file that grows; its bytes are those of numpy.save."""

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0
        self._file: IO[bytes] = path.open("wb")
        write_header(self._file, self.dtype, (0,))
        self._start = self._file.tell()

    def append(self, values: NDArray[Any]) -> None:
        """More values, of this very dtype."""
        assert values.dtype == self.dtype, (self._file.name, values.dtype)
        self._file.write(np.ascontiguousarray(values).data)
        self.length += len(values)

    def close(self) -> None:
        """Write the length; numpy pads its headers so that any length fits."""
        self._file.seek(0)
        write_header(self._file, self.dtype, (self.length,))
        assert self._file.tell() == self._start
        self._file.close()


class CacheWriter:
    """Files of a Cache, filled user by user; a context manager, whose end without an error makes them complete.

    Memory: 24 bytes a user, and eight bytes up to the largest uid twice. OSError where the disk is full.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        """Locks the folder until the end; ValueError if another process writes it, or it holds a complete cache, which
        is left as it is."""
        _require_incomplete(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            held.enter_context(locked(folder / LOCK))
            _require_incomplete(folder)  # again: another writer may have just ended
            self.folder, self.limits = folder, limits
            self._open()
            self._held = held.pop_all()

    def _open(self) -> None:
        folder, limits = self.folder, self.limits
        self._remove_index()  # of what was there before
        self._columns = {name: ColumnWriter(folder / f"{name}.npy", dtype) for name, dtype in COLUMNS.items()}
        self._positions = ColumnWriter(folder / f"positions_{limits.anchors_name}.npy", np.int64)
        self._anchor_timestamps = ColumnWriter(folder / f"anchor_ts_{limits.anchors_name}.npy", np.int64)
        self._uids: list[NDArray[np.int64]] = []
        self._starts: list[NDArray[np.int64]] = []
        self._last_uid = -1

    @property
    def events(self) -> int:
        """Events so far."""
        return self._columns["flat_uid"].length

    def append(self, events: Events) -> None:
        """Users whose uids are above all before, each with all of its events."""
        if not len(events.uid):
            return
        change = np.diff(events.uid, prepend=self._last_uid)
        first = np.flatnonzero(change)
        assert (change >= 0).all(), "uids must not descend"
        assert change[0] > 0, "a user's events must come at once"
        assert (np.diff(events.timestamp)[change[1:] == 0] >= 0).all(), "a user's events must be in order of time"
        rank = np.arange(len(events.uid)) - np.repeat(first, np.diff(first, append=len(events.uid)))
        listen = events.event_type == LISTEN
        anchors = np.flatnonzero(listen & (rank >= self.limits.min_history))
        self._positions.append(anchors + self.events)
        self._anchor_timestamps.append(events.timestamp[anchors])
        self._uids.append(events.uid[first])
        self._starts.append(first + self.events)
        plus = events.played_ratio >= LISTEN_PLUS_PERCENT
        columns = (
            *(events.uid, events.item, events.timestamp, events.event_type, events.played_ratio),
            *(listen & plus, events.event_type == LIKE, listen & ~plus, events.is_organic),
        )
        self._last_uid = int(events.uid[-1])
        for writer, column in zip(self._columns.values(), columns, strict=True):
            writer.append(column)

    def _remove_index(self) -> None:
        for path in self.folder.glob("windows_*.npy"):
            path.unlink()

    def _finish(self) -> None:
        uids, starts = _joined(self._uids), _joined(self._starts)
        user_start = np.full(self._last_uid + 1, -1, dtype=np.int64)
        user_end = user_start.copy()
        user_start[uids] = starts
        user_end[uids] = np.append(starts[1:], self.events)
        for name, array in (("user_start", user_start), ("user_end", user_end), ("unique_uids", uids)):
            np.save(self.folder / f"{name}.npy", array)
        meta: dict[str, Any] = {"num_users": len(uids), "total_events": self.events}
        if self.limits != Limits():  # else the file is the reference's to the byte
            meta["limits"] = self.limits.as_dict()
        (self.folder / META).write_text(json.dumps(meta))
        self._remove_index()  # of a reader that still had the previous cache open
        (self.folder / READY).touch()
        (self.folder / LOCK).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._held:
            for writer in (*self._columns.values(), self._positions, self._anchor_timestamps):
                writer.close()
            if kind is None:
                if not self._uids:
                    raise ValueError(f"{self.folder}: there are no events to write")
                self._finish()


def _require_incomplete(folder: Path) -> None:
    if (folder / READY).exists():
        raise ValueError(f"{folder} holds a complete cache: delete it, or choose another folder")


def _joined(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
