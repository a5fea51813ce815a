"""Builds packed batches: compiled loops over the mapped columns, on reader threads, off the training's path.

A user's history is found once per batch, by a walk back from the user's first anchor, and then slides: each anchor adds
the events since the previous anchor, and each pool drops its oldest events.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_bench.dlrm.data.npy import COPY_AGAIN
from dlrm_bench.dlrm.dlrmv4.data.cache import COLUMNS, Cache
from dlrm_bench.dlrm.dlrmv4.data.collect import NO_ROOM, collect
from dlrm_bench.dlrm.dlrmv4.data.compiled import compiled
from dlrm_bench.dlrm.dlrmv4.data.crosses import context_rows
from dlrm_bench.dlrm.dlrmv4.data.item_maps import MORE_EVENT_ROWS, ItemMaps
from dlrm_bench.dlrm.dlrmv4.data.limits import CONTEXT, Limits, Rows
from dlrm_bench.dlrm.dlrmv4.data.packed import (
    CANDIDATE,
    CONTEXT_ROWS,
    END,
    LABEL,
    LENGTH,
    QUERY,
    SAMPLE_ROWS,
    Packed,
    PackedLayout,
)
from dlrm_bench.dlrm.dlrmv4.data.windows import WindowIndex

WHOLE = -1


class BatchBuilder:
    """Builds batches of a cache; any number of threads may call it at once."""

    def __init__(self, cache: Cache, maps: ItemMaps, rows: Rows | None = None, *, pin: bool = False) -> None:
        """rows: of the model's tables, by default MLPerf's. pin: batches in page-locked memory.

        ValueError if a user's id has no row. Items are compared with the maps as batches are built.
        """
        rows = rows or Rows()
        if cache.unique_uids[-1] >= rows.uid:
            raise ValueError(
                f"{cache.folder} has user {cache.unique_uids[-1]}, and table uid has {rows.uid} rows: choose data of "
                "fewer users, or train with more rows (--model.context-rows)"
            )
        if len(maps) > rows.item:
            raise ValueError(
                f"the maps have {len(maps)} items, and table item_id has {rows.item} rows: {MORE_EVENT_ROWS}"
            )
        self._cache, self._maps, self._pin = cache, maps, pin
        self._cross_rows = np.array(rows.crosses, dtype=np.uint64)
        self._scratch = threading.local()

    def build(self, numbers: NDArray[np.int64]) -> Packed:
        """Returns the samples of anchors, given by their numbers in cache.positions, in this order.

        Consecutive anchors of a user, in order of time, share their events. ValueError names the file and the
        impossible event.
        """
        anchors = self._events_of(numbers)
        samples = np.empty((SAMPLE_ROWS, len(anchors)), dtype=np.int32)
        events, actions, candidates = self._collect(anchors, samples)
        lengths = samples[LENGTH]
        packed = Packed.empty(
            PackedLayout(len(anchors), len(events)),
            tokens=int(lengths.sum()),
            candidates=candidates,
            longest=int(lengths.max(initial=0)),
            pin=self._pin,
        )
        cache, maps = self._cache, self._maps
        fault = _fill_events(
            events, cache.item, cache.timestamp, len(maps), packed.item.numpy(), packed.timestamp.numpy()
        )
        if fault == WHOLE:
            packed.action.numpy()[:] = actions
            columns = (cache.uid, cache.item, cache.timestamp, cache.is_organic, cache.is_listen_plus)
            fault = _fill_samples(
                anchors, *columns, maps.artist, maps.album, self._cross_rows, packed.timestamp.numpy(), samples
            )
        if fault != WHOLE:
            raise ValueError(
                f"{cache.folder}: event {fault} has item {cache.item[fault]} at {cache.timestamp[fault]} s; the maps "
                f"have items 0 to {len(maps) - 1}, and times fit 31 bits: the files do not belong together, or are "
                "damaged: dlrm-bench data check"
            )
        packed.samples.numpy()[:] = samples
        return packed

    def users_and_lengths(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns of anchors, given as for `build`, each one's user and the events of its history, [samples]."""
        anchors = self._events_of(numbers)
        samples = np.empty((SAMPLE_ROWS, len(anchors)), dtype=np.int32)
        self._collect(anchors, samples)
        return _gather(self._cache.uid, anchors), samples[LENGTH].astype(np.int64)

    def _events_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the events of anchors; ValueError if the file has one that the cache lacks."""
        positions, events = self._cache.positions, len(self._cache)
        assert numbers.size == 0 or 0 <= numbers.min() <= numbers.max() < len(positions)
        found = _gather(positions, numbers)
        if found.size and not 0 <= found.min() <= found.max() < events:
            raise ValueError(
                f"{self._cache.folder / f'positions_{self._cache.limits.anchors_name}.npy'} names an event outside of "
                f"0 to {events - 1}: {COPY_AGAIN}"
            )
        return found

    def _collect(
        self, anchors: NDArray[np.int64], samples: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], int]:
        """Distinct events of a batch and their actions, and Packed.candidates; fills the samples' rows up to LENGTH."""
        cache, limits = self._cache, self._cache.limits
        flags = (cache.is_listen_plus, cache.is_like, cache.is_skip)
        while True:
            events, actions = getattr(self._scratch, "events", None) or self._make_room(1 << 18)
            rows = samples[: LENGTH + 1]
            count, candidates = collect(
                anchors, cache.uid, cache.user_start, *flags, limits.pool, limits.scan, events, actions, rows
            )
            if count >= 0:
                return events[:count], actions[:count], candidates
            if count != NO_ROOM:
                raise ValueError(
                    f"{cache.folder}: event {-count - 1} is of more than one of listen+, like and skip: the files are "
                    "damaged: dlrm-bench data check"
                )
            self._make_room(2 * len(events))

    def _make_room(self, events: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Scratch memory of this thread."""
        room = np.empty(events, dtype=np.int64), np.empty(events, dtype=np.uint8)
        self._scratch.events = room
        return room


def compile_ahead() -> None:
    """Compiles the functions that find and build batches, on two artificial events, before the clock of a run; reads no
    data. It takes about 5 s, and less than a millisecond when called again."""
    columns: list[NDArray[Any]] = [np.zeros(2, dtype) for dtype in (*COLUMNS.values(), *[np.int64] * 5)]
    for column in columns:
        column.flags.writeable = False  # as maps are, which numba takes for another type
    cache = Cache.of_columns(Path(), Limits(), columns)
    builder = BatchBuilder(cache, ItemMaps(*(np.zeros(1, dtype=np.int32) for _ in range(2))))
    ranges = np.zeros((1, 2), dtype=np.int64)
    ranges.flags.writeable = False
    builder.build(WindowIndex(ranges, np.array([[0, 2]])).select(0, np.array([1])))


@compiled
def _gather(column: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns column[places]. Compiled, as numpy holds the interpreter's lock for short arrays, and where a mapped file
    was truncated, SIGBUS would repeat for ever before any other thread could end the rank."""
    found = np.empty_like(places)
    for i in range(len(places)):
        found[i] = column[places[i]]
    return found


@compiled
def _fill_events(
    events: NDArray[np.int64],
    item: NDArray[np.int64],
    timestamp: NDArray[np.int64],
    items: int,
    item_out: NDArray[np.int32],
    timestamp_out: NDArray[np.int32],
) -> int:
    """Gathers the events' columns; returns WHOLE, or the first event whose values cannot be."""
    for i in range(len(events)):
        event = events[i]
        if not (0 <= item[event] < items and 0 <= timestamp[event] < 1 << 31):
            return event
        item_out[i] = item[event]
        timestamp_out[i] = timestamp[event]
    return WHOLE


@compiled
def _fill_samples(
    anchors: NDArray[np.int64],
    uid: NDArray[np.int64],
    item: NDArray[np.int64],
    timestamp: NDArray[np.int64],
    is_organic: NDArray[np.int8],
    is_listen_plus: NDArray[np.bool_],
    artist_of: NDArray[np.int32],
    album_of: NDArray[np.int32],
    cross_rows: NDArray[np.uint64],
    event_timestamp: NDArray[np.int32],
    samples: NDArray[np.int32],
) -> int:
    """Fills the samples' rows from QUERY on; returns WHOLE, or the first event whose values cannot be."""
    context = np.empty(CONTEXT, dtype=np.int32)
    for i in range(len(anchors)):
        anchor = anchors[i]
        target, time = item[anchor], timestamp[anchor]
        if not (0 <= target < len(artist_of) and 0 <= time < 1 << 31):
            return anchor
        artist, album = artist_of[target], album_of[target]
        samples[QUERY, i] = event_timestamp[samples[END, i] - 1] if samples[LENGTH, i] else time
        samples[CANDIDATE, i] = target
        samples[CANDIDATE + 1, i] = artist
        samples[CANDIDATE + 2, i] = album
        hour = time // 3600 % 24
        context_rows(uid[anchor], target, artist, album, hour, is_organic[anchor], cross_rows, context)
        for row in range(CONTEXT):
            samples[CONTEXT_ROWS + row, i] = context[row]
        samples[LABEL, i] = is_listen_plus[anchor]
    return WHOLE
